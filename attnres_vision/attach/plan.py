"""The plan of an attachment: where each reader goes and what it can know, checked before the model is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast, get_args

from torch import nn

from attnres_vision.attach import families
from attnres_vision.attach.families import JOINT, ConditionSource, Family
from attnres_vision.attach.host import AttnResHost
from attnres_vision.config import AttnResConfig, Condition
from attnres_vision.stream.reader import DepthAttention


@dataclasses.dataclass(frozen=True)
class ReaderPlace:
    """One reader inside the blocks.

    Attributes:
        path: path in the host of the module that it sits on.
        attribute: its name on that module.
        stream: the stream that it reads.
        index: number of its sublayer within that stream.
        position, keyword: the module's argument that it reads.
        follower: it reads after another reader of the same sublayer.
        unused: nothing that the model returns depends on what it reads.
    """

    path: str
    attribute: str
    stream: str
    index: int
    position: int = 0
    keyword: str = "hidden_states"
    follower: bool = False
    unused: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything `attach` needs to know."""

    host: nn.Module
    prefix: str
    family: Family
    config: AttnResConfig
    block_size: int
    places: list[ReaderPlace]
    exits: list[str]

    @property
    def first_block(self) -> nn.Module:
        return next(iter(families.blocks_of(self.host).values()))

    @property
    def sources(self) -> dict[str, ConditionSource]:
        """The embedders behind `config.condition`, in its order."""
        known = self.family.condition
        names = self.config.condition or ()
        return {name: known[name] for name in names if name != "other_stream"} if isinstance(known, Mapping) else {}

    def block_of(self, place: ReaderPlace) -> int:
        """The number of the block that a reader's layer adds to: all blocks have `block_size` layers."""
        return place.index // self.block_size

    def opens_block(self, place: ReaderPlace) -> bool:
        """Whether a reader is the first of its block."""
        return place.index % self.block_size == 0 and not place.follower

    def width(self, stream: str) -> int:
        """The width D of a stream; joined streams have one width."""
        return stream_width(self.host, self.family, self.family.streams[0].name if stream == JOINT else stream)

    def given(self, path: str, stream: str) -> dict[str, Any]:
        """What the query of a reader is computed from, as arguments of `DepthAttention`."""
        if not isinstance(self.family.condition, Mapping) or self.config.query != "condition":
            return {}
        width = sum(condition_width(self.host, source) for source in self.sources.values())
        others = [entry.name for entry in self.family.streams if entry.name != stream]
        # Joined streams have no other one, nor has what is read behind them.
        joined = stream == JOINT or (path in self.exits and any(place.stream == JOINT for place in self.places))
        other = "other_stream" in (self.config.condition or ()) and not joined
        return {"given": width + (self.width(others[0]) if other else 0), "given_other": other}


def make_plan(model: nn.Module, config: AttnResConfig) -> Plan:
    """The plan for attaching `config` to `model`.

    Raises:
        ValueError: an unknown or attached model, or a config that does not fit it.
    """
    attached = any(isinstance(module, DepthAttention) for module in model.modules())
    if attached or any(isinstance(module, AttnResHost) for module in list(model.modules())[1:]):
        raise ValueError(f"model {type(model).__name__} has Attention Residuals already: detach it first")
    families.import_lines(model)
    family = families.family_of(model)
    host = model.get_submodule(family.inner)
    places = reader_places(host)
    if not places:
        raise ValueError(f"model must have at least one block, got a {type(host).__name__} with none")
    # Blocks are counted in the first stream; the others have as many sublayers, or one less.
    sublayers = 1 + max(place.index for place in places)
    config = _checked(host, family, config.for_sublayers(sublayers))
    exits = families.exit_modules(host, family.exits) or families.exit_modules(host, family.pruned_exits)
    if not exits:
        raise ValueError(f"{type(host).__name__} has none of the modules that read the final stream: {family.exits}")
    for path in dict.fromkeys([*(place.path for place in places), *exits]):
        if isinstance(host.get_submodule(path), nn.Sequential):  # it would run its reader as one more layer
            raise ValueError(f"module {path!r} is an nn.Sequential, which cannot hold a reader: name its first module")
        if hasattr(host.get_submodule(path), "depth"):
            raise ValueError(f"module {path!r} has an attribute 'depth' already, where its reader would go")
    prefix = f"{family.inner}." if family.inner else ""
    return Plan(host, prefix, family, config, config.sublayers_per_block(sublayers), places, list(exits))


def reader_places(host: nn.Module) -> list[ReaderPlace]:
    """The readers inside the blocks of a host, in the order of its blocks."""
    streams = {entry.name: entry for entry in families.family_of(host).streams}
    counts = dict.fromkeys(streams, 0)
    places: list[ReaderPlace] = []
    for name, block in families.blocks_of(host).items():
        taken: set[str] = set()
        for sublayer in families.sublayers(block, name):
            members = list(streams) if sublayer.stream == JOINT else [sublayer.stream]
            if sublayer.stream == JOINT and len({counts[member] for member in members}) > 1:
                raise ValueError(f"block {name!r} joins streams of different depths: {counts}")
            index = counts[members[0]]
            counts.update(dict.fromkeys(members, index + 1))
            for path in (*sublayer.readers, *sublayer.followers):
                place = ReaderPlace(
                    f"{name}.{path}", "depth", sublayer.stream, index, follower=path in sublayer.followers
                )
                if (
                    path in taken
                ):  # a module that reads several streams takes them in the order of the block's arguments
                    entry = streams[sublayer.stream]
                    place = dataclasses.replace(
                        place, attribute=f"depth_{entry.name}", position=entry.position, keyword=entry.keyword
                    )
                places.append(place)
            taken |= {*sublayer.readers, *sublayer.followers}
    # Streams meet in the attention, a block's first sublayer; behind the last one only the first stream is read.
    last = {place.stream: place for place in places if place.path.startswith(f"{name}.")}
    for stream, place in last.items():
        first = next(other for other in places if other.stream == stream and other.path.startswith(f"{name}."))
        if stream in list(streams)[1:] and place is not first:
            places[places.index(place)] = dataclasses.replace(place, unused=True)
    return places


def stream_width(host: nn.Module, family: Family, stream: str) -> int:
    """The width D of a stream of a host."""
    return int(cast(Any, host).embed_dim) if family.width is None else family.width(host, stream)


def condition_width(host: nn.Module, source: ConditionSource) -> int:
    """The width C of a conditioning vector."""
    if source.width is not None:
        return source.width(host)
    linear = [module for module in host.get_submodule(source.module).modules() if isinstance(module, nn.Linear)]
    return linear[-1].out_features


def _checked(host: nn.Module, family: Family, config: AttnResConfig) -> AttnResConfig:
    """The config with its defaults for this model."""
    for entry in family.streams:
        which = f"the {entry.name} stream of this model" if len(family.streams) > 1 else "this model"
        dim = stream_width(host, family, entry.name)
        if dim % config.heads:
            raise ValueError(f"heads must divide the width {dim} of {which}, got {config.heads}")
        if config.rank is not None and config.rank > dim:
            raise ValueError(f"rank must be between 1 and the width {dim} of {which}, got {config.rank}")
    if config.query != "condition":
        return config
    named = isinstance(family.condition, Mapping)
    has = [*cast(Mapping[str, ConditionSource], family.condition)] if named else []
    has += ["other_stream"] if named and len(family.streams) > 1 else []
    if family.condition is None or (named and not has):
        raise ValueError(
            f"query must be 'static', 'token' or 'block' for {type(host).__name__}, got 'condition': the model has no "
            "condition" + (f", {family.why_no_condition}" if family.why_no_condition else "")
        )
    if not named:
        if config.condition is not None:
            raise ValueError(
                f"condition must be None for {type(host).__name__}, whose condition is the {family.condition} of its "
                f"embedding, got {config.condition!r}"
            )
        return config
    for name in config.condition or ():
        if name not in has:
            raise ValueError(
                f"condition must hold one or more of {', '.join(map(repr, has))} for {type(host).__name__}, "
                f"got {config.condition!r}"
            )
    default = next(name for name in get_args(Condition) if name in has)
    config = config if config.condition else dataclasses.replace(config, condition=(default,))
    modules = dict(host.named_modules())
    for name in config.condition or ():
        source = cast(Mapping[str, ConditionSource], family.condition).get(name)
        if source is not None and source.module not in modules:
            raise ValueError(
                f"condition {name!r} of {type(host).__name__} is the output of its module {source.module!r}, which it "
                "does not have: correct its line in attnres_vision.families.MODELS"
            )
    return config
