"""AttnResHost: the few methods of a host model that hooks cannot reach.

`attach` gives a model the class `AttnRes<its class>`, which is its own class with this mixin in front (as FSDP2 does),
and `detach` gives the old class back. What is here works on whatever timm's methods return; nothing of theirs is copied.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from attnres_vision import families
from attnres_vision.config import AttnResConfig
from attnres_vision.reader import DepthAttention, begin_stream, begin_stream_with_token_mean, read_final, read_stream
from attnres_vision.stream import DepthStream


class AttnResHost:
    """Mixin of models whose residual stream is a DepthStream."""

    attnres_config: AttnResConfig

    def forward_intermediates(self, x: Any, indices: Any = None, *args: Any, **kwargs: Any) -> Any:
        """timm's `forward_intermediates`. With `norm=False` an intermediate is what the next reader reads.

        With `norm=True` it is what the final norm, with its own reader, makes of the stream so far.
        """
        from timm.models import feature_take_indices

        result = super().forward_intermediates(x, indices, *args, **kwargs)  # type: ignore[misc]
        taken, _ = feature_take_indices(len(self.blocks), indices)
        next_readers = [_next_reader(self, index) for index in sorted(taken)]

        def read(items: list) -> list:
            return [_read_streams(item, reader) for item, reader in zip(items, next_readers, strict=True)]

        if isinstance(result, dict):
            return {key: read(value) if key.startswith("image_intermediates") else value for key, value in result.items()}
        if isinstance(result, tuple):
            return result[0], read(result[1])
        return read(result)

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> Any:
        """timm's `prune_intermediate_layers`; the first reader that is cut off becomes the final reader."""
        next_readers = [_next_reader(self, index) for index in range(len(self.blocks))]
        taken = super().prune_intermediate_layers(*args, **kwargs)  # type: ignore[misc]
        for path, module in exit_modules(self, families.family_of(self).pruned_exits):
            if getattr(module, "depth", None) is None:
                reader = next_readers[len(self.blocks) - 1]
                reader.name = path
                add_final_reader(self, path, reader)
        return taken

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """timm's `no_weight_decay`, and all depth parameters: decay would pull them to the standard residual."""
        depth = {
            f"{path}.{name}"
            for path, module in self.named_modules()
            if isinstance(module, DepthAttention)
            for name, _ in module.named_parameters()
        }
        base = super().no_weight_decay() if hasattr(super(), "no_weight_decay") else set()
        return set(base) | depth

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError("AttnRes models do not support TorchScript: use torch.compile or torch.export")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so pickle cannot find it by name; this also serves copy and deepcopy.
        return _new_host, (stock_class(type(self)),), self.__dict__


@functools.cache
def host_class(base: type[nn.Module]) -> type[nn.Module]:
    """`AttnRes<base>`: the class of an attached model of class `base`."""
    return type(f"AttnRes{base.__name__}", (AttnResHost, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def stock_class(cls: type) -> type[nn.Module]:
    """The host library's own class behind an `AttnRes<base>` class."""
    return cls.__mro__[cls.__mro__.index(AttnResHost) + 1]


def _new_host(base: type[nn.Module]) -> nn.Module:
    cls = host_class(base)
    return cls.__new__(cls)


# Hooks ---------------------------------------------------------------------------------------------------------------


def read_output(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of the last block, where no module behind the blocks can read: the final read is its output."""
    depth = block.depth
    assert isinstance(depth, DepthAttention)
    return depth(output) if isinstance(output, DepthStream) else output


def add_reader(module: nn.Module, reader: DepthAttention) -> None:
    """Put a reader in front of a module inside a block."""
    module.add_module("depth", reader)
    module.register_forward_pre_hook(read_stream, with_kwargs=True)


def add_final_reader(model: nn.Module, path: str, reader: DepthAttention) -> None:
    """Put a reader in front of a module behind the blocks, or behind the last block."""
    module = model.get_submodule(path)
    module.add_module("depth", reader)
    if any(module is block for block in model.blocks):
        module.register_forward_hook(read_output)
    else:
        module.register_forward_pre_hook(read_final, with_kwargs=True)


def remove_hooks(module: nn.Module) -> None:
    """Remove what this library hooked on a module. By function, since the handles cannot be kept (nor pickled)."""
    ours = (begin_stream, begin_stream_with_token_mean, read_stream, read_final, read_output)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def exit_modules(model: nn.Module, exits: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """The modules that read the finished stream, with their paths."""
    paths = []
    for pattern in exits:
        if pattern == families.LAST_BLOCK_OUTPUT:
            paths.append(f"blocks.{len(model.blocks) - 1}")
        else:
            paths += families.matching_modules(model, pattern)
    return [(path, model.get_submodule(path)) for path in paths]


def _next_reader(model: nn.Module, index: int) -> DepthAttention:
    """The reader that reads next after block `index`."""
    blocks = model.blocks
    if index + 1 < len(blocks):
        block = blocks[index + 1]
        return block.get_submodule(families.sublayer_readers(block, f"blocks.{index + 1}")[0][0]).depth
    family = families.family_of(model)
    for _, module in exit_modules(model, family.exits) + exit_modules(model, family.pruned_exits):
        if hasattr(module, "depth"):
            return module.depth
    raise ValueError(f"no reader behind the blocks of {type(model).__name__}")


def _read_streams(tree: Any, reader: DepthAttention) -> Any:
    def read(leaf: Any) -> Any:
        return reader(leaf) if isinstance(leaf, DepthStream) else leaf

    return pytree.tree_map(read, tree, is_leaf=lambda leaf: isinstance(leaf, DepthStream))
