"""Forward hooks that begin a model's depth streams: the embedding becomes source 0, the condition travels with it.

A condition is computed by the host's own embedders before the blocks. It reaches the streams through a `Conditions` box
that is filled and emptied within one forward pass; from then on it is in the stream, like everything else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from attnres_vision.attach.arguments import argument, replaced
from attnres_vision.attach.families import ConditionSource, StreamArgument
from attnres_vision.ops.collect import collect
from attnres_vision.stream.in_place import held
from attnres_vision.stream.query import normalise
from attnres_vision.stream.stream import DepthStream


def begin_stream(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the first block: the embedding becomes source 0 of a new stream."""
    if args and isinstance(args[0], Tensor):
        args = (DepthStream((collect(held(args[0])),)), *args[1:])
    return args, kwargs


def begin_stream_with_token_mean(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`begin_stream` for `query="condition"`: the condition of a ViT is the token mean of the embedding, (B, D)."""
    if args and isinstance(args[0], Tensor):
        embedding = args[0]
        args = (DepthStream((collect(held(embedding)),), condition=embedding.flatten(1, -2).mean(1)), *args[1:])
    return args, kwargs


class Conditions:
    """The conditioning vectors of the forward pass that is going on, between the embedders and the first block."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def __reduce__(self) -> Any:
        return Conditions, ()  # copies share a box of their own, which is empty

    def take(self, begin: Begin, batch: int) -> Tensor | None:
        """The condition (B, C) of the streams that begin now, or (B, T, C) where the model has one per token."""
        vectors = []
        for name, source in begin.sources.items():
            vector = self.values.get(name)
            if vector is None:
                raise RuntimeError(
                    f"query='condition' needs the output of {source.module!r} in the forward pass that the blocks run "
                    "in, and there is none. Run the whole model rather than its blocks; and let "
                    "model.enable_gradient_checkpointing() checkpoint the blocks, which begins the streams outside of "
                    "what is recomputed"
                )
            if vector.shape[0] != batch and vector.shape[0] > 1:
                vector = vector.unflatten(0, (batch, -1)) if source.per_token else vector[:batch]
            vectors.append(normalise(vector.expand(batch, *vector.shape[1:]), begin.eps))
        self.values.clear()
        return torch.cat(vectors, -1) if vectors else None


@dataclasses.dataclass(eq=False)
class Begin:
    """How the streams of a model begin; the first block holds it as `depth_begin`."""

    arguments: tuple[StreamArgument, ...]
    sources: dict[str, ConditionSource]
    conditions: Conditions
    eps: float


def forget_conditions(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model: what an earlier, interrupted forward pass left."""
    conditions = host.depth_conditions
    assert isinstance(conditions, Conditions)
    conditions.values.clear()


def keep_condition(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of an embedder: keep its output, the first of a forward pass, for the streams to begin with."""
    conditions, name, source = module.depth_condition  # type: ignore[misc]
    assert isinstance(conditions, Conditions) and isinstance(source, ConditionSource)
    if name not in conditions.values:
        conditions.values[name] = output if source.pick is None else source.pick(output)


def begin_streams(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the first block of a model with several streams or with conditions."""
    begin = block.depth_begin
    assert isinstance(begin, Begin)
    embeddings = {entry: argument(args, kwargs, entry.position, entry.keyword) for entry in begin.arguments}
    embeddings = {entry: value for entry, value in embeddings.items() if isinstance(value, Tensor)}
    if embeddings:
        condition = begin.conditions.take(begin, next(iter(embeddings.values())).shape[0])
        for entry, embedding in embeddings.items():
            stream = DepthStream((collect(held(embedding)),), condition=condition)
            args, kwargs = replaced(args, kwargs, entry.position, entry.keyword, stream)
    return args, kwargs


def tell_other_stream(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a block with two streams: each gets the token mean of the other's newest source, (B, D')."""
    begin = block.depth_begin
    assert isinstance(begin, Begin)
    streams = [argument(args, kwargs, entry.position, entry.keyword) for entry in begin.arguments]
    if len(streams) == 2 and all(isinstance(stream, DepthStream) for stream in streams):
        for stream in streams:  # before it is copied: a copy would make the sum that the mean takes once more
            stream.sources()
        for entry, stream, other in zip(begin.arguments, streams, reversed(streams), strict=True):
            told = dataclasses.replace(stream, other=other.sources()[-1].mean(1))
            args, kwargs = replaced(args, kwargs, entry.position, entry.keyword, told)
    return args, kwargs


HOOKS = (
    begin_stream,
    begin_stream_with_token_mean,
    forget_conditions,
    keep_condition,
    begin_streams,
    tell_other_stream,
)
ATTRIBUTES = ("depth_begin", "depth_condition", "depth_conditions")
