"""Small video files for the tests, and damaged ones."""

from __future__ import annotations

import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np


def pictures(count: int, height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """`count` pictures, uint8 (T, H, W, 3), in which a bar walks and the colour changes."""
    colour = np.random.default_rng(seed).integers(60, 180, 3)
    frames = np.empty((count, height, width, 3), np.uint8)
    frames[:] = colour
    for number in range(count):
        frames[number, :, :, 0] = number * 200 // count + 20
        left = number * 2 % (width - 8)
        frames[number, :, left : left + 8, 1] = 250
    return frames


def write_video(path: Path, frames: int | np.ndarray = 30, codec: str = "libx264", **options: Any) -> Path:
    """Encode pictures at 25 frames a second, a key frame every 12, with B frames."""
    images = pictures(frames) if isinstance(frames, int) else frames
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(25))
        stream.width, stream.height, stream.pix_fmt = images.shape[2], images.shape[1], "yuv420p"
        stream.bit_rate, stream.codec_context.gop_size = 2_000_000, 12
        stream.codec_context.max_b_frames = 2
        stream.options = {str(name): str(value) for name, value in options.items()}
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
        container.mux(stream.encode())
    return path


def write_sound(path: Path) -> Path:
    """A sound file with a video's ending."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(16000))
    return path


def damage(path: Path, low: float, high: float) -> Path:
    """Overwrite a part of a file, given as fractions of its length, with noise."""
    data = bytearray(path.read_bytes())
    start, end = int(len(data) * low), int(len(data) * high)
    data[start:end] = np.random.default_rng(0).integers(0, 256, end - start, dtype=np.uint8).tobytes()
    path.write_bytes(data)
    return path
