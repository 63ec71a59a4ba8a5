"""StreamPart: what a slice of a depth stream remembers, so that joining the slices needs no copy.

Single-stream blocks split the joined stream of an MMDiT into image and text, and the next block joins them again. A
join by `torch.cat` would copy every source, in every block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from attnres_vision.stream import DepthStream


@dataclasses.dataclass(eq=False)
class StreamPart:
    """Where a stream was sliced from another one, so that joining the slices gives that one back.

    Attributes:
        whole: the stream that was sliced.
        dim, start, stop: the slice, along a token dimension.
        delta: what has been added to the slice since then, None if nothing.
    """

    whole: DepthStream
    dim: int
    start: int
    stop: int
    delta: Tensor | None = None

    @staticmethod
    def find(whole: DepthStream, index: Any) -> StreamPart | None:
        """The part that `whole[index]` is, None if it is not one slice along one dimension."""
        entries = list(index) if isinstance(index, tuple) else [index]
        if entries and entries[-1] is Ellipsis:
            entries.pop()
        if not all(isinstance(entry, slice) and entry.step in (None, 1) for entry in entries):
            return None
        cut = [dim for dim, entry in enumerate(entries) if entry.start is not None or entry.stop is not None]
        if len(cut) != 1:
            return None
        start, stop, _ = entries[cut[0]].indices(whole.shape[cut[0]])
        return StreamPart(whole, cut[0], start, stop)

    def place(self) -> tuple[int, int, int]:
        return self.dim, self.start, self.stop

    def written(self, stream: DepthStream, delta: Tensor) -> StreamPart | None:
        """This part after a write to `stream`, the slice; None if the whole could not be written to in its place."""
        if stream.sealed != (self.delta is None and self.whole.sealed) or stream.cast != self.whole.cast:
            return None
        return dataclasses.replace(self, delta=delta if self.delta is None else self.delta + delta)

    def padded_delta(self) -> Tensor:
        """`delta` with zeros for the other tokens of the whole."""
        assert self.delta is not None
        shape = list(self.whole.shape)
        pieces = []
        for length, piece in (
            (self.start, None),
            (self.stop - self.start, self.delta),
            (shape[self.dim] - self.stop, None),
        ):
            shape[self.dim] = length
            if length:
                pieces.append(self.delta.new_zeros(shape) if piece is None else piece)
        return torch.cat(pieces, self.dim)

    @staticmethod
    def join(streams: Sequence[Tensor | DepthStream], dim: int) -> DepthStream | None:
        """The stream that `streams` are all the slices of, with what was added to them; None if they are not."""
        pairs = [(stream, stream.part) for stream in streams if not isinstance(stream, Tensor) and stream.part]
        if len(pairs) < len(streams):
            return None
        whole, dim = pairs[0][1].whole, dim % pairs[0][1].whole.ndim
        end = 0
        for stream, part in pairs:
            sealed = whole.sealed and part.delta is None
            if part.whole is not whole or part.dim != dim or part.start != end or stream.sealed != sealed:
                return None
            end = part.stop
        if end != whole.shape[dim]:
            return None
        deltas = [part.delta for _, part in pairs if part.delta is not None]
        if not deltas:
            return whole
        rows = [deltas[0].new_zeros(stream.shape) if part.delta is None else part.delta for stream, part in pairs]
        return whole.write(torch.cat(rows, dim))


def _unflatten(children: Any, context: Any) -> StreamPart:
    whole, delta = children
    dim, start, stop = context
    return StreamPart(whole, dim, start, stop, delta)


pytree.register_pytree_node(
    StreamPart,
    lambda part: ([part.whole, part.delta], part.place()),
    _unflatten,
    serialized_type_name="attnres_vision.StreamPart",
)
