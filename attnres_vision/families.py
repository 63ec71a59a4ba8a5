"""Which modules of a host model read its residual stream: one line per block class, one per model class.

A block's line lists its sublayers in order, each by the module that reads the stream for it (a norm, or the attention
itself where a norm follows it). `*` stands for every index: parallel branches are one sublayer with several readers.
The lines of a host library are in its own package (attnres_vision/timm/families.py); users add theirs here:

    attnres_vision.families.BLOCKS["my_package.models.MyBlock"] = ("norm1", "norm2")
    attnres_vision.families.MODELS["my_package.models.MyViT"] = Family()

A subclass is found under its base class's line.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TypeVar

from torch import nn

_Line = TypeVar("_Line")

LAST_BLOCK_OUTPUT = "<last block>"


@dataclasses.dataclass(frozen=True)
class Family:
    """Where the residual stream of a model class begins and where it is read after the blocks.

    Attributes:
        blocks: path of the container of the blocks; the stream begins at the first of them.
        exits: paths of the modules that read the finished stream, in order; `LAST_BLOCK_OUTPUT` makes what the last
            block returns the final read, for models without a module behind the blocks.
        pruned_exits: the same after timm's `prune_intermediate_layers`, where that removes the modules in `exits`.
        shared_exits: modules that get the stream only from `forward_intermediates(norm=True)`; they read with the
            reader of the first of `exits`, since one of their own would never be trained.
        inner: path of the submodule that is the transformer itself, "" if the model is.
        condition: what `query="condition"` reads: "token mean", or None if the model has nothing suitable.
        why_no_condition: completes the error message for None.
    """

    blocks: str = "blocks"
    exits: tuple[str, ...] = ("norm",)
    pruned_exits: tuple[str, ...] = ("norm",)
    shared_exits: tuple[str, ...] = ()
    inner: str = ""
    condition: str | None = "token mean"
    why_no_condition: str = ""


BLOCKS: dict[str, tuple[str, ...]] = {}
MODELS: dict[str, Family] = {}


def family_of(model: nn.Module) -> Family:
    """The line of MODELS for this model.

    Raises:
        ValueError: there is none; the message lists the known model classes.
    """
    family = _lookup(MODELS, model)
    if family is None:
        known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in MODELS}))
        raise ValueError(
            f"no reader table for models of class {_path(type(model))}. Known: {known}. To add one, set "
            f"attnres_vision.families.MODELS[{_path(type(model))!r}] = Family(...) and, for its block class, "
            "attnres_vision.families.BLOCKS[...] = (names of the modules that read the residual stream, ...)"
        )
    return family


def blocks_of(host: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a host model, by their paths, in depth order."""
    path = family_of(host).blocks
    return {f"{path}.{name}": block for name, block in host.get_submodule(path).named_children()}


def exit_modules(host: nn.Module, exits: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules that read the finished stream, by their paths; those that the model does not have are left out."""
    paths: list[str] = []
    for pattern in exits:
        paths += [list(blocks_of(host))[-1]] if pattern == LAST_BLOCK_OUTPUT else matching_modules(host, pattern)
    return {path: host.get_submodule(path) for path in paths}


def sublayer_readers(block: nn.Module, name: str) -> list[list[str]]:
    """The readers of a block: for each sublayer, the paths within the block of the modules that read for it.

    Raises:
        ValueError: the block's class has no line, or its line names a module that the block does not have.
    """
    patterns = _lookup(BLOCKS, block)
    if patterns is None:
        raise ValueError(
            f"no reader table for block {name!r} of class {_path(type(block))}. To add one, set "
            f"attnres_vision.families.BLOCKS[{_path(type(block))!r}] = (the modules that read the residual stream, "
            "in order, such as 'norm1', 'norm2')"
        )
    sublayers = [matching_modules(block, pattern) for pattern in patterns]
    for pattern, found in zip(patterns, sublayers, strict=True):
        if not found:
            raise ValueError(
                f"block {name!r} of class {_path(type(block))} has no module {pattern!r} to put a reader on"
            )
    return sublayers


def matching_modules(root: nn.Module, pattern: str) -> list[str]:
    """Paths of the submodules of `root` that match a pattern in which `*` stands for one index."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name, _ in root.named_modules() if expression.fullmatch(name)]


def _lookup(table: dict[str, _Line], module: nn.Module) -> _Line | None:
    return next((table[_path(cls)] for cls in type(module).__mro__ if _path(cls) in table), None)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
