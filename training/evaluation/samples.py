"""Samples to look at: noise at fixed seeds, guidance, and clips as MP4, GIF and PNG.

Clips are (B, C, F, H, W) in [-1, 1] everywhere, frames for writing are uint8 (F, H, W, 3). What is written for a run
(`write_samples`) is what the report later puts next to that of the other runs.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from training.system.streams import generator_for

Predict = Callable[[Tensor, Tensor], Tensor]
Row = tuple[str, np.ndarray]  # label, frames (F, H, W, 3) uint8

_SMALLEST_SIDE = 192  # pixels: MP4 and GIF of smaller clips are enlarged to this, whole numbers of times
_LARGEST_SIDE = 256  # strips of larger clips are reduced to this: they are for sheets, the MP4 keeps every pixel
_SHEET_FRAMES = 16
_GAP = 2


def fixed_noise(seed: int, count: int, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Noise (count, *shape) of which row i depends on (seed, i) alone: drawn on the CPU, the same on every device."""
    return torch.stack([noise_row(seed, index, shape) for index in range(count)]).to(device)


def noise_row(seed: int, index: int, shape: Sequence[int]) -> Tensor:
    """Row `index` of `fixed_noise`."""
    return torch.randn(tuple(shape), generator=generator_for("sample", seed=seed, index=index))


def share_out(accelerator: Any, batch: int, count: int, make: Callable[[list[int]], Tensor]) -> Iterator[Tensor]:
    """Clips 0..count-1, in this order and on the CPU, of which every process makes its share and gets all.

    Every process calls `make` equally often, with equally many clips: a sharded model takes all of them for one.

    Args:
        accelerator: of the processes.
        batch: clips that all of them make at once.
        count: how many clips.
        make: makes the clips of these numbers.
    """
    for first in range(0, count, batch):
        indices = list(range(first, min(count, first + batch)))
        with accelerator.split_between_processes(list(indices), apply_padding=True) as share:
            made = make(share)
        clips = accelerator.gather(made.contiguous())
        made_by = accelerator.gather(torch.tensor(share, device=made.device)).tolist()
        yield clips[[made_by.index(index) for index in indices]].cpu()  # without what filled up the shares


def guided(
    model: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor],
    text: Mapping[str, Tensor],
    empty_text: Mapping[str, Tensor],
    scale: float,
) -> Predict:
    """Classifier-free guidance: a prediction from the empty text, moved `scale` times the way to that from the text.

    Args:
        model: prediction from (noisy (B, C, F, H, W), timestep (B,), text tensors (B, ...)).
        text: text tensors of the samples, (B, ...) each.
        empty_text: the same of the empty caption, without the batch dimension.
        scale: 1.0 is no guidance and costs one prediction a step; everything else costs two, in one batch.

    Returns:
        `predict(noisy, timestep) -> prediction`, what the sampling loop takes.
    """
    if scale == 1.0:
        return lambda noisy, timestep: model(noisy, timestep, text)
    both = {name: torch.cat([empty_text[name].to(value).expand_as(value), value]) for name, value in text.items()}

    def predict(noisy: Tensor, timestep: Tensor) -> Tensor:
        prediction = model(torch.cat([noisy, noisy]), torch.cat([timestep, timestep]), both)
        unconditional, conditional = prediction.chunk(2)
        return unconditional + scale * (conditional - unconditional)

    return predict


def to_frames(clip: Tensor) -> np.ndarray:
    """Pixels of one clip (C, F, H, W) in [-1, 1], C = 1 or 3, as uint8 (F, H, W, 3); values outside are clipped.

    Raises:
        ValueError: another shape, or a value that is not finite.
    """
    if clip.ndim != 4 or clip.shape[0] not in (1, 3):
        raise ValueError(f"clip must be (C, F, H, W) with 1 or 3 channels, got shape {tuple(clip.shape)}")
    if not torch.isfinite(clip).all():
        raise ValueError("clip must be finite, got nan or inf: the model that made it has diverged")
    pixels = ((clip.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return pixels.expand(3, *pixels.shape[1:]).permute(1, 2, 3, 0).contiguous().numpy()


def write_mp4(path: Path, frames: np.ndarray, fps: float) -> None:
    """H.264 in yuv420p, which every browser and player shows. Small clips are enlarged, odd sides get a pixel more.

    Args:
        path: file to write.
        frames: (F, H, W, 3) uint8.
        fps: frames per second.
    """
    import av  # only this function needs it: an extra of the package

    frames = _enlarge(frames)
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=max(1, round(fps)))
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.options = {"crf": "12"}  # next to no loss: these are for looking closely
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())


def write_gif(path: Path, frames: np.ndarray, fps: float) -> None:
    """An endless animation of frames (F, H, W, 3) uint8, in a palette of their own: 256 colours for the whole clip."""
    _animate(path, _enlarge(frames), fps)


def _animate(path: Path, frames: np.ndarray, fps: float) -> None:
    palette = Image.fromarray(frames.reshape(-1, *frames.shape[2:])).quantize(256)
    colours = np.array(palette.getpalette()).reshape(-1, 3)
    for exact in (0, 255):  # letters and paper stay black and white: what is next to them gives way
        distance = np.abs(colours - exact).max(1)
        colours[distance <= max(12, distance.min())] = exact
    palette.putpalette(colours.flatten().tolist())
    pictures = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    duration = max(20, round(1000 / fps))  # ms; browsers slow down what is faster
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=duration, loop=0)


def write_sheet(path: Path, rows: Sequence[Row], title: str = "") -> None:
    """A contact sheet: a row per clip with its label in front, a column per frame; small frames are enlarged.

    Of more than 16 frames, 16 are shown, evenly spaced, first and last among them.
    """
    rows = [(label, frames[_spaced(len(frames))]) for label, frames in rows]
    side = max(1, min(6, 96 // max(1, min(min(frames.shape[1:3]) for _, frames in rows))))
    labels = max(_text_width(label) for label, _ in rows) + 3 * _GAP
    pictures = [_strip(_times(frames, side), gap=_GAP) for _, frames in rows]
    top = 18 if title else 0
    size = (labels + max(p.shape[1] for p in pictures), top + sum(p.shape[0] + 2 * _GAP for p in pictures))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((_GAP, _GAP), title, fill="black", font=_font())
    for (label, _), picture in zip(rows, pictures, strict=True):
        draw.text((_GAP, top + picture.shape[0] // 2 - 6), label, fill="black", font=_font())
        sheet.paste(Image.fromarray(picture), (labels, top))
        top += picture.shape[0] + 2 * _GAP
    sheet.save(path)


def write_grid_gif(path: Path, rows: Sequence[tuple[str, Sequence[Row]]], fps: float) -> None:
    """One animation of several clips: a row each of (label, clips), the clips' own labels above the first row."""
    clips = [frames for _, cells in rows for _, frames in cells]
    count, side = max(len(frames) for frames in clips), max(1, 120 // min(clips[0].shape[1:3]))
    height, width = clips[0].shape[1] * side, clips[0].shape[2] * side
    heads = [_wrapped(label, width) for label, _ in rows[0][1]]
    left, top = max(_text_width(label) for label, _ in rows) + 3 * _GAP, 4 + 14 * max(map(len, heads))
    step = width + 4 * _GAP
    canvas = Image.new("RGB", (left + len(heads) * step, top + len(rows) * (height + 2 * _GAP)), "white")
    draw = ImageDraw.Draw(canvas)
    for column, head in enumerate(heads):
        for number, line in enumerate(head):
            draw.text((left + column * step, 14 * number), line, fill="black", font=_font())
    for row, (label, _) in enumerate(rows):
        draw.text((_GAP, top + row * (height + 2 * _GAP) + height // 2 - 6), label, fill="black", font=_font())
    frames = np.repeat(np.asarray(canvas)[None], count, axis=0)
    for row, (_, cells) in enumerate(rows):
        for column, (_, clip) in enumerate(cells):
            large = _times(clip, side)
            y, x = top + row * (height + 2 * _GAP), left + column * step
            for index in range(count):  # a shorter clip begins again
                frames[index, y : y + height, x : x + width] = large[index % len(large)]
    _animate(path, frames, fps)


def write_samples(
    folder: Path,
    clips: Tensor,
    captions: Sequence[str],
    *,
    seed: int,
    fps: float = 8.0,
    real: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Write the samples of a run: an MP4 and a lossless strip of frames each, a GIF and a contact sheet of all.

    Args:
        folder: the run's folder; everything goes to `samples/` in it, which is emptied before.
        clips: generated pixels, (B, C, F, H, W) in [-1, 1].
        captions: what each was made from.
        seed: what their noise was drawn from; for the record.
        fps: frames per second of MP4 and GIF.
        real: a real clip (C, F, H, W) per caption, for the rows to compare with.

    Returns:
        The field `samples` of `result.json`: seed, fps, captions, and paths relative to `folder`.

    Raises:
        ValueError: there is not one caption per clip, or a clip is no picture (`to_frames`).
    """
    if len(captions) != len(clips) or not len(clips):
        raise ValueError(f"captions must be one per clip, at least one, got {len(captions)} for {len(clips)} clips")
    made = [to_frames(clip) for clip in clips]
    known = {caption: to_frames(clip) for caption, clip in (real or {}).items() if caption in captions}
    shutil.rmtree(folder / "samples", ignore_errors=True)
    (folder / "samples").mkdir(parents=True)
    movies, strips, originals = [], [], {}
    for index, frames in enumerate(made):
        movies.append(f"samples/clip_{index}.mp4")
        strips.append(f"samples/clip_{index}.png")
        write_mp4(folder / movies[-1], frames, fps)
        write_strip(folder / strips[-1], frames)
    for index, (caption, frames) in enumerate(known.items()):
        originals[caption] = f"samples/real_{index}.png"
        write_strip(folder / originals[caption], frames)
    rows: list[Row] = []
    for caption in dict.fromkeys(captions):
        same = [frames for text, frames in zip(captions, made, strict=True) if text == caption]
        rows += [(f"{caption}, real", known[caption])] if caption in known else []
        rows += [(f"{caption}, sample {number}", frames) for number, frames in enumerate(same, start=1)]
    write_sheet(folder / "samples/sheet.png", rows)
    cells = [(caption, frames) for caption, frames in zip(captions, made, strict=True)]
    beside = [(caption, known[caption]) for caption in captions] if set(captions) <= set(known) else []
    grid = ([("real", beside)] if beside else []) + [("sample", cells)]
    write_grid_gif(folder / "samples/clips.gif", grid, fps)
    return {
        "seed": seed,
        "fps": fps,
        "frames": made[0].shape[0],
        "captions": list(captions),
        "sheet": "samples/sheet.png",
        "gif": "samples/clips.gif",
        "mp4": movies,
        "strips": strips,
        "real": originals,
    }


def write_strip(path: Path, frames: np.ndarray) -> None:
    """All frames side by side as a PNG without loss; a side over 256 pixels is reduced, for it is meant for sheets."""
    scale = _LARGEST_SIDE / max(frames.shape[1:3])
    if scale < 1:
        size = (max(1, round(frames.shape[2] * scale)), max(1, round(frames.shape[1] * scale)))
        frames = np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in frames])
    Image.fromarray(_strip(frames, gap=0)).save(path)


def read_strip(path: Path, frames: int) -> np.ndarray:
    """What `write_strip` wrote, as (F, H, W, 3) uint8."""
    picture = np.asarray(Image.open(path).convert("RGB"))
    return np.stack(np.split(picture, frames, axis=1))


def _strip(frames: np.ndarray, gap: int) -> np.ndarray:
    padded = np.pad(frames, ((0, 0), (0, 0), (0, gap), (0, 0)), constant_values=255)
    return np.concatenate(list(padded), axis=1)


def _spaced(count: int) -> np.ndarray:
    return np.linspace(0, count - 1, min(count, _SHEET_FRAMES)).round().astype(int)


def _enlarge(frames: np.ndarray) -> np.ndarray:
    """Nearest neighbour, a whole number of times, until the short side can be looked at."""
    return _times(frames, max(1, math.ceil(_SMALLEST_SIDE / min(frames.shape[1:3]))))


def _times(frames: np.ndarray, factor: int) -> np.ndarray:
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def _font() -> Any:
    return ImageFont.load_default(12)


def _wrapped(text: str, width: int) -> list[str]:
    """The words of a caption in lines that fit, as far as single words do; at most three lines."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if not lines[-1] or _text_width(longer) <= width else [*lines, word]
    return lines if len(lines) <= 3 else [*lines[:2], f"{lines[2]} ..."]


def _text_width(text: str) -> int:
    return math.ceil(_font().getlength(text))
