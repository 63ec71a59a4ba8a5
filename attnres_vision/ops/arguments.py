"""What goes into the custom operator (operator.py), in the order of its schema, and what it keeps for backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Floating-point operations per element of a source. Forward: score, norm and sum, a multiply and an add each. Backward:
# one dot product, the three terms of dv, and dq.
FORWARD_FLOPS = 6
BACKWARD_FLOPS = 10


class Inputs(NamedTuple):
    """The tensors of a read beside its sources.

    Attributes:
        query: (D,), (B, D) or the shape of a source.
        left, right: (..., r) and (D, r): the query of a token is `query + left @ right.T`.
        add: the shape of a source: the last source is `sources[-1] + add`, and also a result.
        mixed, lse: the shape of a source, and (...) fp32: a read of earlier blocks (weighted mean and log-sum-exp of
            the scores) that this one continues; `sources` are then those that came later.
        norm_weight, norm_bias: (D,), affine parameters of the norm.
        norm_scale, norm_shift: (B, D), adaLN's modulation behind it.
    """

    query: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    add: Tensor | None = None
    mixed: Tensor | None = None
    lse: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    norm_scale: Tensor | None = None
    norm_shift: Tensor | None = None

    @property
    def norm_parameters(self) -> tuple[Tensor | None, ...]:
        return self.norm_weight, self.norm_bias, self.norm_scale, self.norm_shift


class Options(NamedTuple):
    """The rest. `factor` is n or 1 (form="sum" or "mean"); `norm` is "", "layer" or "rms"; `kernel` eager or triton.

    `fp32_sum`: the sum with `add` is fp32, whatever it is of; `fp32_norm`: the norm is, whatever h is (kernels only).
    """

    kernel: str
    norm: str
    norm_eps: float
    eps: float
    scale: float
    factor: float
    heads: int
    fp32_sum: bool = False
    fp32_norm: bool = False


class Saved(NamedTuple):
    """What backward needs beside the inputs.

    Attributes:
        weights, scores: (n, ..., heads), inv_rms: (n, ...), n without what `mixed` stands for.
        mean, rstd: of the norm, (..., 1); empty where there is none.
    """

    weights: Tensor
    scores: Tensor
    inv_rms: Tensor
    mean: Tensor
    rstd: Tensor
