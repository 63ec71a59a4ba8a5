"""attach and detach: turn a host model's residual connections into Attention Residuals, in place, and back.

Parameter names of the host do not change; only `<module>.depth.*` keys are added, so stock checkpoints load and the
depth parameters can be saved alone, like a LoRA.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnres_vision.attach import begin, families
from attnres_vision.attach.groups import form_groups
from attnres_vision.attach.hooks import add_final_reader, add_reader, remove_hooks, share_final_reader
from attnres_vision.attach.host import AttnResHost, host_class, stock_class
from attnres_vision.attach.plan import Plan, make_plan, reader_places
from attnres_vision.config import AttnResConfig
from attnres_vision.stream.reader import DepthAttention


def attach(model: nn.Module, config: AttnResConfig | Mapping[str, Any] | None = None, **fields: Any) -> nn.Module:
    """Replace the residual connections of a model by Attention Residuals, in place.

    The queries start at zero, where the sum form computes the same function as before.

    Args:
        model: a model of a class in `attnres_vision.families.MODELS`: timm's ViTs and their relatives, diffusers'
            transformers, and what installed packages add.
        config: an AttnResConfig or a mapping of its fields; or give the fields themselves as keywords.

    Returns:
        The same model, whose class is now `AttnRes<its class>`.

    Raises:
        ValueError: an invalid or unfitting config, an unknown model or block class, a model that is attached already.
            The model is then untouched.
    """
    plan = make_plan(model, AttnResConfig.resolve(config, **fields))
    host, family = plan.host, plan.family
    parameter = next(plan.first_block.parameters())
    # diffusers' dtype: that of the parameters that are not kept in fp32
    dtype = getattr(host, "dtype", parameter.dtype)

    def reader(path: str, stream: str, **options: Any) -> DepthAttention:
        depth = DepthAttention(
            plan.width(stream),
            plan.config,
            name=plan.prefix + path,
            stream=stream,
            device=parameter.device,
            dtype=dtype,
            **options,
            **plan.given(path, stream),
        )
        return depth.train(host.training)

    _begin(plan)
    of_block: dict[tuple[str, int], list[DepthAttention]] = defaultdict(list)
    for place in plan.places:
        depth = reader(
            place.path,
            place.stream,
            opens_block=plan.opens_block(place),
            only_embedding=place.index == 0 and not place.follower,
            unused=place.unused,
            position=place.position,
            keyword=place.keyword,
        )
        add_reader(host.get_submodule(place.path), depth, place.attribute)
        of_block[place.stream, plan.block_of(place)].append(depth)
    first = family.streams[0].name
    final = {path: reader(path, first, opens_block=True) for path in plan.exits}
    for path, depth in final.items():
        add_final_reader(host, path, depth)
    for path in families.exit_modules(host, family.shared_exits):
        share_final_reader(host, path, plan.exits[0])
    if len(final) == 1 and not any(place.stream == families.JOINT for place in plan.places):
        of_block[first, len(plan.places)].extend(final.values())
    for stream in {stream for stream, _ in of_block}:
        form_groups(block for (name, _), block in of_block.items() if name == stream)
    host.attnres_config = plan.config  # type: ignore[assignment]
    if not isinstance(host, AttnResHost):  # dit.models' classes call attach on themselves
        host.__class__ = (family.host_class or host_class)(cast(Any, type(host)))
    cast(AttnResHost, host).attached()
    return model


def _begin(plan: Plan) -> None:
    """Hook the blocks at which the streams begin, and the embedders that compute their condition."""
    family, host = plan.family, plan.host
    if len(family.streams) == 1 and not isinstance(family.condition, Mapping):
        token_mean = plan.config.query == "condition"
        hook = begin.begin_stream_with_token_mean if token_mean else begin.begin_stream
        plan.first_block.register_forward_pre_hook(hook, with_kwargs=True)
        return
    conditions = begin.Conditions()
    how = begin.Begin(family.streams, plan.sources, conditions, plan.config.key_eps)
    for index, block in enumerate(families.blocks_of(host).values()):
        if index == 0 or family.skips_blocks:
            block.depth_begin = how  # type: ignore[assignment]
            block.register_forward_pre_hook(begin.begin_streams, with_kwargs=True)
        if "other_stream" in (plan.config.condition or ()):
            block.depth_begin = how  # type: ignore[assignment]
            block.register_forward_pre_hook(begin.tell_other_stream, with_kwargs=True)
    if plan.sources:
        host.depth_conditions = conditions  # type: ignore[assignment]
        host.register_forward_pre_hook(begin.forget_conditions, with_kwargs=True)
    for name, source in plan.sources.items():
        embedder = host.get_submodule(source.module)
        embedder.depth_condition = (conditions, name, source)  # type: ignore[assignment]
        embedder.register_forward_hook(begin.keep_condition)


def detach(model: nn.Module) -> nn.Module:
    """Give the stock model back, in place: readers, hooks and the `AttnRes` class are removed.

    Exact when all queries are zero (sum form). Otherwise the model computes something else afterwards, and a
    UserWarning says so.

    Raises:
        ValueError: the model is not attached.
    """
    attached = [host for _, host in hosts(model)]
    if not attached:
        raise ValueError(f"model must be attached (attnres_vision.attach), got a plain {type(model).__name__}")
    if any(not _is_standard_residual(reader) for reader in readers(model).values()):
        warnings.warn(
            "detach: the depth queries are not zero (or the form is 'mean'), so the stock model computes a different "
            "function than the AttnRes model did",
            stacklevel=2,
        )
    for module in list(model.modules()):
        remove_hooks(module)
        if isinstance(module.__dict__.get("depth"), DepthAttention):  # a shared reader
            del module.__dict__["depth"]
        for attribute in [name for name, child in module._modules.items() if isinstance(child, DepthAttention)]:
            delattr(module, attribute)
    for host in attached:
        host.detaching()
        del host.attnres_config
        host.__class__ = stock_class(type(host))
    return model


def readers(model: nn.Module) -> dict[str, DepthAttention]:
    """The readers of a model in depth order, by the path of the module that each one sits on.

    In models with several streams the names show which one is read: "transformer_blocks.0.norm1 (image)".
    """
    order = {
        f"{prefix}{place.path}.{place.attribute}": index
        for prefix, host in hosts(model)
        for index, place in enumerate(reader_places(host))
    }
    # The final readers stand behind all sublayers, in the order of the modules
    found = sorted(_reader_modules(model).items(), key=lambda item: order.get(item[0], len(order)))
    return {
        path.rpartition(".")[0] + (f" ({reader.stream})" if reader.stream else ""): reader for path, reader in found
    }


def attnres_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The depth parameters alone, under their names in `model.state_dict()`."""
    depth = {f"{path}." for path in _reader_modules(model)}
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


def _reader_modules(model: nn.Module) -> dict[str, DepthAttention]:
    return {name: module for name, module in model.named_modules() if isinstance(module, DepthAttention)}


def hosts(model: nn.Module) -> list[tuple[str, Any]]:
    """The attached transformers in a model, with the prefix of their modules' paths: "" for the model itself."""
    return [
        (f"{name}." if name else "", module)
        for name, module in model.named_modules()
        if isinstance(module, AttnResHost)
    ]


def _is_standard_residual(reader: DepthAttention) -> bool:
    if reader.query is None:
        return True
    if reader.config.form != "sum":
        return False
    zero = [reader.query, reader.query_proj, reader.query_up]
    return all(not torch.any(parameter) for parameter in zero if isinstance(parameter, Tensor))
