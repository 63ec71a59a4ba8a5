"""DepthStream: the object that stands where the residual tensor of a transformer stood.

A transformer block uses its residual tensor in two ways: a norm reads it, and a sublayer's output is added to it. The
stream answers both, so that a host library's own `x = x + f(norm(x))` runs Attention Residuals unchanged: `+` records
the output as a source (arXiv 2603.15031, Eq. 4 to 6), and a reader (reader.py) attends over the sources.

The stream is the only place that holds the state of a forward pass. It knows nothing of queries and weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


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
    """

    blocks: tuple[Tensor, ...]
    partial: Tensor | None = None
    condition: Tensor | None = None
    sealed: bool = False
    channel_dim: int = -1

    # Reading and writing ---------------------------------------------------------------------------------------------

    def sources(self) -> tuple[Tensor, ...]:
        """The tensors a reader attends over: the finished blocks, then the open block's partial sum."""
        return self.blocks if self.partial is None else (*self.blocks, self.partial)

    def seal(self) -> None:
        """End the open block: the next output starts a new one."""
        if not self.sealed:
            self.sealed = True

    def write(self, delta: Tensor) -> DepthStream:
        """The stream after a layer has added `delta`, which must have the stream's shape or broadcast to it."""
        if not isinstance(delta, Tensor):
            refuse(f"adding a {type(delta).__name__} to it")
        if delta.shape != self.shape:
            delta = delta.broadcast_to(self.shape)
        if self.partial is None:
            return dataclasses.replace(self, partial=delta, sealed=False)
        if self.sealed:
            return dataclasses.replace(self, blocks=self.sources(), partial=delta, sealed=False)
        # Sum in the dtype of the host's residual stream, which is that of the embedding: fp32 under autocast.
        partial = self.partial.to(torch.promote_types(self.partial.dtype, self.dtype))
        return dataclasses.replace(self, partial=partial + delta)

    def __add__(self, delta: Tensor) -> DepthStream:
        return self.write(delta)

    def __radd__(self, delta: Tensor) -> DepthStream:
        return self.write(delta)

    def total(self) -> Tensor:
        """The ordinary residual stream, in its own dtype: the sum of all sources."""
        total, *rest = self.sources()
        for source in rest:
            total = total + source
        return total

    # What a host may ask of its residual tensor ----------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return self.blocks[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].dtype

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
        blocks = tuple(function(block) for block in self.blocks)
        partial = None if self.partial is None else function(self.partial)
        channel_dim = self.channel_dim if channel_dim is None else channel_dim
        if blocks[0].ndim == 0 or blocks[0].shape[channel_dim] != self.shape[self.channel_dim]:
            refuse("indexing or reshaping its width")
        return dataclasses.replace(self, blocks=blocks, partial=partial, channel_dim=channel_dim)

    def __getitem__(self, index: Any) -> DepthStream:
        return self.map(lambda source: source[index])

    def reshape(self, *shape: Any) -> DepthStream:
        return self.map(lambda source: source.reshape(*shape))

    def view(self, *shape: Any) -> DepthStream:
        return self.map(lambda source: source.view(*shape))

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
        return self.map(lambda source: source.to(*args, **kwargs))

    def float(self) -> DepthStream:
        return self.map(lambda source: source.float())

    def type_as(self, other: Tensor) -> DepthStream:
        return self.map(lambda source: source.type_as(other))

    @staticmethod
    def cat(parts: Sequence[Tensor | DepthStream], dim: int = 0) -> DepthStream:
        """Streams and tensors joined along a token dimension.

        A tensor among streams (a class token that joins late) is an embedding: it becomes part of source 0, and the
        other sources are zero there.
        """
        first = next(part for part in parts if isinstance(part, DepthStream))
        if dim % first.ndim == first.channel_dim % first.ndim:
            refuse("torch.cat along its width")
        streams = [part for part in parts if isinstance(part, DepthStream)]
        if any(
            len(part.blocks) != len(first.blocks) or (part.partial is None) != (first.partial is None)
            for part in streams
        ):
            refuse("torch.cat of streams with different numbers of sources")
        columns = [
            part.sources()
            if isinstance(part, DepthStream)
            else (part, *[torch.zeros_like(part)] * (len(first.sources()) - 1))
            for part in parts
        ]
        joined = tuple(torch.cat(rows, dim) for rows in zip(*columns, strict=True))
        blocks, partial = (joined, None) if first.partial is None else (joined[:-1], joined[-1])
        return dataclasses.replace(first, blocks=blocks, partial=partial)

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
        raise AttributeError(_refusal(f".{name}"), name=name, obj=self)


_ADD = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_CAT = {torch.cat, torch.concat, torch.concatenate}
_METHODS = {torch.reshape, torch.permute}


def _refusal(operation: str) -> str:
    return (
        f"{operation} reads the residual stream of an AttnRes model, which is a list of sources and not one tensor. "
        "If a module of the model does this, name that module as a reader of its block in attnres_vision.families; "
        "in your own code, take stream.total() for the plain residual sum"
    )


def refuse(operation: str) -> NoReturn:
    """Raise the TypeError for an operation that a stream does not know."""
    raise TypeError(_refusal(operation))


def _refused_operator(symbol: str) -> Callable[..., NoReturn]:
    def operator(stream: DepthStream, *operands: Any) -> NoReturn:
        refuse(f"the operator {symbol}")

    return operator


# Python looks operators up on the class, past __getattr__; its own message would name no way out.
for _symbol, _names in {
    "-": ("neg", "sub", "rsub"),
    "*": ("mul", "rmul"),
    "/": ("truediv", "rtruediv"),
    "//": ("floordiv", "rfloordiv"),
    "%": ("mod", "rmod"),
    "**": ("pow", "rpow"),
    "@": ("matmul", "rmatmul"),
    "<": ("lt",),
    "<=": ("le",),
    ">": ("gt",),
    ">=": ("ge",),
    "[...] =": ("setitem",),
}.items():
    for _name in _names:
        setattr(DepthStream, f"__{_name}__", _refused_operator(_symbol))


pytree.register_pytree_node(
    DepthStream,
    lambda stream: ([stream.blocks, stream.partial, stream.condition], (stream.sealed, stream.channel_dim)),
    lambda children, context: DepthStream(*children, *context),
    serialized_type_name="attnres_vision.DepthStream",
)
