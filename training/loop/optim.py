"""What is trained: depth parameters in groups of their own, with timm's optimisers and schedules."""

from __future__ import annotations

from typing import Any

import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch import nn

import attnres_vision
from training.config.base import OptimConfig, ScheduleConfig


def depth_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What Attention Residuals have added to a model; empty for a standard one."""
    return [parameter for reader in attnres_vision.readers(model).values() for parameter in reader.parameters()]


def make_optimizer(model: Any, config: OptimConfig) -> torch.optim.Optimizer:
    """timm's optimiser over timm's groups, depth parameters in groups of their own."""
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    if config.layer_decay is not None:
        groups = param_groups_layer_decay(model, config.weight_decay, exempt, layer_decay=config.layer_decay)
    else:
        groups = param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=exempt)
    groups = [group for group in groups if group["params"]]
    if attnres_vision.readers(model):
        groups = attnres_vision.depth_param_groups(model, groups, query_lr_scale=config.query_lr_scale)
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps}
    options = {name: value for name, value in options.items() if value is not None}
    return create_optimizer_v2(groups, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, **options)


def make_scheduler(optimizer: torch.optim.Optimizer, config: ScheduleConfig, optim: OptimConfig, steps: int) -> Any:
    """timm's schedule, per update. It is what multiplies a group's learning rate by its `lr_scale`."""
    warmup = config.warmup_steps(steps)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.kind,
        num_epochs=steps,
        warmup_epochs=warmup,
        warmup_lr=optim.lr / max(1, warmup),  # the first update is not lost to a learning rate of zero
        min_lr=config.min_lr,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return scheduler


def scheduler_lr(optimizer: Any) -> float:
    """The learning rate of the parameters that no `lr_scale` applies to (or the largest one)."""
    return max(group["lr"] / group.get("lr_scale", 1.0) for group in optimizer.param_groups)
