"""Which modules of a host model read its residual stream: one line per block class, one per model class.

A block's line lists its sublayers in order, each by the module that reads the stream for it (a norm, or the attention
itself where a norm follows it). `*` stands for every index: parallel branches are one sublayer with several readers. A
tuple is one sublayer whose readers read one after the other, `?` marks a module that some blocks of the class lack.
Blocks with several streams have a line for each, and `JOINT` for readers of all streams joined along the tokens.
Users add theirs:

    attnres_vision.families.BLOCKS["my_package.models.MyBlock"] = ("norm1", "norm2")
    attnres_vision.families.MODELS["my_package.models.MyViT"] = Family()

A subclass is found under its base class's line. A package that adds the lines of a library declares the module that
does so as an entry point named after the library (attnres_vision/timm/families.py and dit/families.py are too);
`attach` imports it when it is given a model of that library:

    [project.entry-points."attnres_vision.readers"]
    my_package = "my_package.attnres"
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

_Line = TypeVar("_Line")
Sublayers = tuple[str | tuple[str, ...], ...]

ENTRY_POINTS = "attnres_vision.readers"
LAST_BLOCK_OUTPUT = "<last block>"
JOINT = "joint"


@dataclasses.dataclass(frozen=True)
class StreamArgument:
    """A residual stream of a model, and the argument by which its blocks are given it."""

    name: str
    position: int
    keyword: str


@dataclasses.dataclass(frozen=True)
class ConditionSource:
    """Where a model computes a conditioning vector.

    Attributes:
        module: path of the submodule whose output it is.
        pick: takes the vector (B, C), or one per token (B, T, C), out of that output.
        per_token: the module is given all tokens of all samples as one batch.
        width: width C, given the model; None takes it from the module's last linear layer.
    """

    module: str
    pick: Callable[[Any], Tensor] | None = None
    per_token: bool = False
    width: Callable[[Any], int] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """Where the residual stream of a model class begins and where it is read after the blocks.

    Attributes:
        blocks: path of the container of the blocks, or of several in depth order; the stream begins at the first block.
        exits: paths of the modules that read the finished (first) stream, in order; `LAST_BLOCK_OUTPUT` makes what the
            last block returns the final read, for models without a module behind the blocks.
        pruned_exits: the same after timm's `prune_intermediate_layers`, where that removes the modules in `exits`.
        shared_exits: modules that get the stream only from `forward_intermediates(norm=True)`; they read with the
            reader of the first of `exits`, since one of their own would never be trained.
        inner: path of the submodule that is the transformer itself, "" if the model is.
        streams: the streams of the model; the first is the one that it reads at the end.
        width: the width D of a stream, given the model and the stream's name.
        condition: what `query="condition"` reads: "token mean", a source for each name that `AttnResConfig.condition`
            may hold, or None if the model has nothing suitable.
        why_no_condition: completes the error message for None.
        skips_blocks: the model can leave out its first blocks, so that the streams begin at a later one.
        host_class: makes the class of an attached model from that of the stock model.
    """

    blocks: str | tuple[str, ...] = "blocks"
    exits: tuple[str, ...] = ("norm",)
    pruned_exits: tuple[str, ...] = ("norm",)
    shared_exits: tuple[str, ...] = ()
    inner: str = ""
    streams: tuple[StreamArgument, ...] = (StreamArgument("", 0, "x"),)
    width: Callable[[Any, str], int] | None = None
    condition: str | Mapping[str, ConditionSource] | None = "token mean"
    why_no_condition: str = ""
    skips_blocks: bool = False
    host_class: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Sublayer:
    """One layer of a block: the stream that it reads, and the paths of the modules that read it.

    `followers` read after one of the `readers` within the same layer.
    """

    stream: str
    readers: tuple[str, ...]
    followers: tuple[str, ...] = ()


BLOCKS: dict[str, Sublayers | Mapping[str, Sublayers]] = {}
MODELS: dict[str, Family] = {}


def family_of(model: nn.Module) -> Family:
    """The line of MODELS for this model.

    Raises:
        ValueError: there is none; the message lists the known model classes.
    """
    family = _lookup(MODELS, model)
    wrapped = next(
        (name for name in ("module", "_orig_mod") if isinstance(getattr(model, name, None), nn.Module)), None
    )
    if family is None and wrapped is not None:
        raise ValueError(
            f"model must be the model itself, got a {type(model).__name__} around it: attach before you wrap or "
            f"compile it, or give model.{wrapped}"
        )
    if family is None:
        library = _library(type(model))
        names = [name for name in MODELS if name.split(".")[0] == library] or list(MODELS)
        known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
        line = "dit.families.dit_family(paths of the blocks, timestep=...)" if library == "diffusers" else "Family(...)"
        raise ValueError(
            f"no reader table for models of class {_path(type(model))}. Known: {known}. To add one, set "
            f"attnres_vision.families.MODELS[{_path(type(model))!r}] = {line} and, for its block class, "
            "attnres_vision.families.BLOCKS[...] = (names of the modules that read the residual stream, ...)"
        )
    return family


def blocks_of(host: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a host model, by their paths, in depth order."""
    paths = family_of(host).blocks
    return {
        f"{path}.{name}": block
        for path in ((paths,) if isinstance(paths, str) else paths)
        for name, block in host.get_submodule(path).named_children()
    }


def exit_modules(host: nn.Module, exits: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules that read the finished stream, by their paths; those that the model does not have are left out."""
    paths: list[str] = []
    for pattern in exits:
        paths += [list(blocks_of(host))[-1]] if pattern == LAST_BLOCK_OUTPUT else matching_modules(host, pattern)
    return {path: host.get_submodule(path) for path in paths}


def sublayers(block: nn.Module, name: str) -> list[Sublayer]:
    """The sublayers of a block, stream by stream, with the paths of their readers within the block.

    Raises:
        ValueError: the block's class has no line, or its line names a module that the block does not have.
    """
    line = _lookup(BLOCKS, block)
    if line is None:
        raise ValueError(
            f"no reader table for block {name!r} of class {_path(type(block))}. To add one, set "
            f"attnres_vision.families.BLOCKS[{_path(type(block))!r}] = (the modules that read the residual stream, "
            "in order, such as 'norm1', 'norm2')"
        )
    lines = line if isinstance(line, Mapping) else {"": line}
    found: list[Sublayer] = []
    for stream, entries in lines.items():
        for entry in entries:
            first, *rest = (entry,) if isinstance(entry, str) else entry
            readers = tuple(_readers(block, name, first))
            if readers:
                found.append(
                    Sublayer(stream, readers, tuple(path for item in rest for path in _readers(block, name, item)))
                )
    return found


def _readers(block: nn.Module, name: str, pattern: str) -> list[str]:
    found = matching_modules(block, pattern.removesuffix("?"))
    if not found and not pattern.endswith("?"):
        raise ValueError(f"block {name!r} of class {_path(type(block))} has no module {pattern!r} to put a reader on")
    return found


def matching_modules(root: nn.Module, pattern: str) -> list[str]:
    """Paths of the submodules of `root` that match a pattern in which `*` stands for one index."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name, _ in root.named_modules() if expression.fullmatch(name)]


def _lookup(table: Mapping[str, _Line], module: nn.Module) -> _Line | None:
    return next((table[_path(cls)] for cls in type(module).__mro__ if _path(cls) in table), None)


def import_lines(model: nn.Module) -> None:
    """Import the modules that installed packages declare for the libraries that a model's class comes from."""
    for library in {_library(base) for base in type(model).__mro__}:
        _import_lines_of(library)


@functools.cache
def _import_lines_of(library: str) -> None:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=library):
        entry.load()


def _library(cls: type) -> str:
    return cls.__module__.split(".")[0]


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
