"""The config of `training.image`: which images, augmented how."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Literal

from training.config.base import LoadingConfig, TrainConfig, at_least, check

BUILT_IN = {"digits": (10, 8)}  # classes and input size of the data sets in `training.data.images.BUILT_IN`
_STREAMS = ("wds/", "hfids/", "tfds/")  # data sets of timm without an index


@dataclasses.dataclass(kw_only=True)
class ImageDataConfig(LoadingConfig):
    """Where images come from and how they are augmented.

    Args:
        name: `"digits"` (scikit-learn's 8x8 digits), `""` (a folder of class folders or of tar files, or one tar), or
            a name of `timm.data.create_dataset`: `"wds/..."`, `"hfds/..."`, `"hfids/..."`, `"torch/..."`.
        root: the data set's folder, or the root handed to timm.
        train_split, val_split: names of the splits; for a folder, the folders below `root`.
        test_split: the split that is reported; everything is chosen on `val_split`. None: for a folder, `"test"` where
            `root` has that; else `val_split` is what is reported, and `val_size` of the training set is chosen on.
        val_size: what is held out of the training set then, of every class: a share of its images when below 1, else
            a number of them.
        train_samples, val_samples, test_samples: sizes, for streams (`wds/`, `hfids/`) that do not state their own.
        num_classes: number of classes.
        input_size: side of the square input, in pixels.
        batch_size, eval_batch_size, workers: as in `LoadingConfig`.
        augment: train-time augmentation, `"inception"` (random resized crop, flip, RandAugment, erasing as below) or
            `"none"` (resize and centre crop). Digits have none.
        crop_scale: area range of the random resized crop.
        hflip, color_jitter, auto_augment, reprob: as in `timm.data.create_transform`.
        interpolation: resize filter of timm.
        crop_pct: evaluation resizes the short side to `input_size / crop_pct`, then crops the centre.
        mean, std: per channel, on values in 0..1.
        mixup, cutmix: Beta parameters, 0 switches one off; mixup_prob, mixup_switch_prob, mixup_mode: as in timm.
        label_smoothing: mass spread over all classes.
    """

    name: str = ""
    root: str | None = None
    train_split: str = "train"
    val_split: str = "val"
    test_split: str | None = None
    val_size: float = 0.01
    train_samples: int | None = None
    val_samples: int | None = None
    test_samples: int | None = None
    num_classes: int = 1000
    input_size: int = 224
    batch_size: int = 1024
    eval_batch_size: int = 1024
    workers: int = 8
    augment: Literal["inception", "none"] = "inception"
    crop_scale: tuple[float, float] = (0.08, 1.0)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    reprob: float = 0.0
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name in BUILT_IN:
            classes, size = BUILT_IN[self.name]
            for name, fixed in (("num_classes", classes), ("input_size", size)):
                value = getattr(self, name)
                check(f"data.{name}", value, value == fixed, f"{fixed} for data.name {self.name!r}")
        for name in ("num_classes", "input_size"):
            at_least(f"data.{name}", getattr(self, name), 1)
        for name in ("mixup", "cutmix"):
            at_least(f"data.{name}", getattr(self, name), 0)
        for name in ("hflip", "reprob", "mixup_prob", "mixup_switch_prob", "label_smoothing"):
            check(f"data.{name}", getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        whole = self.val_size < 1 or self.val_size == round(self.val_size)
        check("data.val_size", self.val_size, self.val_size > 0 and whole, "a share above 0, or a whole number")
        stream = self.name.startswith(_STREAMS)
        allowed = "given for streams: what is chosen on cannot be held out of them (data.val_split: other shards of it)"
        check("data.test_split", self.test_split, not stream or self.test_split is not None, allowed)
        splits = (self.train_split, self.val_split, self.test_split)
        check("data.train_split, val_split and test_split", splits, len(set(splits)) == 3, "different")
        low, high = self.crop_scale
        check("data.crop_scale", self.crop_scale, 0 < low <= high <= 1, "0 < low <= high <= 1")
        check("data.crop_pct", self.crop_pct, 0 < self.crop_pct <= 1, "above 0 and at most 1")

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


@dataclasses.dataclass(kw_only=True)
class ImageConfig(TrainConfig):
    """Training a timm classifier: `python -m training.image`."""

    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    loss: Literal["softmax", "bce"] = "softmax"
