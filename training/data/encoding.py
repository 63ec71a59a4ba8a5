"""Encodes clips and captions shard by shard: what `python -m training.encode` does.

A folder that was stopped is continued, a damaged shard is made again; `training/data/latents.py` says what is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from training.config.clips import ClipConfig
from training.config.encode import EncodeConfig
from training.config.io import flatten, to_fields
from training.data import encoders
from training.data.clips import ClipError, read_clip
from training.data.files import Video, find_videos, report
from training.data.latents import FORMAT, MANIFEST, what_is_wrong, write_manifest, write_shard
from training.data.text import ByteText, Text
from training.system.disk import lock_folder, read_json
from training.system.streams import generator_for

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Where things are and what they cost, not what comes out; files are compared one by one.
_NOT_COMPARED = ("output_dir", "cpu", "pipeline", "vae", "data.root", "data.decoder")


@dataclasses.dataclass(frozen=True)
class Place:
    """A clip: its video and its first frame."""

    video: Video
    start: int


def encode(config: EncodeConfig) -> dict[str, Any]:
    """Encode what is not yet encoded; returns the manifest.

    Raises:
        ValueError: the folder holds latents of another config, other files or other encoders; nothing can be encoded.
        RuntimeError: another process encodes into the folder.
    """
    videos = find_videos(config.data)
    places = [place for video in videos for place in clip_places(video, config.data)]
    check_captions(config, videos)
    encode_place = clip_encoder(config)
    folder = Path(config.output_dir)
    lock_folder(folder)
    for half_written in folder.glob(".writing-*"):
        half_written.unlink()
    manifest = open_manifest(folder, config, videos)
    captions = sorted({"", *(video.caption for video in videos)})
    with tqdm(total=len(captions) + len(places), unit="row") as bar:
        encode_captions(folder, manifest, captions, config, bar)
        for name, part in cut_into("clips", places, config.clips_per_shard):
            if todo(folder, manifest, name):
                done = [(place, to_disk({"clip": clip}, config)) for place in part for clip in encode_place(place)]
                samples = [{"file": place.video.name, "start": place.start} for place, _ in done]
                manifest["clip_shape"] = list(done[0][1]["clip"].shape) if done else manifest["clip_shape"]
                enter(folder, manifest, name, [row for _, row in done], {"samples": samples})
            bar.update(len(part))
    if not any(shard["samples"] for shard in manifest["clips"]):
        raise ValueError(f"no clip of the {len(videos)} files could be decoded")
    manifest["complete"] = True
    write_manifest(folder, manifest)
    return manifest


def clip_places(video: Video, data: ClipConfig) -> list[Place]:
    """The clips of a video, which do not overlap."""
    fitting = video.probe.frames // data.span
    count = min(data.clips_per_file or fitting, fitting)
    slots = torch.linspace(0, fitting - 1, count, dtype=torch.float64).round().long().tolist()
    return [Place(video, slot * data.span) for slot in slots]


def check_captions(config: EncodeConfig, videos: Sequence[Video]) -> None:
    """Raise a `ValueError` if there is no known text encoder, or a caption is too long for `"bytes"`."""
    if config.captions_by == "pipeline":
        encoders.pipeline_index(config.pipeline or "")
    else:
        for video in videos:
            byte_text(config).ids(video.caption)


def byte_text(config: EncodeConfig) -> ByteText:
    text = config.text
    return ByteText(text.width, text.length, text.pooled_width, text.seed)


def encode_captions(
    folder: Path, manifest: dict[str, Any], captions: Sequence[str], config: EncodeConfig, bar: tqdm
) -> None:
    """Write what is missing of the captions' shards. The text encoders are gone from memory afterwards."""
    embed: Callable[[str], Text] | None = None
    for name, part in cut_into("texts", captions, config.captions_per_shard):
        if todo(folder, manifest, name):
            embed = embed or caption_encoder(config)
            enter(folder, manifest, name, [to_disk(embed(caption), config) for caption in part], {"captions": part})
        bar.update(len(part))


def caption_encoder(config: EncodeConfig) -> Callable[[str], Text]:
    if config.captions_by == "bytes":
        return byte_text(config)
    pipeline = encoders.load_text_pipeline(config.pipeline or "", _DTYPES[config.dtype], config.device)
    return lambda caption: encoders.embed_caption(pipeline, caption, config.prompt_options)


def clip_encoder(config: EncodeConfig) -> Callable[[Place], Iterator[torch.Tensor]]:
    """Encodes the clip at a place: one tensor (C, F, H, W), or none if the file is damaged there (reported once)."""
    data = config.data
    vae = encoders.load_vae(config.vae_source, _DTYPES[config.vae_dtype], config.device)
    encoders.check_clip_shape(vae, data.num_frames, data.size)
    if config.low_memory:
        vae.enable_tiling()
        vae.enable_slicing()
    reported: set[str] = set()

    def encode_place(place: Place) -> Iterator[torch.Tensor]:
        video = place.video
        try:
            pixels = read_clip(video.path, place.start, data.num_frames, data.stride, data.size, decoder=data.decoder)
        except (ClipError, OSError) as error:
            if video.name not in reported:
                report(f"left out: {error}")
            reported.add(video.name)
            return
        generator = generator_for("posterior", vae.device, seed=config.seed, file=video.name, start=place.start)
        yield encoders.encode_clip(vae, pixels.transpose(0, 1) / 127.5 - 1, config.posterior, generator)

    return encode_place


def to_disk(row: dict[str, torch.Tensor], config: EncodeConfig) -> dict[str, torch.Tensor]:
    """A row as it is stored."""
    store = _DTYPES[config.store]
    return {name: (value.to(store) if value.is_floating_point() else value).cpu() for name, value in row.items()}


def cut_into(kind: str, rows: Sequence[Any], size: int) -> list[tuple[str, list[Any]]]:
    """File names and the rows of each."""
    parts = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
    return [(f"{kind}-{number:05d}-of-{len(parts):05d}.safetensors", part) for number, part in enumerate(parts)]


def open_manifest(folder: Path, config: EncodeConfig, videos: Sequence[Video]) -> dict[str, Any]:
    """The manifest of an earlier run of the same config on the same files, or a new one.

    Raises:
        ValueError: the folder belongs to something else.
    """
    new: dict[str, Any] = {
        "format": FORMAT,
        "complete": False,
        "config": to_fields(config),
        "sources": [{"file": video.name, "caption": video.caption, **_state(video.path)} for video in videos],
        "encoders": _encoder_files(config),
        "clip_shape": None,
        "texts": [],
        "clips": [],
    }
    path = folder / MANIFEST
    if not path.exists():
        write_manifest(folder, new)
        return new
    old = read_json(path)
    if not isinstance(old, dict) or old.get("format") != FORMAT:
        raise ValueError(f"{path} is damaged or of another version; choose another output_dir")
    before, now = flatten(old["config"]), flatten(new["config"])
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and key not in _NOT_COMPARED]
    for kind in ("sources", "encoders"):
        known = {entry["file"]: entry for entry in old[kind]}
        found = {entry["file"]: entry for entry in new[kind]}
        differing = [name for name in sorted({*known, *found}) if known.get(name) != found.get(name)]
        changed += [f"{kind}: {name}" for name in differing[:5]] + (["..."] if len(differing) > 5 else [])
    if changed:
        raise ValueError(
            f"{folder} holds latents of another config or of other files (different: {', '.join(changed)}); "
            "choose another output_dir"
        )
    return {**old, "complete": False}


def todo(folder: Path, manifest: dict[str, Any], name: str) -> bool:
    """Whether a shard is still to be made; one that is damaged is taken out of the manifest."""
    kind = name.partition("-")[0]
    for shard in manifest[kind]:
        if shard["name"] == name:
            wrong = what_is_wrong(folder, shard, thorough=True)
            if wrong is None:
                return False
            report(f"encoding again: {wrong}")
            manifest[kind].remove(shard)
            break
    return True


def enter(
    folder: Path, manifest: dict[str, Any], name: str, rows: list[dict[str, torch.Tensor]], content: dict[str, Any]
) -> None:
    """Write a shard, then note it in the manifest."""
    record: dict[str, Any] = {"file": None, "crc32": []}
    if rows:
        tensors = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        record = write_shard(folder, name, tensors)
    kind = name.partition("-")[0]
    manifest[kind] = sorted([*manifest[kind], {"name": name, **record, **content}], key=lambda shard: shard["name"])
    write_manifest(folder, manifest)


def _encoder_files(config: EncodeConfig) -> list[dict[str, Any]]:
    """The files that decide what comes out, by name within their folder."""
    vae = encoders.vae_folder(config.vae_source)
    parts = [path for path in sorted(vae.rglob("*")) if path.is_file()]
    entries = [{"file": f"vae/{path.relative_to(vae).as_posix()}", **_state(path)} for path in parts]
    if config.captions_by == "pipeline":
        root = Path(config.pipeline or "")
        texts = [path for path in sorted(root.glob("t*/**/*")) if path.is_file()]
        texts = [path for path in texts if path.relative_to(root).parts[0].startswith(("text_encoder", "tokenizer"))]
        entries += [{"file": path.relative_to(root).as_posix(), **_state(path)} for path in texts]
    return entries


def _state(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
