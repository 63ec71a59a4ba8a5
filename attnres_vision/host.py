"""AttnResHost and TimmHost: the few methods of a host model that hooks cannot reach.

`attach` gives a model the class `AttnRes<its class>`, its own class with a mixin in front (as FSDP2 does), and
`detach` gives the old class back. The methods work on whatever timm's own return; nothing of theirs is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, cast

import torch
from timm.models._features import feature_take_indices  # not public, but where every forward_intermediates has it from
from torch import nn
from torch.utils import _pytree as pytree

from attnres_vision import begin, families, two_phase
from attnres_vision.config import AttnResConfig
from attnres_vision.reader import DepthAttention, check_gradients, read_final, read_stream
from attnres_vision.stream import DepthStream


class AttnResHost:
    """Mixin of models whose residual stream is a DepthStream."""

    attnres_config: AttnResConfig
    make_class: ClassVar[Callable[[Any], Any]]  # this class from a stock class

    def attached(self) -> None:
        """Called when `attach` is done with this model."""

    def detaching(self) -> None:
        """Called before `detach` gives the stock class back."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so pickle cannot find it by name; this also serves copy and deepcopy.
        return _new_host, (self.make_class, stock_class(type(self))), self.__dict__


class TimmHost(AttnResHost):
    """The mixin for timm's models."""

    @property
    def _model_args(self) -> dict[str, Any]:
        # What timm saves of a registered model: its create_model puts the user's mapping there, without the defaults
        args = self.__dict__.get("_model_args", {})
        return {**args, "attnres": self.attnres_config.to_dict()} if "attnres" in args else args

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        self.__dict__["_model_args"] = args

    def forward_intermediates(self, x: Any, indices: Any = None, *args: Any, **kwargs: Any) -> Any:
        """timm's `forward_intermediates`. With `norm=False` an intermediate is what the next reader reads.

        With `norm=True` it is what the final norm, with its own reader, makes of the stream so far.
        """
        result = super().forward_intermediates(x, indices, *args, **kwargs)  # type: ignore[misc]
        host = cast(nn.Module, self)
        taken, _ = feature_take_indices(len(families.blocks_of(host)), indices)
        next_readers = [_next_readers(host)[index] for index in sorted(set(taken))]

        def read(name: str, value: Any) -> Any:
            if name.startswith("image_intermediates"):
                return [_read_streams(item, reader) for item, reader in zip(value, next_readers, strict=True)]
            return _read_streams(value, next_readers[-1])  # a stream if stop_early left out the final reader

        if isinstance(result, dict):
            return {name: read(name, value) for name, value in result.items()}
        if isinstance(result, tuple):
            return read("image_features", result[0]), read("image_intermediates", result[1])
        return read("image_intermediates", result)

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> Any:
        """timm's `prune_intermediate_layers`; the features of the blocks that stay are those of the full model.

        The first reader that is cut off becomes the final reader if the module with the final reader goes too.
        Otherwise it stays on the last block, for `forward_intermediates(norm=False)`, and a plain forward pass leaves
        it out.
        """
        host = cast(nn.Module, self)
        next_readers, before = _next_readers(host), _readers(host)
        taken = super().prune_intermediate_layers(*args, **kwargs)  # type: ignore[misc]
        two_phase.leave_groups(before, _readers(host))
        family, blocks = families.family_of(host), families.blocks_of(host)
        reader, (last_path, last_block) = next_readers[len(blocks) - 1], list(blocks.items())[-1]
        final_readers = [
            module.depth for module in families.exit_modules(host, family.exits).values() if hasattr(module, "depth")
        ]
        if final_readers:
            if reader not in final_readers:
                reader.name = last_path
                last_block.add_module("depth", reader)
            return taken
        if hasattr(last_block, "depth"):
            del last_block.depth
        for path in families.exit_modules(host, family.pruned_exits):
            reader.name = path
            add_final_reader(host, path, reader)
        return taken

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """timm's `no_weight_decay`, and all depth parameters: decay would pull them to the standard residual."""
        depth = {
            f"{path}.{name}"
            for path, module in cast(nn.Module, self).named_modules()
            if isinstance(module, DepthAttention)
            for name, _ in module.named_parameters()
        }
        base: set[str] = getattr(super(), "no_weight_decay", set)()
        return set(base) | depth

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError("AttnRes models do not support TorchScript: use torch.compile or torch.export")


@functools.cache
def timm_host_class(base: Any) -> Any:
    """`AttnRes<base>`: the class of an attached timm model of class `base`."""
    return type(f"AttnRes{base.__name__}", (TimmHost, base), {"__module__": base.__module__, "__doc__": base.__doc__})


TimmHost.make_class = staticmethod(timm_host_class)


def stock_class(cls: type) -> type[nn.Module]:
    """The host library's own class behind an `AttnRes<base>` class."""
    return cls.__mro__[cls.__mro__.index(AttnResHost) + 1]


def _new_host(make_class: Callable[[Any], Any], base: Any) -> nn.Module:
    cls = make_class(base)
    return cls.__new__(cls)


# Hooks ---------------------------------------------------------------------------------------------------------------


def read_output(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of the last block, where no module behind the blocks can read: the final read is its output."""
    if not isinstance(output, DepthStream):
        return output
    depth = _depth_of(block)
    check_gradients(output, depth)
    return depth(output)


def add_reader(module: nn.Module, reader: DepthAttention, attribute: str = "depth") -> None:
    """Put a reader in front of a module inside a block."""
    module.add_module(attribute, reader)
    if attribute == "depth":  # the hook serves all readers on the module
        module.register_forward_pre_hook(read_stream, with_kwargs=True)


def add_final_reader(model: nn.Module, path: str, reader: DepthAttention) -> None:
    """Put a reader in front of a module behind the blocks, or behind the last block."""
    module = model.get_submodule(path)
    module.__dict__.pop("depth", None)  # a shared one
    module.add_module("depth", reader)
    if path in families.blocks_of(model):
        module.register_forward_hook(read_output)
    else:
        module.register_forward_pre_hook(read_final, with_kwargs=True)


def share_final_reader(model: nn.Module, path: str, owner: str) -> None:
    """Let a module read the finished stream with the reader of `owner`, whose parameters keep their one name."""
    module = model.get_submodule(path)
    module.__dict__["depth"] = _depth_of(model.get_submodule(owner))  # past nn.Module, which would register it
    module.register_forward_pre_hook(read_final, with_kwargs=True)


def remove_hooks(module: nn.Module) -> None:
    """Remove what this library hooked on a module. By function, since the handles cannot be kept (nor pickled)."""
    ours = (*begin.HOOKS, read_stream, read_final, read_output)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for attribute in begin.ATTRIBUTES:
        module.__dict__.pop(attribute, None)


def _next_readers(model: nn.Module) -> list[DepthAttention]:
    """For each block of a host the reader that reads next after it."""
    family = families.family_of(model)
    first_readers = [
        block.get_submodule(families.sublayers(block, path)[0].readers[0])
        for path, block in families.blocks_of(model).items()
    ]
    exits = families.exit_modules(model, (families.LAST_BLOCK_OUTPUT, *family.exits, *family.pruned_exits)).values()
    final = next(module for module in exits if hasattr(module, "depth"))  # the last block has one only after pruning
    return [_depth_of(module) for module in [*first_readers[1:], final]]


def _readers(model: nn.Module) -> set[DepthAttention]:
    return {module for module in model.modules() if isinstance(module, DepthAttention)}


def _depth_of(module: nn.Module) -> DepthAttention:
    depth = module.depth
    assert isinstance(depth, DepthAttention)
    return depth


def _read_streams(tree: Any, reader: DepthAttention) -> Any:
    def read(leaf: Any) -> Any:
        return reader(leaf) if isinstance(leaf, DepthStream) else leaf

    return pytree.tree_map(read, tree, is_leaf=lambda leaf: isinstance(leaf, DepthStream))
