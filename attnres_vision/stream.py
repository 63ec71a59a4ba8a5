"""DepthStream: the object that stands where the residual tensor of a transformer stood.

A transformer block uses its residual tensor in two ways: a norm reads it, and a sublayer's output is added to it. The
stream answers both, so that a host library's own `x = x + f(norm(x))` runs Attention Residuals unchanged: `+` records
the output as a source (arXiv 2603.15031, Eq. 4 to 6), and a reader (reader.py) attends over the sources.

The stream is the only place that holds the state of a forward pass. It knows nothing of queries and weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnres_vision import in_place
from attnres_vision.ops import decomposed, dispatch
from attnres_vision.ops.collect import collect
from attnres_vision.ops.reference import promoted
from attnres_vision.ops.two_phase import Earlier
from attnres_vision.refusals import refusal, refuse, refuse_operators
from attnres_vision.stream_part import StreamPart


# A dataclass because FSDP2 finds the tensors of dataclasses, and a registered pytree node (below) for everything else.
@dataclasses.dataclass(eq=False)
class DepthStream:
    """What the layers so far have added to the residual stream, kept apart by block.

    Attributes:
        blocks: finished block sums; `blocks[0]` is the embedding. Each (B, T, D), or any (..., D).
        partial: sum of the open block's outputs, None before its first output.
        condition: (B, D) vector for `query="condition"`, None otherwise.
        sealed: a reader has opened the next block: the next output starts a new partial sum. The sources are the same
            before and after sealing, so a reader may seal a stream any number of times (recomputation does).
        channel_dim: where the width D is; -1 until `permute` moves it.
        other: (B, D') token mean of the other stream's newest source, for models that have two and ask for it.
        cast: the dtype that the host has cast its residual stream to; the sources stay in their own.
        bounds: the host has clipped its residual stream to these: every read is clipped to them, as every source is.
        part: what this stream is a slice of, None if of nothing.
        uncast: the stream that this one is a cast of; the host reads the cast and goes on with the other.
        pending: an output still to be added to the partial sum, which the next reader's kernel does on its way.
        ahead: for some readers what two_phase.py has read for them of the first sources; others read all themselves.
        found: what a read of this stream found for readers to come, until `write` hands it on as `ahead`: if it stayed,
            the arguments of a checkpoint would be in a cycle with the graph, and the recomputation would find it.
        versions: those of blocks, partial and pending when the stream got them (in_place.py).
        superseded: `+=` has made another stream of this one, where a tensor would have been changed.
    """

    blocks: tuple[Tensor, ...]
    partial: Tensor | None = None
    condition: Tensor | None = None
    sealed: bool = False
    channel_dim: int = -1
    other: Tensor | None = None
    cast: torch.dtype | None = None
    bounds: tuple[float, float] | None = None
    part: StreamPart | None = None
    uncast: DepthStream | None = None
    pending: Tensor | None = None
    ahead: Mapping[object, Earlier] | None = None
    found: Mapping[object, Earlier] | None = None
    versions: tuple[int, ...] | None = None
    superseded: bool = False

    def __post_init__(self) -> None:
        if self.versions is None:
            self.versions = tuple(in_place.version(tensor) for tensor in self._held())

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies: what was read ahead is for the readers of this stream's own model."""
        self.settle()
        return {**self.__dict__, "ahead": None, "found": None, "versions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    # Reading and writing ---------------------------------------------------------------------------------------------

    def sources(self) -> tuple[Tensor, ...]:
        """The tensors a reader attends over: the finished blocks, then the open block's partial sum."""
        self.settle()
        return self.blocks if self.partial is None else (*self.blocks, self.partial)

    def _held(self) -> list[Tensor]:
        return [tensor for tensor in (*self.blocks, self.partial, self.pending) if tensor is not None]

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
        assert self.versions is not None
        for index, (tensor, recorded) in enumerate(zip(self._held(), self.versions, strict=True)):
            if in_place.is_changed(tensor, recorded):
                raise RuntimeError(
                    f"source {index} of the residual stream of an AttnRes model was changed by an in-place operation "
                    "after it had been added: a stream keeps a layer's output itself, not the sum. Use the operation "
                    "that makes a new tensor (inplace=False, x * 2 for x.mul_(2)), or add out.clone() to the stream"
                )

    def settle(self, total: Tensor | None = None) -> None:
        """Bring the partial sum up to date; `total` is that sum where a kernel has made it."""
        self.check()
        if self.pending is not None:
            if total is None and self.hides_gradient(self.pending):
                with torch.inference_mode(False), torch.enable_grad():
                    total = self._sum(self.pending)
            self.partial, self.pending = self._sum(self.pending) if total is None else total, None
            assert self.versions is not None
            self.versions = (*self.versions[:-2], in_place.version(self.partial))

    def hides_gradient(self, delta: Tensor | None) -> bool:
        """Whether the sum with `delta` has a gradient that what runs now does not see: a hook, under no_grad."""
        return not torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (self.partial, delta))

    def seal(self) -> None:
        """End the open block: the next output starts a new one."""
        self.sealed = True
        if self.uncast is not None:
            self.uncast.seal()

    def write(self, delta: Tensor) -> DepthStream:
        """The stream after a layer has added `delta`, which must have the stream's shape or broadcast to it."""
        if not isinstance(delta, Tensor):
            refuse(f"adding a {type(delta).__name__} to it")
        if delta.shape != self.shape:
            delta = delta.broadcast_to(self.shape)
        self.settle()
        part = None if self.part is None else self.part.written(self, delta)
        ahead, self.found = self.found or self.ahead, None
        new = dataclasses.replace(self, ahead=ahead, sealed=False, part=part, uncast=None, superseded=False)
        versions = self.versions or ()
        if self.partial is not None and not self.sealed and not self._may_wait(delta, part):
            new.partial = self._sum(delta)
            new.versions = (*versions[:-1], in_place.version(new.partial))
            return new
        delta = in_place.held(delta)
        if self.partial is not None and self.sealed:
            new.blocks = (*self.blocks, collect(self.partial))  # from now on many layers read it
        if self.partial is None or self.sealed:
            new.partial = delta
        else:
            new.pending = delta
        # a compiler would guard on the numbers
        unknown = torch.compiler.is_compiling()
        new.versions = tuple(map(in_place.version, new._held())) if unknown else (*versions, in_place.version(delta))
        return new

    def _sum(self, delta: Tensor) -> Tensor:
        assert self.partial is not None
        return self.partial.to(self.sum_dtype(delta)) + delta

    def sum_dtype(self, delta: Tensor) -> torch.dtype:
        """The dtype of the partial sum with `delta`: the host's stream's, the embedding's, so fp32 under autocast."""
        assert self.partial is not None
        return promoted([self.partial.dtype, self.dtype, delta.dtype])

    def _may_wait(self, delta: Tensor, part: StreamPart | None) -> bool:
        """Whether the next reader can make the sum: in a Triton kernel, of plain sources."""
        plain = self.channel_dim == -1 and self.cast is None and self.bounds is None and part is None
        if not plain or in_place.is_uncounted(delta) or self.partial is None or self.hides_gradient(delta):
            return False
        kernel = dispatch.choose((self.blocks[0], self.partial, delta), 1)
        return kernel == "triton" and not decomposed.is_needed(kernel)

    def __add__(self, delta: Tensor) -> DepthStream:
        return self.write(delta)

    def __radd__(self, delta: Tensor) -> DepthStream:
        return self.write(delta)

    def __iadd__(self, delta: Tensor) -> DepthStream:
        new = self.write(delta)
        self.superseded = True
        return new

    def total(self) -> Tensor:
        """The ordinary residual stream, in its own dtype: the sum of all sources."""
        total, *rest = self.sources()
        if self.cast is not None:
            total = total.to(self.cast)
        for source in rest:
            total = total + source
        return total if self.bounds is None else total.clamp(*self.bounds)

    # What a host may ask of its residual tensor ----------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return self.blocks[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].dtype if self.cast is None else self.cast

    @property
    def device(self) -> torch.device:
        return self.blocks[0].device

    @property
    def ndim(self) -> int:
        return self.blocks[0].ndim

    def dim(self) -> int:
        return self.blocks[0].ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # Linear, token-wise operations act on every source ---------------------------------------------------------------

    def map(self, function: Callable[[Tensor], Tensor], channel_dim: int | None = None) -> DepthStream:
        """The stream with a linear, token-wise function applied to every source.

        Raises:
            TypeError: the function changed the width, so it is not token-wise.
        """
        self.settle()
        blocks = tuple(function(block) for block in self.blocks)
        partial = None if self.partial is None else function(self.partial)
        channel_dim = self.channel_dim if channel_dim is None else channel_dim
        if blocks[0].ndim == 0 or blocks[0].shape[channel_dim] != self.shape[self.channel_dim]:
            refuse("indexing or reshaping its width")
        return self._of_others(blocks=blocks, partial=partial, channel_dim=channel_dim, part=None, uncast=None)

    def _of_others(self, **changes: Any) -> DepthStream:
        """The stream of other sources: what was read ahead of these is not theirs."""
        return dataclasses.replace(self, ahead=None, found=None, versions=None, **changes)

    def __getitem__(self, index: Any) -> DepthStream:
        part = self.map(lambda source: source[index])
        part.part = StreamPart.find(self, index)
        return part

    def __setitem__(self, index: Any, value: DepthStream) -> None:
        """`stream[:, a:b] = stream[:, a:b] + delta`, which some hosts write for adding to some of the tokens."""
        part = value.part if isinstance(value, DepthStream) else None
        own = StreamPart.find(self, index)
        if part is None or own is None or part.whole is not self or own.place() != part.place():
            refuse("the operator [...] =, except with what was added to the same slice,")
        if part.delta is not None:
            written = self.write(part.padded_delta())
            written.settle()
            self.ahead = None
            self.blocks, self.partial, self.sealed, self.part = written.blocks, written.partial, False, written.part
            self.versions = written.versions

    def reshape(self, *shape: Any) -> DepthStream:
        return self.map(lambda source: source.reshape(*shape))

    def view(self, *shape: Any) -> DepthStream:
        return self.map(lambda source: source.view(*shape))

    def split(self, size: int | Sequence[int], dim: int = 0) -> tuple[DepthStream, ...]:
        length = self.shape[dim]
        sizes = [min(size, length - start) for start in range(0, length, size)] if isinstance(size, int) else list(size)
        before = (slice(None),) * (dim % self.ndim)
        stops = itertools.accumulate(sizes)
        return tuple(self[before + (slice(stop - size, stop),)] for stop, size in zip(stops, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[DepthStream, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def permute(self, *dims: Any) -> DepthStream:
        order = [dim % self.ndim for dim in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]
        channel_dim = order.index(self.channel_dim % self.ndim) - self.ndim
        return self.map(lambda source: source.permute(order), channel_dim)

    def channels_last(self) -> DepthStream:
        """The stream with its width in the last dimension, where readers need it."""
        if self.channel_dim == -1:
            return self
        return self.map(lambda source: source.movedim(self.channel_dim, -1), -1)

    def contiguous(self) -> DepthStream:
        return self  # the tensor that is read out of the stream is contiguous

    def to(self, *args: Any, **kwargs: Any) -> DepthStream:
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        for value in args:
            if isinstance(value, (Tensor, DepthStream)):
                dtype, device = value.dtype, value.device
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
                device = value
        stream = self
        if device is not None and torch.device(device) != self.device:
            non_blocking = kwargs.get("non_blocking", False)
            stream = stream._with_vectors(lambda source: source.to(device, non_blocking=non_blocking))
        return stream if dtype is None else stream.to_dtype(dtype)

    def to_dtype(self, dtype: torch.dtype) -> DepthStream:
        """The stream as one of another dtype: reads and sums change, the finished sources stay as they are."""
        if dtype == self.dtype:
            return self
        self.settle()
        if dtype != self.blocks[0].dtype:
            return dataclasses.replace(self, cast=dtype, uncast=self)
        partial = None if self.partial is None else self.partial.to(dtype)
        return self._of_others(partial=partial, cast=None)

    def _with_vectors(self, function: Callable[[Tensor], Tensor]) -> DepthStream:
        """`map` that also changes the stream's conditions."""
        condition, other = (None if v is None else function(v) for v in (self.condition, self.other))
        return dataclasses.replace(self.map(function), condition=condition, other=other)

    def float(self) -> DepthStream:
        return self.to_dtype(torch.float32)

    def type_as(self, other: Tensor | DepthStream) -> DepthStream:
        return self.to(other)

    def clip(self, min: Any = None, max: Any = None) -> DepthStream:
        """What hosts do against overflow in fp16. The sources are clipped, and so is every read of them.

        A host clips the running sum once and goes on from there. The sum is not computed here, so where a host really
        would clip, the model differs from it; it stays finite in the same way.
        """
        low, high = -float("inf") if min is None else min, float("inf") if max is None else max
        clipped = self.map(lambda source: source.clamp(low, high))
        return dataclasses.replace(clipped, bounds=(low, high))

    clamp = clip

    @staticmethod
    def cat(parts: Sequence[Tensor | DepthStream], dim: int = 0) -> DepthStream:
        """Streams and tensors joined along a token dimension.

        A tensor among streams (a class token that joins late) is an embedding: it becomes part of source 0, and the
        other sources are zero there. All parts of one stream give that stream back, without a copy of its sources.
        """
        first = next(part for part in parts if isinstance(part, DepthStream))
        if dim % first.ndim == first.channel_dim % first.ndim:
            refuse("torch.cat along its width")
        whole = StreamPart.join(parts, dim)
        if whole is not None:
            return whole
        streams = [part for part in parts if isinstance(part, DepthStream)]
        if len({(len(part.blocks), part.partial is None) for part in streams}) > 1:
            refuse("torch.cat of streams with different numbers of sources")
        rest = len(first.sources()) - 1
        columns = [
            part.sources() if isinstance(part, DepthStream) else (part, *[torch.zeros_like(part)] * rest)
            for part in parts
        ]
        joined = tuple(torch.cat(rows, dim) for rows in zip(*columns, strict=True))
        blocks, partial = (joined, None) if first.partial is None else (joined[:-1], joined[-1])
        sealed = all(part.sealed for part in streams)
        changes = {"blocks": blocks, "partial": partial, "sealed": sealed}
        return first._of_others(**changes, other=None, part=None, uncast=None)

    # Everything else is an error -------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ADD and not kwargs and len(args) == 2:
            left, right = args
            # write, not +: dynamo would trace `+` back into this function
            return left.write(right) if isinstance(left, DepthStream) else right.write(left)
        if func in _CAT:
            return cls.cat(*args, **kwargs)
        if func is Tensor.type_as and not isinstance(args[0], DepthStream):
            return args[0].to(args[1].dtype)
        if func in _METHODS:
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):  # torch.compile meets torch.utils.checkpoint
            raise TypeError(
                f"{func.name()} inside torch.compile(fullgraph=True) cannot take a DepthStream: leave gradient "
                "checkpointing off in a compiled model (torch._functorch.config.activation_memory_budget saves memory "
                "there), or compile with fullgraph=False"
            )
        refuse(getattr(func, "__qualname__", str(func)))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(refusal(f".{name}"), name=name, obj=self)


_ADD = {operator.add, operator.iadd, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_CAT = {torch.cat, torch.concat, torch.concatenate}
_METHODS = {torch.reshape, torch.permute, torch.split, torch.chunk, torch.clip, torch.clamp}
refuse_operators(DepthStream)


def _flatten(stream: DepthStream) -> tuple[list[Any], tuple[Any, ...]]:
    stream.settle()
    # Not `ahead`: what a function does to the tensors would have to be done to the means that it stands for
    children = [stream.blocks, stream.partial, stream.condition, stream.other, stream.part]
    return children, (stream.sealed, stream.channel_dim, stream.cast, stream.bounds)


def _unflatten(children: Any, context: Any) -> DepthStream:
    blocks, partial, condition, other, part = children
    sealed, channel_dim, cast, bounds = context
    return DepthStream(blocks, partial, condition, sealed, channel_dim, other, cast, bounds, part)


pytree.register_pytree_node(DepthStream, _flatten, _unflatten, serialized_type_name="attnres_vision.DepthStream")
