"""The configs of the training scripts: plain dataclasses. `training/config_io.py` reads and writes them.

Every value is checked where it is declared; a wrong one raises a `ValueError` that names the field, the value and what
is allowed. `TrainConfig` is what every training script shares, `ImageConfig` adds what image classification needs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Literal

from attnres_vision import AttnResConfig

_STREAMS = ("wds/", "hfids/", "tfds/")  # data sets of timm without an index


@dataclasses.dataclass(kw_only=True)
class ModelConfig:
    """Which model, and which residual connection runs through it.

    Args:
        name: timm model name, of the standard model (`attnres` is attached to it).
        kwargs: keyword arguments of `timm.create_model`.
        residual: `"standard"` is the unmodified timm model, `"attnres"` has Attention Residuals attached.
        attnres: fields of `attnres_vision.AttnResConfig`.
        freeze_queries: keep the depth queries at zero. The model then computes the standard residual through the
            AttnRes code: the control of a comparison.
        grad_checkpointing: recompute blocks in the backward pass.
        compile: `torch.compile` the model.
    """

    name: str = "vit_small_patch16_224"
    kwargs: dict[str, Any] = field(default_factory=dict)
    residual: Literal["standard", "attnres"] = "standard"
    attnres: dict[str, Any] = field(default_factory=dict)
    freeze_queries: bool = False
    grad_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.residual == "attnres":
            AttnResConfig.from_dict(self.attnres)
        else:
            _check("model.attnres", self.attnres, not self.attnres, "empty when model.residual is 'standard'")
            _check("model.freeze_queries", self.freeze_queries, not self.freeze_queries, "false when there are none")


@dataclasses.dataclass(kw_only=True)
class ImageDataConfig:
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
        batch_size: images per optimiser update, over all processes and accumulation steps together.
        eval_batch_size: images per evaluation batch, over all processes.
        workers: data loading processes per training process.
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
        if self.name == "digits":
            _check("data.num_classes", self.num_classes, self.num_classes == 10, "10 for data.name 'digits'")
            _check("data.input_size", self.input_size, self.input_size == 8, "8 for data.name 'digits'")
        for name in ("num_classes", "input_size", "batch_size", "eval_batch_size"):
            _at_least(f"data.{name}", getattr(self, name), 1)
        _at_least("data.workers", self.workers, 0)
        for name in ("mixup", "cutmix"):
            _at_least(f"data.{name}", getattr(self, name), 0)
        for name in ("hflip", "reprob", "mixup_prob", "mixup_switch_prob", "label_smoothing"):
            _check(f"data.{name}", getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        whole = self.val_size < 1 or self.val_size == round(self.val_size)
        _check("data.val_size", self.val_size, self.val_size > 0 and whole, "a share above 0, or a whole number")
        stream = self.name.startswith(_STREAMS)
        allowed = "given for streams: what is chosen on cannot be held out of them (data.val_split: other shards of it)"
        _check("data.test_split", self.test_split, not stream or self.test_split is not None, allowed)
        splits = (self.train_split, self.val_split, self.test_split)
        _check("data.train_split, val_split and test_split", splits, len(set(splits)) == 3, "different")
        low, high = self.crop_scale
        _check("data.crop_scale", self.crop_scale, 0 < low <= high <= 1, "0 < low <= high <= 1")
        _check("data.crop_pct", self.crop_pct, 0 < self.crop_pct <= 1, "above 0 and at most 1")

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


@dataclasses.dataclass(kw_only=True)
class OptimConfig:
    """The optimiser. Depth parameters are groups of their own, without weight decay.

    Args:
        opt: name of a timm optimiser (`timm.optim.list_optimizers()`).
        lr: peak learning rate.
        weight_decay: on matrices only.
        betas, eps: of Adam-like optimisers; None leaves the optimiser's default.
        layer_decay: factor on the learning rate per layer from the head down; None is off.
        query_lr_scale: factor on the learning rate of the depth parameters, on top of `layer_decay`.
        clip_grad: largest global gradient norm; None is off.
    """

    opt: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] | None = (0.9, 0.999)
    eps: float | None = None
    layer_decay: float | None = None
    query_lr_scale: float = 1.0
    clip_grad: float | None = 1.0

    def __post_init__(self) -> None:
        _check("optim.lr", self.lr, self.lr > 0, "above 0")
        _at_least("optim.weight_decay", self.weight_decay, 0)
        _check("optim.query_lr_scale", self.query_lr_scale, self.query_lr_scale > 0, "above 0")
        decay = self.layer_decay
        _check("optim.layer_decay", decay, decay is None or 0 < decay <= 1, "above 0 and at most 1, or null")
        _check("optim.clip_grad", self.clip_grad, self.clip_grad is None or self.clip_grad > 0, "above 0, or null")


@dataclasses.dataclass(kw_only=True)
class ScheduleConfig:
    """How long, and the learning rate over time.

    Args:
        steps: optimiser updates; give either this or `epochs`.
        epochs: passes over the training set, turned into steps once its size is known.
        kind: `"cosine"` decays to `min_lr`, `"constant"` stays at the peak after the warm-up.
        warmup: linear warm-up: a fraction of the steps when below 1, else a number of steps.
        min_lr: end of the cosine.
    """

    steps: int | None = None
    epochs: float | None = None
    kind: Literal["cosine", "constant"] = "cosine"
    warmup: float = 0.05
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.epochs) if value is not None]
        _check("schedule.steps and schedule.epochs", (self.steps, self.epochs), len(given) <= 1, "one number, one null")
        _check("schedule", given, all(value > 0 for value in given), "above 0")
        _at_least("schedule.warmup", self.warmup, 0)
        _at_least("schedule.min_lr", self.min_lr, 0)

    def total_steps(self, steps_per_epoch: float) -> int:
        """Optimiser updates of the whole run."""
        if self.steps is None and self.epochs is None:
            raise ValueError("schedule.steps or schedule.epochs must be given, got null for both")
        return self.steps if self.steps is not None else max(1, round((self.epochs or 0) * steps_per_epoch))

    def warmup_steps(self, steps: int) -> int:
        return round(self.warmup * steps) if self.warmup < 1 else min(round(self.warmup), steps)


@dataclasses.dataclass(kw_only=True)
class TrainConfig:
    """What every training script shares.

    Args:
        output_dir: the run's folder: config, metrics, checkpoints, result.
        seed: of initial weights, data order, augmentation, drop path.
        resume: `"auto"` continues from the newest whole checkpoint in `output_dir` if there is one, `"none"` starts
            over (and removes what the folder holds of an earlier run), a path continues from that checkpoint.
        mixed_precision: `"bf16"` is autocast with fp32 weights.
        grad_accumulation: micro-batches per optimiser update.
        ema_decay: decay of a moving average of the weights (evaluated instead of the weights); None is off.
        log_interval, eval_interval, checkpoint_interval: in steps; None for evaluation or checkpoints: at the end only.
        keep_checkpoints: how many of the newest checkpoints stay on disk.
        log_with: an accelerate tracker ("tensorboard", "wandb", "trackio", ...) next to `metrics.jsonl`; None is off.
        profile: record hidden-state and gradient norms against depth at start and end, and mean depth weights.
        cpu: run on the CPU even where there is a GPU.
        num_processes: how many processes the launcher is expected to start; None asks the launcher's environment.
    """

    output_dir: str = "runs/latest"
    seed: int = 0
    resume: str = "auto"
    mixed_precision: Literal["no", "bf16"] = "no"
    grad_accumulation: int = 1
    ema_decay: float | None = None
    log_interval: int = 50
    eval_interval: int | None = None
    checkpoint_interval: int | None = None
    keep_checkpoints: int = 2
    log_with: str | None = None
    profile: bool = True
    cpu: bool = False
    num_processes: int | None = None

    def __post_init__(self) -> None:
        _at_least("seed", self.seed, 0)
        for name in ("grad_accumulation", "log_interval", "keep_checkpoints"):
            _at_least(name, getattr(self, name), 1)
        for name in ("eval_interval", "checkpoint_interval", "num_processes"):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "at least 1, or null")
        decay = self.ema_decay
        _check("ema_decay", decay, decay is None or 0 < decay < 1, "between 0 and 1, or null")


@dataclasses.dataclass(kw_only=True)
class ImageConfig(TrainConfig):
    """Training a timm classifier: `python -m training.image`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: Literal["softmax", "bce"] = "softmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        per_update, parts = self.data.batch_size, self.grad_accumulation
        _check("data.batch_size", per_update, per_update % parts == 0, f"a multiple of grad_accumulation ({parts})")


def _check(name: str, value: Any, valid: bool, allowed: str) -> None:
    if not valid:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _at_least(name: str, value: float, low: float) -> None:
    _check(name, value, value >= low, f"at least {low}")
