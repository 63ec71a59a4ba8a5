"""What every training script's config has, and how values are checked. `io.py` reads and writes configs.

Every value is checked where it is declared; a wrong one raises a `ValueError` that names the field, the value and what
is allowed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Literal

import torch

from attnres_vision import AttnResConfig


def check(name: str, value: Any, valid: bool, allowed: str) -> None:
    if not valid:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def at_least(name: str, value: float, low: float) -> None:
    check(name, value, value >= low, f"at least {low}")


def pick_device(cpu: bool) -> torch.device:
    """The GPU where there is one, unless `cpu` says not to take it."""
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


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
            check("model.attnres", self.attnres, not self.attnres, "empty when model.residual is 'standard'")
            check("model.freeze_queries", self.freeze_queries, not self.freeze_queries, "false when there are none")


@dataclasses.dataclass(kw_only=True)
class LoadingConfig:
    """Batches of whatever data.

    Args:
        batch_size: samples per optimiser update, over all processes and accumulation steps together.
        eval_batch_size: samples per evaluation batch, over all processes.
        workers: data loading processes per training process.
    """

    batch_size: int = 16
    eval_batch_size: int = 16
    workers: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "eval_batch_size"):
            at_least(f"data.{name}", getattr(self, name), 1)
        at_least("data.workers", self.workers, 0)


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
        check("optim.lr", self.lr, self.lr > 0, "above 0")
        at_least("optim.weight_decay", self.weight_decay, 0)
        check("optim.query_lr_scale", self.query_lr_scale, self.query_lr_scale > 0, "above 0")
        decay = self.layer_decay
        check("optim.layer_decay", decay, decay is None or 0 < decay <= 1, "above 0 and at most 1, or null")
        check("optim.clip_grad", self.clip_grad, self.clip_grad is None or self.clip_grad > 0, "above 0, or null")


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
        check("schedule.steps and schedule.epochs", (self.steps, self.epochs), len(given) <= 1, "one number, one null")
        check("schedule", given, all(value > 0 for value in given), "above 0")
        at_least("schedule.warmup", self.warmup, 0)
        at_least("schedule.min_lr", self.min_lr, 0)

    def total_steps(self, steps_per_epoch: float) -> int:
        """Optimiser updates of the whole run."""
        if self.steps is None and self.epochs is None:
            raise ValueError("schedule.steps or schedule.epochs must be given, got null for both")
        return self.steps if self.steps is not None else max(1, round((self.epochs or 0) * steps_per_epoch))

    def warmup_steps(self, steps: int) -> int:
        return round(self.warmup * steps) if self.warmup < 1 else min(round(self.warmup), steps)


@dataclasses.dataclass(kw_only=True)
class TrainConfig:
    """What every training script shares; `model` and `data` are of the task's own classes.

    Args:
        model, data, optim, schedule: parts with classes of their own.
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
    model: ModelConfig = field(default_factory=ModelConfig)
    data: LoadingConfig = field(default_factory=LoadingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        for name in ("grad_accumulation", "log_interval", "keep_checkpoints"):
            at_least(name, getattr(self, name), 1)
        for name in ("eval_interval", "checkpoint_interval", "num_processes"):
            value = getattr(self, name)
            check(name, value, value is None or value >= 1, "at least 1, or null")
        decay = self.ema_decay
        check("ema_decay", decay, decay is None or 0 < decay < 1, "between 0 and 1, or null")
        per_update, parts = self.data.batch_size, self.grad_accumulation
        check("data.batch_size", per_update, per_update % parts == 0, f"a multiple of grad_accumulation ({parts})")

    @property
    def device(self) -> torch.device:
        return pick_device(self.cpu)
