"""ResidualStream: what a host library may do with the object in its residual tensor's place, and what it may not.

A kind of residual connection is a subclass: it says how a layer's output is written and how a linear, token-wise
function acts. Here is the rest of a tensor's behaviour, which follows from that. Whatever is not here is a `TypeError`
that names the operation: a silent fall-back to the plain sum would train another model than the one that was asked for.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from attnres_vision.stream.refusals import refusal, refuse, refuse_operators


class ResidualStream:
    """Stands where the residual tensor (B, T, D) of a transformer stood.

    Subclasses have `tensor` (one of the stream's shape and device), `dtype`, `write`, `total`, `map`, `cat`, `clip`,
    `to_device` and `to_dtype`.
    """

    tensor: Tensor
    dtype: torch.dtype
    channel_dim: int

    def write(self, delta: Tensor) -> Self:
        """The stream after a layer has added `delta`."""
        raise NotImplementedError

    def total(self) -> Tensor:
        """The ordinary residual stream, for whoever needs a tensor."""
        raise NotImplementedError

    def map(self, function: Callable[[Tensor], Tensor], channel_dim: int | None = None) -> Self:
        """The stream with a linear, token-wise function applied; `channel_dim`: where its width is then."""
        raise NotImplementedError

    def __add__(self, delta: Tensor) -> Self:
        return self.write(delta)

    def __radd__(self, delta: Tensor) -> Self:
        return self.write(delta)

    # What a host asks of its residual tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    def dim(self) -> int:
        return self.tensor.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # Linear, token-wise operations

    def __getitem__(self, index: Any) -> Self:
        return self.map(lambda source: source[index])

    def reshape(self, *shape: Any) -> Self:
        return self.map(lambda source: source.reshape(*shape))

    def view(self, *shape: Any) -> Self:
        return self.map(lambda source: source.view(*shape))

    def split(self, size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        length = self.shape[dim]
        sizes = [min(size, length - start) for start in range(0, length, size)] if isinstance(size, int) else list(size)
        before = (slice(None),) * (dim % self.ndim)
        stops = itertools.accumulate(sizes)
        return tuple(self[before + (slice(stop - size, stop),)] for stop, size in zip(stops, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def permute(self, *dims: Any) -> Self:
        order = [dim % self.ndim for dim in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]
        channel_dim = order.index(self.channel_dim % self.ndim) - self.ndim
        return self.map(lambda source: source.permute(order), channel_dim)

    def channels_last(self) -> Self:
        """The stream with its width in the last dimension, where readers need it."""
        channel_dim = self.channel_dim
        return self if channel_dim == -1 else self.map(lambda source: source.movedim(channel_dim, -1), -1)

    def contiguous(self) -> Self:
        return self  # the tensor that is read out of the stream is contiguous

    # Dtypes and devices

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """The stream as one of another dtype."""
        raise NotImplementedError

    def to_device(self, device: Any, non_blocking: bool) -> Self:
        """The stream on another device."""
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> Self:
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        for value in args:
            if isinstance(value, (Tensor, ResidualStream)):
                dtype, device = value.dtype, value.device
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
                device = value
        moves = device is not None and torch.device(device) != self.device
        stream = self.to_device(device, kwargs.get("non_blocking", False)) if moves else self
        return stream if dtype is None else stream.to_dtype(dtype)

    def float(self) -> Self:
        return self.to_dtype(torch.float32)

    def type_as(self, other: Tensor | ResidualStream) -> Self:
        return self.to(other)

    # Everything else is an error

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ADD and not kwargs and len(args) == 2:
            left, right = args
            # write, not +: dynamo would trace `+` back into this function
            return left.write(right) if isinstance(left, ResidualStream) else right.write(left)
        if func in _CAT:
            return cls.cat(*args, **kwargs)  # type: ignore[attr-defined]
        if func is Tensor.type_as and not isinstance(args[0], ResidualStream):
            return args[0].to(args[1].dtype)
        if func in _METHODS:
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):  # torch.compile meets torch.utils.checkpoint
            raise TypeError(
                f"{func.name()} inside torch.compile(fullgraph=True) cannot take a {cls.__name__}: leave gradient "
                "checkpointing off in a compiled model (torch._functorch.config.activation_memory_budget saves memory "
                "there), or compile with fullgraph=False"
            )
        refuse(getattr(func, "__qualname__", str(func)))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(refusal(f".{name}"), name=name, obj=self)


_ADD = {operator.add, operator.iadd, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_CAT = {torch.cat, torch.concat, torch.concatenate}
_METHODS = {torch.reshape, torch.permute, torch.split, torch.chunk, torch.clip, torch.clamp}
refuse_operators(ResidualStream)
