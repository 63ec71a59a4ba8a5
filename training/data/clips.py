"""Clips of video files: which frames a file has, and exactly these frames as small uint8 tensors.

PyAV (FFmpeg in a wheel) decodes. Frames are resized and turned into RGB inside the decoder, by area averaging: a
full-resolution frame never becomes a tensor. Frame numbers are exact: frame `i` is the one that is `i`-th in order of
presentation, whether it is reached by seeking or by decoding everything before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import torch
from av.video.reformatter import VideoReformatter

Decoder = Literal["pyav", "torchcodec"]

# Containers whose time stamps are the same after a seek as without one. FFmpeg guesses those of an MPEG program stream
# (.mpg) from where it starts to read: a seek gave wrong frames. Such files are decoded from their beginning.
_EXACT_SEEK = {"mov", "mp4", "matroska", "webm", "mpegts", "avi", "flv", "gif"}


class ClipError(ValueError):
    """A file cannot be read as the video that was asked for; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a video file holds: the number of frames, frames per second, height and width in pixels as displayed."""

    frames: int
    fps: float
    height: int
    width: int


@dataclasses.dataclass(frozen=True)
class _Index:
    """The time stamps of all frames in order of presentation; None if they cannot tell the frames apart."""

    probe: Probe
    stamps: np.ndarray | None


def probe(path: str | Path) -> Probe:
    """Look into a video file: all of its packets are read, and its first frame is decoded.

    Raises:
        FileNotFoundError: there is no such file.
        ClipError: the file is empty, is no video, has sound only, or its first frame cannot be decoded.
    """
    return _index(path).probe


def read_clip(
    path: str | Path,
    start: int = 0,
    num_frames: int | None = None,
    stride: int = 1,
    size: int | tuple[int, int] | None = None,
    decoder: Decoder = "pyav",
) -> torch.Tensor:
    """The frames `start, start + stride, ...` of a video file, uint8 RGB of shape `(T, C, H, W)`.

    Args:
        path: the video file.
        start: number of the first frame, from 0.
        num_frames: how many frames `T`; None: as many as there are.
        stride: distance of neighbouring frames of the clip, in frames of the file.
        size: `(height, width)` in pixels, or the side of a square: the frame is scaled until it just covers the size
            (aspect kept), then the centre is cut out. None: as large as it is in the file.
        decoder: `"pyav"`, or `"torchcodec"` if that is installed (its resize filter differs: pixels are not the same).

    Raises:
        FileNotFoundError: there is no such file.
        ClipError: the file is no video or is damaged, or has fewer frames than the clip needs.
        ImportError: torchcodec was asked for and does not import.
        ValueError: an argument is out of range.
    """
    if decoder not in ("pyav", "torchcodec"):
        raise ValueError(f"decoder must be 'pyav' or 'torchcodec', got {decoder!r}")
    if start < 0 or stride < 1 or (num_frames is not None and num_frames < 1):
        raise ValueError(
            f"start must be at least 0, num_frames and stride at least 1, got {start}, {num_frames}, {stride}"
        )
    index = _index(path)
    total = index.probe.frames
    count = len(range(start, total, stride)) if num_frames is None else num_frames
    wanted = range(start, start + max(count, 1) * stride, stride)
    if wanted[-1] >= total:
        raise ClipError(f"{path} has {total} frames, the clip needs frames {start} to {wanted[-1]}")
    box = _box(size, index.probe)
    if decoder == "torchcodec":
        return _read_torchcodec(path, wanted, box, index.probe)
    try:
        with av.open(str(path)) as container:
            frames = _pick(path, container, index, wanted)
            reformatter = VideoReformatter()
            return torch.stack([_small(frame, reformatter, box) for frame in frames])
    except av.error.FFmpegError as error:
        raise ClipError(f"{path} is damaged between frames {start} and {wanted[-1]}: {error.strerror}") from error


def _index(path: str | Path) -> _Index:
    path = Path(path)
    status = path.stat()
    return _make_index(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=65536)
def _make_index(path: Path, mtime_ns: int, size: int) -> _Index:
    if size == 0:
        raise ClipError(f"{path} is empty (0 bytes)")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "no"
                raise ClipError(f"{path} has no video stream (only {kinds})")
            stream = container.streams.video[0]
            stamps = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
            rate = stream.average_rate or stream.guessed_rate
            exact = not _EXACT_SEEK.isdisjoint(container.format.name.split(","))
        with av.open(str(path)) as container:  # opened anew: not every format can seek back to its start
            first = next(container.decode(video=0), None)
            if first is None:
                raise ClipError(f"{path} has no frame that can be decoded")
            height, width = (first.height, first.width)[:: -1 if _turned(first) else 1]
        if not exact or None in stamps or len(set(stamps)) < len(stamps):  # only decoding tells the frames
            with av.open(str(path)) as container:
                found = Probe(sum(1 for _ in container.decode(video=0)), float(rate or 0), height, width)
            return _Index(found, None)
    except av.error.FFmpegError as error:
        raise ClipError(f"{path} is damaged or no video: {error.strerror}") from error
    return _Index(Probe(len(stamps), float(rate or 0), height, width), np.sort(np.array(stamps, dtype=np.int64)))


def _pick(path: str | Path, container: Any, index: _Index, wanted: range) -> Iterator[Any]:
    """The decoded frames `wanted`, in order."""
    if index.stamps is None:
        frames: Iterator[tuple[int, Any]] = enumerate(container.decode(video=0))
    else:
        frames = _from_key_frame(container, index.stamps, wanted[0])
    missing = iter(wanted)
    target = next(missing)
    for number, frame in frames:
        if number > target:
            break
        if number == target:
            if getattr(frame, "is_corrupt", False):
                raise ClipError(f"{path} is damaged: frame {number} was decoded with errors")
            yield frame
            if target == wanted[-1]:
                return
            target = next(missing)
    raise ClipError(f"{path} is damaged: frame {target} of {index.probe.frames} could not be decoded")


def _from_key_frame(container: Any, stamps: np.ndarray, start: int) -> Iterator[tuple[int, Any]]:
    """(number, frame) from some frame at or before `start` on."""
    stream = container.streams.video[0]
    if start:
        container.seek(int(stamps[start]), stream=stream, backward=True)
    frames = container.decode(video=0)
    first = next(frames, None)
    if start and (first is None or first.pts is None or first.pts > stamps[start]):
        # demuxers seek by decoding time: the key frame found may be presented only after the frame that is wanted
        container.seek(int(min(stamps[0], 0)), stream=stream, backward=True)
        frames = container.decode(video=0)
        first = next(frames, None)
    while first is not None:
        number = int(np.searchsorted(stamps, first.pts)) if first.pts is not None else -1
        if 0 <= number < len(stamps) and stamps[number] == first.pts:
            yield number, first
        first = next(frames, None)


@dataclasses.dataclass(frozen=True)
class _Box:
    """What a frame is scaled to (as displayed), and the size that is cut out of its centre."""

    scaled: tuple[int, int]
    size: tuple[int, int]

    @property
    def corner(self) -> tuple[int, int]:
        return round((self.scaled[0] - self.size[0]) / 2), round((self.scaled[1] - self.size[1]) / 2)


def _box(size: int | tuple[int, int] | None, found: Probe) -> _Box:
    if size is None:
        return _Box((found.height, found.width), (found.height, found.width))
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ValueError(f"size must be (height, width), both at least 1, got {size!r}")
    scale = max(height / found.height, width / found.width)
    scaled = max(height, round(found.height * scale)), max(width, round(found.width * scale))
    return _Box(scaled, (height, width))


def _turned(frame: Any) -> bool:
    return getattr(frame, "rotation", 0) % 180 == 90


def _small(frame: Any, reformatter: VideoReformatter, box: _Box) -> torch.Tensor:
    height, width = box.scaled[:: -1 if _turned(frame) else 1]
    pixels = reformatter.reformat(frame, width, height, "rgb24", interpolation="AREA").to_ndarray()
    # phones film on their side and note the rotation (counter-clockwise) in the file
    pixels = np.rot90(pixels, round(getattr(frame, "rotation", 0) / 90))
    top, left = box.corner
    cut = pixels[top : top + box.size[0], left : left + box.size[1]]
    return torch.from_numpy(np.ascontiguousarray(cut.transpose(2, 0, 1)))


def _read_torchcodec(path: str | Path, wanted: range, box: _Box, found: Probe) -> torch.Tensor:
    try:
        from torchcodec.decoders import VideoDecoder
        from torchcodec.transforms import CenterCrop, Resize
    except (ImportError, RuntimeError, OSError) as error:  # RuntimeError: FFmpeg's shared libraries are not there
        raise ImportError(
            "decoder 'torchcodec' needs the package torchcodec (0.10 or newer) and FFmpeg's shared libraries (versions "
            "4 to 8: `apt install ffmpeg` or `conda install ffmpeg`); decoder 'pyav' needs neither"
        ) from error
    small = [] if box.scaled == (found.height, found.width) else [Resize(box.scaled)]
    cut = [] if box.scaled == box.size else [CenterCrop(box.size)]
    try:
        decoder = VideoDecoder(str(path), seek_mode="exact", transforms=small + cut)
        return decoder.get_frames_at(indices=list(wanted)).data
    except (RuntimeError, ValueError, IndexError) as error:
        raise ClipError(f"{path}: torchcodec cannot read frames {wanted[0]} to {wanted[-1]}: {error}") from error
