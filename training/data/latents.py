"""Encoded clips on disk: shards of latents and of text embeddings with a manifest, and the data set that reads them.

A folder holds `clips-*.safetensors` (`clip`: one row a clip), `texts-*.safetensors` (`text`, `text_mask`, `pooled`: one
row a caption, the empty one included) and `manifest.json`: what made them, from which files, what is in each shard with
its checksum, and whether everything is there. A shard is written under another name, flushed to the disk, renamed, and
only then entered into the manifest; a row that is read is compared with its checksum. `encoding.py` writes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch.utils.data import Dataset

from training.config.clips import VideoDataConfig
from training.data.files import described, sides
from training.data.text import Text
from training.system.disk import flush_to_disk, read_json, sha256, write_json

MANIFEST = "manifest.json"
FORMAT = 1


def write_shard(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write a shard whole or not at all; returns its name, size, hash and the checksums of its rows."""
    writing, final = folder / f".writing-{name}", folder / name
    safetensors.torch.save_file(tensors, writing)
    flush_to_disk(writing)
    record = {"file": name, "bytes": writing.stat().st_size, "sha256": sha256(writing)}
    os.replace(writing, final)
    flush_to_disk(folder)
    rows = len(next(iter(tensors.values())))
    return {
        **record,
        "crc32": [checksum({key: value[row] for key, value in tensors.items()}) for row in range(rows)],
    }


def what_is_wrong(folder: Path, shard: dict[str, Any], thorough: bool) -> str | None:
    """Why a shard is not what the manifest says; None if it is. `thorough` reads the whole file."""
    if shard["file"] is None:  # no clip of this shard could be decoded
        return None
    path = folder / shard["file"]
    if not path.is_file():
        return f"{path} is missing"
    if path.stat().st_size != shard["bytes"]:
        return f"{path} has {path.stat().st_size} bytes, not {shard['bytes']}"
    if thorough and sha256(path) != shard["sha256"]:
        return f"{path} is damaged (its hash differs)"
    return None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_json(folder / MANIFEST, manifest)
    flush_to_disk(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a whole set of latents.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged or of another version, encoding was not finished, or a shard is not as it says.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"data.root {str(folder)!r} has no {MANIFEST}: it is no output of training.encode")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is damaged or of another version (format {FORMAT} is known)")
    if not manifest["complete"]:
        raise ValueError(f"{folder} is not whole: run the same training.encode command again, it continues")
    for shard in (*manifest["texts"], *manifest["clips"]):
        wrong = what_is_wrong(folder, shard, thorough=False)
        if wrong is not None:
            raise ValueError(f"{wrong}: run the same training.encode command again, it replaces what is damaged")
    return manifest


def checksum(row: dict[str, torch.Tensor]) -> int:
    """One number for a row of a shard."""
    number = 0
    for name in sorted(row):
        number = zlib.crc32(row[name].contiguous().reshape(-1).view(torch.uint8).numpy().data, number)
    return number


class Shards:
    """Reads single rows of the shards of a folder; files stay open, in every process its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[tuple[int, str], Any] = {}

    def row(self, shard: dict[str, Any], row: int) -> dict[str, torch.Tensor]:
        """Raises a `ValueError` that names the file if the row is not what was written."""
        key = (os.getpid(), shard["file"])
        path = self.folder / shard["file"]
        try:
            if key not in self._open:
                self._open[key] = safetensors.safe_open(path, framework="pt")
            file = self._open[key]
            names: list[str] = file.keys()
            tensors = {name: file.get_slice(name)[row] for name in names}
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if checksum(tensors) != shard["crc32"][row]:
            raise ValueError(
                f"{path} is damaged (row {row} differs from its checksum): run the same training.encode command "
                "again, it replaces what is damaged"
            )
        return tensors

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_open": {}}


class LatentClips(Dataset):
    """Encoded clips with their captions' embeddings; no randomness. See `training.data.videos.ClipData`.

    Args:
        folder: what `python -m training.encode` wrote.
        manifest: of `read_manifest`.
        keep: (file name, first frame) -> whether the clip belongs to this data set.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], keep: Callable[[str, int], bool]) -> None:
        caption_of = {source["file"]: source["caption"] for source in manifest["sources"]}
        self.shards = Shards(folder)
        self.rows = [
            (shard, row)
            for shard in manifest["clips"]
            for row, sample in enumerate(shard["samples"])
            if keep(sample["file"], sample["start"])
        ]
        self.captions = [caption_of[shard["samples"][row]["file"]] for shard, row in self.rows]
        self.caption_texts = sorted(set(self.captions))
        self.text_rows = {
            caption: (shard, row) for shard in manifest["texts"] for row, caption in enumerate(shard["captions"])
        }
        self.empty_text = self.text_of("")
        channels, frames, height, width = manifest["clip_shape"]
        self.clip_shape = (channels, frames, height, width)

    def text_of(self, caption: str) -> Text:
        """Embeddings of one of the captions that were encoded, floating point ones as float32."""
        return {
            name: value.float() if value.is_floating_point() else value
            for name, value in self.shards.row(*self.text_rows[caption]).items()
        }

    def set_epoch(self, epoch: int) -> None:
        """Nothing is drawn: every epoch has the same clips."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        clip = self.shards.row(*self.rows[index])["clip"].float()
        return {"clip": clip, **self.text_of(self.captions[index]), "index": torch.tensor(index)}


def latent_datasets(config: VideoDataConfig) -> tuple[LatentClips, LatentClips, LatentClips]:
    """The training, the validation and the test set of encoded clips, split as files are; they share no frame.

    Raises:
        FileNotFoundError, ValueError: as in `read_manifest` and `video_files.sides`; one of the sets is empty.
    """
    folder = Path(config.root or "")
    manifest = read_manifest(folder)
    starts: dict[str, list[int]] = {}
    for shard in manifest["clips"]:
        for sample in shard["samples"]:
            starts.setdefault(sample["file"], []).append(sample["start"])
    side: dict[tuple[str, int], str] = {}
    of_file = sides(list(starts), config) if config.val_split == "file" else {}
    for name, values in starts.items():
        parts = [of_file[name]] * len(values) if of_file else _in_turn(len(values), config)
        side.update({(name, start): part for start, part in zip(sorted(values), parts, strict=True)})

    def clips_of(part: str) -> LatentClips:
        return LatentClips(folder, manifest, lambda name, start: side[name, start] == part)

    train, val, test = clips_of("train"), clips_of("val"), clips_of("test")
    for part, dataset in (("training", train), ("validation", val), ("test", test)):
        if len(dataset) == 0:
            raise ValueError(
                f"the {part} set is empty: {sum(map(len, starts.values()))} clips of {len(starts)} files in {folder}, "
                f"{described(config)}"
            )
    return train, val, test


def _in_turn(count: int, config: VideoDataConfig) -> list[str]:
    """What the clips of a file are for, in time: training, test, validation; less than three are for training."""
    val, test = (max(1, round(count * fraction)) for fraction in (config.val_fraction, config.test_fraction))
    train = count - val - test
    return ["train"] * count if train < 1 else ["train"] * train + ["test"] * test + ["val"] * val
