"""Optimiser groups for the depth parameters.

The step size of the queries is part of the method: one Adam step of size lr moves a static score by up to
lr * sum|k|. So depth parameters get a learning-rate factor of their own, on top of layer decay, and no weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from attnres_vision.attach.attach import readers


def depth_param_groups(
    model: nn.Module,
    groups: Sequence[dict[str, Any]] | None = None,
    *,
    query_lr_scale: float = 1.0,
    lr: float | None = None,
) -> list[dict[str, Any]]:
    """Split the depth parameters out of a model's optimiser groups.

    Args:
        model: an attached model; a stock model's groups come back as they are.
        groups: optimiser groups, such as those of timm's `param_groups_layer_decay` or `param_groups_weight_decay`
            (give these `no_weight_decay_list=model.no_weight_decay()`). Default: one group of all trainable parameters.
        query_lr_scale: factor on the learning rate of the depth parameters, on top of a group's own `lr_scale`.
        lr: base learning rate. Given, every group gets its own `lr` (base times `lr_scale`), which torch's optimisers
            read; left out, groups carry `lr_scale`, which timm's optimisers and schedulers read.

    Returns:
        The groups, each followed by its depth parameters, if it has any, as a group of their own.

    Raises:
        ValueError: a `query_lr_scale` that is not positive, or groups that leave out a trainable depth parameter.
    """
    if not query_lr_scale > 0:
        raise ValueError(f"query_lr_scale must be above 0, got {query_lr_scale!r} (freeze parameters to train none)")
    if groups is None:
        groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    depth = {id(parameter) for reader in readers(model).values() for parameter in reader.parameters()}
    split: list[dict[str, Any]] = []
    seen = set()
    for group in groups:
        params = list(group["params"])
        rest = [parameter for parameter in params if id(parameter) not in depth]
        ours = [parameter for parameter in params if id(parameter) in depth]
        seen |= {id(parameter) for parameter in ours}
        if rest:
            split.append({**group, "params": rest})
        if ours:
            scaled = {"lr": group["lr"] * query_lr_scale} if "lr" in group else {}
            scaled |= {"lr_scale": group.get("lr_scale", 1.0) * query_lr_scale} if "lr" not in group else {}
            # use_fallback: AdamW, for timm's Muon, whose orthogonalised steps are far too large for a query's matrix
            split.append({**group, "params": ours, "weight_decay": 0.0, "use_fallback": True, **scaled})
    missing = [
        f"{path}.depth.{name}"
        for path, reader in readers(model).items()
        for name, parameter in reader.named_parameters()
        if parameter.requires_grad and id(parameter) not in seen
    ]
    if missing:
        raise ValueError(f"groups must hold every trainable depth parameter, missing: {', '.join(missing[:5])}")
    if lr is not None:
        split = [{"lr": lr * group.get("lr_scale", 1.0), **group} for group in split]
    return split
