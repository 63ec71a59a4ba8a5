"""TimmHost: timm's feature API on attached models. It works on what timm's own methods return; nothing is copied."""

from __future__ import annotations

import functools
from typing import Any, cast

from timm.models._features import feature_take_indices  # not public, but where every forward_intermediates has it from
from torch import nn
from torch.utils import _pytree as pytree

from attnres_vision.attach import families, groups
from attnres_vision.attach.hooks import add_final_reader, depth_of
from attnres_vision.attach.host import AttnResHost, make_class
from attnres_vision.stream import DepthAttention, DepthStream


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
        groups.leave_groups(before, _readers(host))
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


@functools.cache
def timm_host_class(base: Any) -> Any:
    """`AttnRes<base>`: the class of an attached timm model of class `base`."""
    return make_class(TimmHost, base)


TimmHost.make_class = staticmethod(timm_host_class)


def _next_readers(model: nn.Module) -> list[DepthAttention]:
    """For each block of a host the reader that reads next after it."""
    family = families.family_of(model)
    first_readers = [
        block.get_submodule(families.sublayers(block, path)[0].readers[0])
        for path, block in families.blocks_of(model).items()
    ]
    exits = families.exit_modules(model, (families.LAST_BLOCK_OUTPUT, *family.exits, *family.pruned_exits)).values()
    final = next(module for module in exits if hasattr(module, "depth"))  # the last block has one only after pruning
    return [depth_of(module) for module in [*first_readers[1:], final]]


def _readers(model: nn.Module) -> set[DepthAttention]:
    return {module for module in model.modules() if isinstance(module, DepthAttention)}


def _read_streams(tree: Any, reader: DepthAttention) -> Any:
    def read(leaf: Any) -> Any:
        return reader(leaf) if isinstance(leaf, DepthStream) else leaf

    return pytree.tree_map(read, tree, is_leaf=lambda leaf: isinstance(leaf, DepthStream))
