"""LazyRead: a read that waits for the LayerNorm or RMSNorm that takes it, so that both are one operation.

A LayerNorm saves its input for backward: one more copy of the hidden states per sublayer, beside the sources. Read and
norm as one operator save the sources alone and mix the hidden states again. The norm stays the host's own module: it is
called with this object and hands it to `F.layer_norm` or `F.rms_norm`, which ask `__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres_vision.ops import Norm, dispatch, operator
from attnres_vision.ops.dtypes import norm_is_fp32, promoted
from attnres_vision.stream.open_block import OpenBlock


class LazyRead:
    """The arguments of one depth attention. Everything but these norms sees the tensor it stands for."""

    def __init__(
        self, sources: Sequence[Tensor], query: Tensor, *, open_block: OpenBlock | None = None, **options: Any
    ) -> None:
        """`open_block`: the last source is its sum, to which an output may still have to be added."""
        self._sources, self._query, self._options = sources, query, options
        self._open_block = open_block
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        """The hidden states (..., D), computed once."""
        if self._tensor is None:
            self._tensor = self._read()
        return self._tensor

    def layer_norm(
        self, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """`F.layer_norm(self, ...)`, fused where the dtypes and the width allow it."""
        fp32 = norm_is_fp32("layer_norm", self.device.type)
        if not fp32:
            Norm("layer", eps, weight, bias).check_dtypes(self.dtype)  # PyTorch's own error does not say what differs
        if tuple(shape) != self.shape[-1:] or not self._can_fuse(fp32, weight, bias):
            return F.layer_norm(self.tensor(), list(shape), weight, bias, eps)
        return self._read(Norm("layer", eps, weight, bias), fp32)

    def rms_norm(self, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        """`F.rms_norm(self, ...)`, likewise."""
        fp32 = norm_is_fp32("rms_norm", self.device.type)
        if tuple(shape) != self.shape[-1:] or eps is None or not self._can_fuse(fp32, weight):
            return F.rms_norm(self.tensor(), list(shape), weight, eps)
        return self._read(Norm("rms", eps, weight), fp32)

    def _can_fuse(self, fp32: bool, *parameters: Tensor | None) -> bool:
        """Whether the fused norm returns what PyTorch's would, dtype and all; `fp32` if autocast makes that fp32."""
        dtypes = {parameter.dtype for parameter in parameters if parameter is not None}
        if fp32:
            return self._kernel() == "triton" and torch.float64 not in dtypes
        return dtypes <= {self.dtype}

    def _kernel(self) -> str:
        return dispatch.choose(self._sources, self._options.get("heads", 1))

    def _read(self, norm: Norm | None = None, fp32_norm: bool = False) -> Tensor:
        options = {**self._options, "norm": norm, "kernel": self._kernel(), "fp32_norm": fp32_norm}
        block, sources = self._open_block, self._sources
        if block is None:
            return operator.depth_attention(sources, self._query, **options)
        if block.pending is None or block.hides_gradient(block.pending):  # or somebody else has made the sum since
            return operator.depth_attention((*sources[:-1], block.settle()), self._query, **options)
        fp32_sum = block.dtype == torch.float32
        out, total = operator.depth_attention(sources, self._query, add=block.pending, fp32_sum=fp32_sum, **options)
        block.settle(total)
        return out

    # What adaLN modules ask of their input before they norm it
    @property
    def dtype(self) -> torch.dtype:
        """That of the hidden states."""
        dtypes = [source.dtype for source in self._sources]
        if self._open_block is not None and self._open_block.pending is not None:
            dtypes.append(self._open_block.dtype or self._open_block.pending.dtype)
        if "earlier" in self._options:
            dtypes.append(self._options["earlier"].dtype)
        return promoted(dtypes)

    device = property(lambda self: self._sources[0].device)
    shape = property(lambda self: self._sources[0].shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS and isinstance(args[0], LazyRead):
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)

        def tensor(value: Any) -> Any:
            return value.tensor() if isinstance(value, LazyRead) else value

        return func(*map(tensor, args), **{name: tensor(value) for name, value in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet, or a protocol that a stand-in does not speak
            raise AttributeError(name)
        return getattr(self.tensor(), name)


_NORMS = (F.layer_norm, F.rms_norm)
# These hand their argument to one of the two and do nothing else with it; a subclass of one's own may do anything.
_FORWARDS = (
    nn.LayerNorm.forward,
    nn.RMSNorm.forward,
    timm.layers.LayerNorm.forward,
)
# Forwards of modules that only hand their first argument to a LayerNorm of theirs, and its name: adaLN modules (dit).
WRAPPERS: dict[Callable, str] = {}


def may_be_lazy(module: nn.Module, reader: nn.Module, kernel: str) -> bool:
    """Whether `module` can be given a LazyRead: a LayerNorm in eager mode, and no hook but ours looks at the read."""
    if dispatch.is_traced(kernel) or len(module._forward_pre_hooks) > 1 or not _is_plain(module, pre_hooks=False):
        return False
    wrapped = WRAPPERS.get(type(module).forward)
    norm = module if wrapped is None else getattr(module, wrapped)
    return type(norm).forward in _FORWARDS and _is_plain(reader) and (norm is module or _is_plain(norm))


def _is_plain(module: nn.Module, pre_hooks: bool = True) -> bool:
    """No hooks, and no forward of its own, which is how accelerate's and diffusers' hooks work."""
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in vars(module) and not (pre_hooks and module._forward_pre_hooks)
