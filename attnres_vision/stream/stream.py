"""DepthStream: the object that stands where the residual tensor of a transformer stood.

A transformer block uses its residual tensor in two ways: a norm reads it, and a sublayer's output is added to it. The
stream answers both, so that a host library's own `x = x + f(norm(x))` runs Attention Residuals unchanged: `+` records
the output as a source (arXiv 2603.15031, Eq. 4 to 6), and a reader (reader.py) attends over the sources.

The stream is the only place that holds the state of a forward pass. It knows nothing of queries and weights.
"""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from attnres_vision.ops import dispatch
from attnres_vision.ops.collect import collect
from attnres_vision.ops.dtypes import promoted
from attnres_vision.ops.two_phase import Earlier
from attnres_vision.stream import in_place
from attnres_vision.stream.open_block import Boundary, OpenBlock
from attnres_vision.stream.refusals import refuse
from attnres_vision.stream.residual import ResidualStream


class HostView(NamedTuple):
    """How the host sees its residual stream.

    Attributes:
        dtype: what the host has cast the stream to, None if to nothing; the finished sources stay as they are.
        bounds: the host has clipped the stream to these: every read is clipped to them, as every source is.
        channel_dim: where the width D is; -1 until `permute` moves it.
    """

    dtype: torch.dtype | None = None
    bounds: tuple[float, float] | None = None
    channel_dim: int = -1


PLAIN = HostView()


# A dataclass, because FSDP2 finds the tensors of dataclasses, and a pytree node (below) for everything else.
@dataclasses.dataclass(eq=False)
class DepthStream(ResidualStream):
    """What the layers so far have added to the residual stream, kept apart by block.

    Attributes:
        blocks: finished block sums; `blocks[0]` is the embedding. Each (B, T, D), or any (..., D).
        open_block: None before the first layer's output.
        condition: (B, D) vector for `query="condition"`, None otherwise.
        other: (B, D') token mean of the other stream's newest source, for models that have two and ask for it.
        host_view: dtype, bounds and layout in which the host sees it.
        ahead: for some readers what two_phase.py has read for them of the first sources; others read all themselves.
        part: what this stream is a slice of, None if of nothing.
        superseded: `+=` has made another stream of this one, where a tensor would have been changed.
    """

    blocks: tuple[Tensor, ...]
    open_block: OpenBlock | None = None
    condition: Tensor | None = None
    other: Tensor | None = None
    host_view: HostView = PLAIN
    ahead: Mapping[object, Earlier] | None = None
    part: Part | None = None
    superseded: bool = False

    def __post_init__(self) -> None:
        # No field: what rebuilds a dataclass from its fields (FSDP2's casts) has put other tensors into them
        self._versions = tuple(map(in_place.version, self.blocks))

    def __reduce__(self) -> Any:
        # What was read ahead is for the readers of this stream's own model
        return DepthStream, (self.blocks, self.open_block, self.condition, self.other, self.host_view, None, self.part)

    # Reading and writing ---------------------------------------------------------------------------------------------

    def sources(self) -> tuple[Tensor, ...]:
        """The tensors a reader attends over: the finished blocks, then the open block's sum."""
        self.check()
        return self.blocks if self.open_block is None else (*self.blocks, self.open_block.settle())

    def check(self) -> None:
        """Raise if the host has changed in place what this stream holds, or goes on with it behind `+=`."""
        if torch.compiler.is_compiling():
            return
        if self.superseded and torch._C._current_graph_task_id() == -1:  # a recomputation begins before the `+=`
            raise RuntimeError(
                "the residual stream of an AttnRes model was used after `stream += ...` had made a new one: where a "
                "tensor would change under all its names, only the name on the left has the new stream. Use that one, "
                "or write `new = stream + ...`"
            )
        changed = [*map(in_place.is_changed, self.blocks, self._versions)]
        if self.open_block is not None:
            changed.append(self.open_block.is_changed)
        if True in changed:
            raise RuntimeError(
                f"source {changed.index(True)} of the residual stream of an AttnRes model was changed by an in-place "
                "operation after it had been added: a stream keeps a layer's output itself, not the sum. Use the "
                "operation that makes a new tensor (inplace=False, x * 2 for x.mul_(2)), or add out.clone() to the "
                "stream"
            )

    def close_block(self) -> None:
        """End the open block: the next output starts a new one."""
        if self.open_block is not None:
            self.open_block.close()

    @property
    def is_closed(self) -> bool:
        return self.open_block is not None and self.open_block.closed

    def write(self, delta: Tensor) -> DepthStream:
        """The stream after a layer has added `delta`, which must have the stream's shape or broadcast to it."""
        if not isinstance(delta, Tensor):
            refuse(f"adding a {type(delta).__name__} to it")
        if delta.shape != self.shape:
            delta = delta.broadcast_to(self.shape)
        self.check()
        block, part = self.open_block, None if self.part is None else self.part.written(self, delta)
        changes: dict[str, Any] = {"part": part, "superseded": False}
        if block is None:
            return dataclasses.replace(self, open_block=OpenBlock(in_place.held(delta)), **changes)
        total, changes["ahead"] = block.settle(), block.found or self.ahead
        block.found = None
        if block.closed:
            changes["blocks"] = (*self.blocks, collect(total))  # from now on many layers read it
            return dataclasses.replace(self, open_block=OpenBlock(in_place.held(delta)), **changes)
        dtype = promoted([total.dtype, self.dtype, delta.dtype])  # the host's stream's, so fp32 under autocast
        if part is None and self.host_view == PLAIN and self._may_wait(block, delta):
            return dataclasses.replace(self, open_block=OpenBlock(total, delta, dtype), **changes)
        return dataclasses.replace(self, open_block=OpenBlock(total.to(dtype) + delta), **changes)

    def _may_wait(self, block: OpenBlock, delta: Tensor) -> bool:
        """Whether the sum with `delta` can be left to the next reader's Triton kernel."""
        if in_place.is_uncounted(delta) or block.hides_gradient(delta):
            return False
        kernel = dispatch.choose((self.blocks[0], block.total, delta), 1)
        return kernel == "triton" and not dispatch.is_traced(kernel)

    def __iadd__(self, delta: Tensor) -> DepthStream:
        new = self.write(delta)
        self.superseded = True
        return new

    def total(self) -> Tensor:
        """The ordinary residual stream, in its own dtype: the sum of all sources."""
        total, *rest = self.sources()
        if self.host_view.dtype is not None:
            total = total.to(self.host_view.dtype)
        for source in rest:
            total = total + source
        return total if self.host_view.bounds is None else total.clamp(*self.host_view.bounds)

    @property
    def tensor(self) -> Tensor:  # type: ignore[override]
        return self.blocks[0]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.blocks[0].dtype if self.host_view.dtype is None else self.host_view.dtype

    @property
    def channel_dim(self) -> int:  # type: ignore[override]
        return self.host_view.channel_dim

    # Linear, token-wise operations act on every source ---------------------------------------------------------------

    def map(self, function: Callable[[Tensor], Tensor], channel_dim: int | None = None) -> DepthStream:
        """The stream with a linear, token-wise function applied to every source.

        Raises:
            TypeError: the function changed the width, so it is not token-wise.
        """
        sources = [function(source) for source in self.sources()]
        view = self.host_view if channel_dim is None else self.host_view._replace(channel_dim=channel_dim)
        if sources[0].ndim == 0 or sources[0].shape[view.channel_dim] != self.shape[self.host_view.channel_dim]:
            refuse("indexing or reshaping its width")
        boundary = None if self.open_block is None else self.open_block.boundary
        return self._of(sources, boundary, host_view=view)

    def _of(self, sources: Sequence[Tensor], boundary: Boundary | None, **changes: Any) -> DepthStream:
        """The stream with other sources: what was read ahead of these is not theirs."""
        blocks, block = tuple(sources), None
        if boundary is not None:
            blocks, block = blocks[:-1], OpenBlock(blocks[-1], boundary=boundary)
        return dataclasses.replace(self, blocks=blocks, open_block=block, ahead=None, part=None, **changes)

    def __getitem__(self, index: Any) -> DepthStream:
        part = super().__getitem__(index)
        if part.open_block is not None:  # a reader of some of the tokens does not end the block of the others
            part.open_block.boundary = Boundary(self.is_closed)
        part.part = Part.find(self, index)
        return part

    def __setitem__(self, index: Any, value: DepthStream) -> None:
        """`stream[:, a:b] = stream[:, a:b] + delta`, which some hosts write for adding to some of the tokens."""
        part, own = value.part if isinstance(value, DepthStream) else None, Part.find(self, index)
        if part is None or own is None or part.whole is not self or own.place() != part.place():
            refuse("the operator [...] =, except with what was added to the same slice,")
        if part.delta is not None:
            padding = [0, 0] * (self.ndim - part.dim - 1) + [part.start, self.shape[part.dim] - part.stop]
            written = self.write(F.pad(part.delta, padding))
            written.sources()  # settled
            self.blocks, self.open_block, self.part = written.blocks, written.open_block, written.part
            self.ahead, self._versions = None, written._versions

    def to_device(self, device: Any, non_blocking: bool) -> DepthStream:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        condition, other = (None if vector is None else move(vector) for vector in (self.condition, self.other))
        return dataclasses.replace(self.map(move), condition=condition, other=other)

    def to_dtype(self, dtype: torch.dtype) -> DepthStream:
        """The stream as one of another dtype: reads and sums change, the finished sources stay as they are."""
        if dtype == self.dtype:
            return self
        self.check()
        if dtype != self.blocks[0].dtype:
            return dataclasses.replace(self, host_view=self.host_view._replace(dtype=dtype))
        block = self.open_block
        if block is not None and block.settle().dtype != dtype:
            block = OpenBlock(block.total.to(dtype), boundary=block.boundary)
        return dataclasses.replace(self, open_block=block, host_view=self.host_view._replace(dtype=None))

    def clip(self, min: Any = None, max: Any = None) -> DepthStream:
        """What hosts do against overflow in fp16. The sources are clipped, and so is every read of them.

        A host clips the running sum once and goes on from there. The sum is not computed here, so where a host really
        would clip, the model differs from it; it stays finite in the same way.
        """
        low, high = self.host_view.bounds or (-float("inf"), float("inf"))
        low, high = low if min is None else builtins.max(low, min), high if max is None else builtins.min(high, max)
        clipped = self.map(lambda source: source.clamp(low, high))
        return dataclasses.replace(clipped, host_view=self.host_view._replace(bounds=(low, high)))

    clamp = clip

    @staticmethod
    def cat(parts: Sequence[Tensor | DepthStream], dim: int = 0) -> DepthStream:
        """Streams and tensors joined along a token dimension.

        A tensor among streams (a class token that joins late) is an embedding: it becomes part of source 0, and the
        other sources are zero there. All parts of one stream give that stream back, without a copy of its sources.
        """
        streams = [part for part in parts if isinstance(part, DepthStream)]
        first = streams[0]
        if dim % first.ndim == first.host_view.channel_dim % first.ndim:
            refuse("torch.cat along its width")
        whole = Part.join(parts, dim % first.ndim)
        if whole is not None:
            return whole
        if len({(len(stream.blocks), stream.open_block is None) for stream in streams}) > 1:
            refuse("torch.cat of streams with different numbers of sources")
        rest = len(first.sources()) - 1
        columns = [
            part.sources() if isinstance(part, DepthStream) else (part, *[torch.zeros_like(part)] * rest)
            for part in parts
        ]
        joined = [torch.cat(rows, dim) for rows in zip(*columns, strict=True)]
        boundary = None if first.open_block is None else Boundary(all(stream.is_closed for stream in streams))
        return first._of(joined, boundary, other=None)


@dataclasses.dataclass(eq=False)
class Part:
    """Where a stream was sliced from another one, so that joining the slices gives that one back without a copy.

    Single-stream blocks split the joined stream of an MMDiT into image and text, and the next block joins them again.

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
    def find(whole: DepthStream, index: Any) -> Part | None:
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
        return Part(whole, cut[0], start, stop)

    def place(self) -> tuple[int, int, int]:
        return self.dim, self.start, self.stop

    def is_current(self, stream: DepthStream) -> bool:
        """Whether nothing but writes has happened to `stream`, the slice: what is done to the whole does the same."""
        closed = self.delta is None and self.whole.is_closed
        return stream.is_closed == closed and stream.host_view == self.whole.host_view

    def written(self, stream: DepthStream, delta: Tensor) -> Part | None:
        """This part after a write to `stream`, the slice; None if the whole could not be written to in its place."""
        if not self.is_current(stream):
            return None
        return dataclasses.replace(self, delta=delta if self.delta is None else self.delta + delta)

    @staticmethod
    def join(streams: Sequence[Tensor | DepthStream], dim: int) -> DepthStream | None:
        """The stream that `streams` are all the slices of, with what was added to them; None if they are not."""
        pairs = [(stream, stream.part) for stream in streams if not isinstance(stream, Tensor) and stream.part]
        if len(pairs) < len(streams):
            return None
        whole, end = pairs[0][1].whole, 0
        for stream, part in pairs:
            if part.whole is not whole or part.dim != dim or part.start != end or not part.is_current(stream):
                return None
            end = part.stop
        if end != whole.shape[dim]:
            return None
        deltas = [part.delta for _, part in pairs if part.delta is not None]
        if not deltas:
            return whole
        rows = [deltas[0].new_zeros(stream.shape) if part.delta is None else part.delta for stream, part in pairs]
        return whole.write(torch.cat(rows, dim))


# Pytree nodes lose what was read ahead: what a function does to the tensors would have to be done to the means that it
# stands for.
def _flatten(stream: DepthStream) -> tuple[list[Any], tuple[Any, ...]]:
    total = None if stream.open_block is None else stream.open_block.settle()
    children = [stream.blocks, total, stream.condition, stream.other, stream.part]
    return children, (stream.is_closed, *stream.host_view)


def _unflatten(children: Any, context: Any) -> DepthStream:
    blocks, total, condition, other, part = children
    closed, *view = context
    block = None if total is None else OpenBlock(total, boundary=Boundary(closed))
    return DepthStream(blocks, block, condition, other, HostView(*view), part=part)


def _unflatten_part(children: Any, place: Any) -> Part:
    whole, delta = children
    dim, start, stop = place
    return Part(whole, dim, start, stop, delta)


pytree.register_pytree_node(DepthStream, _flatten, _unflatten, serialized_type_name="attnres_vision.DepthStream")
pytree.register_pytree_node(
    Part,
    lambda part: ([part.whole, part.delta], part.place()),
    _unflatten_part,
    serialized_type_name="attnres_vision.Part",
)
