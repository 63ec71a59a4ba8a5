"""attach and detach: turn a host model's residual connections into Attention Residuals, in place, and back.

Parameter names of the host do not change; only `<module>.depth.*` keys are added, so stock checkpoints load and the
depth parameters can be saved alone, like a LoRA.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnres_vision import families
from attnres_vision.config import AttnResConfig
from attnres_vision.host import (
    AttnResHost,
    add_final_reader,
    add_reader,
    host_class,
    remove_hooks,
    share_final_reader,
    stock_class,
)
from attnres_vision.reader import DepthAttention, begin_stream, begin_stream_with_token_mean


@dataclasses.dataclass
class _Plan:
    """Everything `attach` needs to know, found and checked before the model is touched."""

    host: nn.Module
    prefix: str
    config: AttnResConfig
    block_size: int
    sublayers: list[list[str]]  # per sublayer, the paths of its readers in the host
    exits: list[str]


def attach(model: nn.Module, config: AttnResConfig | Mapping[str, Any] | None = None, **fields: Any) -> nn.Module:
    """Replace the residual connections of a model by Attention Residuals, in place.

    The queries start at zero, where the sum form computes the same function as before.

    Args:
        model: a model of a family in `attnres_vision.families.MODELS` (timm's ViTs and their relatives).
        config: an AttnResConfig or a mapping of its fields; or give the fields themselves as keywords.

    Returns:
        The same model, whose class is now `AttnRes<its class>`.

    Raises:
        ValueError: an invalid or unfitting config, an unknown model or block class, a model that is attached already.
            The model is then untouched.
    """
    plan = _plan(model, AttnResConfig.resolve(config, **fields))
    host, config = plan.host, plan.config
    first_block = next(iter(families.blocks_of(host).values()))
    parameter = next(first_block.parameters())
    dim = _width(host)

    def reader(name: str, **kwargs: Any) -> DepthAttention:
        depth = DepthAttention(
            dim, config, name=plan.prefix + name, device=parameter.device, dtype=parameter.dtype, **kwargs
        )
        return depth.train(host.training)

    begin = begin_stream_with_token_mean if config.query == "condition" else begin_stream
    first_block.register_forward_pre_hook(begin, with_kwargs=True)
    for index, paths in enumerate(plan.sublayers):
        for path in paths:
            opens_block = index % plan.block_size == 0
            add_reader(host.get_submodule(path), reader(path, opens_block=opens_block, only_embedding=index == 0))
    for path in plan.exits:
        add_final_reader(host, path, reader(path, opens_block=True))
    for path in families.exit_modules(host, families.family_of(host).shared_exits):
        share_final_reader(host, path, plan.exits[0])
    host.attnres_config = config  # type: ignore[assignment]
    host.__class__ = host_class(cast(Any, type(host)))
    return model


def detach(model: nn.Module) -> nn.Module:
    """Give the stock model back, in place: readers, hooks and the `AttnRes` class are removed.

    Exact when all queries are zero (sum form). Otherwise the model computes something else afterwards, and a
    UserWarning says so.

    Raises:
        ValueError: the model is not attached.
    """
    hosts = [host for _, host in _hosts(model)]
    if not hosts:
        raise ValueError(f"model must be attached (attnres_vision.attach), got a plain {type(model).__name__}")
    if any(not _is_standard_residual(reader) for reader in readers(model).values()):
        warnings.warn(
            "detach: the depth queries are not zero (or the form is 'mean'), so the stock model computes a different "
            "function than the AttnRes model did",
            stacklevel=2,
        )
    for module in list(model.modules()):
        remove_hooks(module)
        if isinstance(getattr(module, "depth", None), DepthAttention):
            del module.depth
    for host in hosts:
        del host.attnres_config
        host.__class__ = stock_class(type(host))
    return model


def readers(model: nn.Module) -> dict[str, DepthAttention]:
    """The readers of a model in depth order, by the path of the module that each one sits on."""
    found = {
        name.removesuffix(".depth"): module
        for name, module in model.named_modules()
        if isinstance(module, DepthAttention)
    }
    ordered = []
    for prefix, host in _hosts(model):
        paths = [path for sublayer in _sublayers(host) for path in sublayer]
        ordered += [prefix + path for path in paths]
    order = {path: index for index, path in enumerate(ordered)}
    # The final readers stand behind all sublayers, in the order of the modules
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def attnres_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The depth parameters alone, under their names in `model.state_dict()`."""
    depth = {f"{path}.depth." for path in readers(model)}
    return {name: value for name, value in model.state_dict().items() if name[: name.rfind(".") + 1] in depth}


def load_attnres_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `attnres_state_dict` gave, into an attached model with the same depth parameters.

    Raises:
        ValueError: missing or unexpected keys, or a shape that differs; nothing is loaded then.
    """
    own = attnres_state_dict(model)
    problems = [f"missing {name}" for name in own if name not in state]
    problems += [f"unexpected {name}" for name in state if name not in own]
    problems += [
        f"{name} is {tuple(state[name].shape)}, expected {tuple(value.shape)}"
        for name, value in own.items()
        if name in state and state[name].shape != value.shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ValueError(f"state must hold exactly the depth parameters of this model: {shown}")
    model.load_state_dict(dict(state), strict=False)


def _plan(model: nn.Module, config: AttnResConfig) -> _Plan:
    if any(isinstance(module, (DepthAttention, AttnResHost)) for module in model.modules()):
        raise ValueError(f"model {type(model).__name__} has Attention Residuals already: detach it first")
    family = families.family_of(model)
    host = model.get_submodule(family.inner)
    sublayers = _sublayers(host)
    block_size = config.sublayers_per_block(len(sublayers))
    dim = _width(host)
    if dim % config.heads:
        raise ValueError(f"heads must divide the width {dim} of this model, got {config.heads}")
    if config.rank is not None and config.rank > dim:
        raise ValueError(f"rank must be between 1 and the width {dim} of this model, got {config.rank}")
    if config.query == "condition" and family.condition is None:
        raise ValueError(
            f"query must be 'static', 'token' or 'block' for {type(host).__name__}, got 'condition': the model has no "
            f"condition, {family.why_no_condition}"
        )
    exits = families.exit_modules(host, family.exits) or families.exit_modules(host, family.pruned_exits)
    if not exits:
        raise ValueError(f"{type(host).__name__} has none of the modules that read the final stream: {family.exits}")
    for path in [path for sublayer in sublayers for path in sublayer] + list(exits):
        if isinstance(host.get_submodule(path), nn.Sequential):  # it would run its reader as one more layer
            raise ValueError(f"module {path!r} is an nn.Sequential, which cannot hold a reader: name its first module")
        if hasattr(host.get_submodule(path), "depth"):
            raise ValueError(f"module {path!r} has an attribute 'depth' already, where its reader would go")
    prefix = f"{family.inner}." if family.inner else ""
    return _Plan(host, prefix, config, block_size, sublayers, list(exits))


def _sublayers(host: nn.Module) -> list[list[str]]:
    return [
        [f"{name}.{path}" for path in sublayer]
        for name, block in families.blocks_of(host).items()
        for sublayer in families.sublayer_readers(block, name)
    ]


def _hosts(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (f"{name}." if name else "", module)
        for name, module in model.named_modules()
        if isinstance(module, AttnResHost)
    ]


def _width(host: nn.Module) -> int:
    return int(cast(Any, host).embed_dim)


def _is_standard_residual(reader: DepthAttention) -> bool:
    if reader.query is None:
        return True
    if reader.config.form != "sum":
        return False
    zero = [reader.query, reader.query_proj if reader.config.rank is None else reader.query_up]
    return all(not torch.any(parameter) for parameter in zero if isinstance(parameter, Tensor))
