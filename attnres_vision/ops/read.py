"""Read: the arguments of one depth attention, for every implementation of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_vision.ops.dtypes import promoted
from attnres_vision.ops.norms import Norm
from attnres_vision.ops.two_phase import Earlier

FORMS = ("sum", "mean")


@dataclasses.dataclass
class Read:
    """What `attnres_vision.ops.depth_attention` is given, which documents it, and what only the library uses.

    Args:
        low_rank: left (..., r) and right (D, r): the query of a token is `query + left @ right.T`.
        earlier: what two_phase.py has attended over before.
        kernel: "eager" or "triton" (dispatch.py chooses).
        fp32_sum: the sum with `add` is made in fp32, as the host's stream is, whatever the two are.
        fp32_norm: the norm's result is fp32, whatever h is, as under autocast on a GPU; for kernel "triton".
    """

    sources: Sequence[Tensor]
    query: Tensor
    eps: float = 1e-6
    scale: float = 1.0
    form: str = "sum"
    heads: int = 1
    add: Tensor | None = None
    norm: Norm | None = None
    return_weights: bool = False
    low_rank: tuple[Tensor, Tensor] | None = None
    earlier: Earlier | None = None
    kernel: str = "eager"
    fp32_sum: bool = False
    fp32_norm: bool = False

    @property
    def factor(self) -> float:
        """What the weighted mean is multiplied by: the number of sources, or 1."""
        known = 0 if self.earlier is None else self.earlier.count
        return float(len(self.sources) + known) if self.form == "sum" else 1.0

    def summed_sources(self) -> Sequence[Tensor]:
        """The sources, the last one with `add`."""
        return self.sources if self.add is None else [*self.sources[:-1], self.sources[-1] + self.add]

    def results(self, out: Tensor, last: Tensor, weights: Tensor) -> Any:
        """What is returned, of h, the last source and the weights."""
        out = out if self.norm is None else self.norm.apply(out)
        found = (out, *([last] if self.add is not None else []), *([weights] if self.return_weights else []))
        return found if len(found) > 1 else out

    def check(self) -> None:
        """Raise for whatever `depth_attention` cannot compute. It only looks at metadata: users' reads are many."""
        sources, query, add, norm = self.sources, self.query, self.add, self.norm
        eps, scale, form, heads = self.eps, self.scale, self.form, self.heads
        if not isinstance(sources, (list, tuple)) and not isinstance(sources, Sequence):
            raise TypeError(
                f"sources must be a sequence of tensors (for a stack: stack.unbind(0)), got {_describe(sources)}"
            )
        if len(sources) == 0:
            raise ValueError("sources must hold at least one tensor, got none")
        for index, source in enumerate(sources):
            if not isinstance(source, Tensor) or not source.is_floating_point():
                raise TypeError(f"sources[{index}] must be a floating-point tensor, got {_describe(source)}")
        first = sources[0]
        shape, device = first.shape, first.device
        if len(shape) == 0:
            raise ValueError("sources must have shape (..., D), got scalars")
        for index, source in enumerate(sources):
            if source.shape != shape:
                raise ValueError(
                    f"sources must all have one shape, got {_shape(shape)} and, at {index}, {_shape(source.shape)}"
                )
            if source.device != device:
                raise ValueError(f"sources must all be on one device, got {device} and, at {index}, {source.device}")
        if not isinstance(query, Tensor) or not query.is_floating_point():
            raise TypeError(f"query must be a floating-point tensor, got {_describe(query)}")
        allowed = [shape[-1:], shape] if len(shape) < 3 else [shape[-1:], (shape[0], shape[-1]), shape]
        # Lengths first: comparing (B, T, D) with (D,) would make torch.export exclude B = D under dynamic shapes
        if not any(len(query.shape) == len(size) and query.shape == size for size in allowed):
            listed = " or ".join(_shape(size) for size in allowed)
            raise ValueError(f"query must have shape {listed} for these sources, got {_shape(query.shape)}")
        if query.device != device:
            raise ValueError(f"query must be on the device of the sources, {device}, got {query.device}")
        if not isinstance(heads, int):
            raise TypeError(f"heads must be an int, got {_describe(heads)}")
        if heads < 1 or shape[-1] % heads != 0:
            raise ValueError(f"heads must be a positive divisor of the width D={shape[-1]}, got {heads}")
        if form not in FORMS:
            raise ValueError(f"form must be 'sum' or 'mean', got {form!r}")
        if not isinstance(eps, (int, float)) or not isinstance(scale, (int, float)):
            raise TypeError(f"eps and scale must be numbers, got {_describe(eps)} and {_describe(scale)}")
        if not eps >= 0:
            raise ValueError(f"eps must be zero or positive, got {eps}")
        if add is not None:
            if not isinstance(add, Tensor) or not add.is_floating_point():
                raise TypeError(f"add must be a floating-point tensor, got {_describe(add)}")
            if add.shape != shape or add.device != device:
                raise ValueError(
                    f"add must have the shape of the sources, {_shape(shape)} on {device}, got {_shape(add.shape)} on "
                    f"{add.device}"
                )
        if norm is not None:
            last = sources[-1].dtype if add is None else torch.promote_types(sources[-1].dtype, add.dtype)
            norm.check(first, promoted([*(source.dtype for source in sources[:-1]), last]))


def _shape(size: Sequence[int]) -> str:
    """(2, 7, 48) rather than torch.Size([2, 7, 48])."""
    return str(tuple(size))


def _describe(value: object) -> str:
    """What was given, for an error message: the dtype of a tensor, else the type."""
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
