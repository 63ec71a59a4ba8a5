"""Depth attention: the one operator that every model of this library shares.

`reference` is the specification, `eager` what runs on a CPU. All have the signature of `depth_attention` below.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnres_vision.ops import eager, reference

__all__ = ["depth_attention", "eager", "reference"]


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    form: str = "sum",
    heads: int = 1,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of one query over the outputs of earlier layers (arXiv 2603.15031, Eq. 1 to 6).

        k_i = RMSNorm(v_i),   a_i = softmax_i(scale * q . k_i),   h = n * sum_i a_i v_i

    Args:
        sources: the n earlier outputs v_i, each (..., D), never stacked. Their dtypes may differ.
        query: (D,), one query for all tokens; (B, D), one per sample; or (B, T, D), in general one per token with the
            shape of a source. Any floating dtype.
        eps: epsilon of the keys' RMSNorm.
        scale: factor on the scores.
        form: "sum" (n times the weighted mean: zero query gives the plain sum) or "mean" (the paper's formula).
        heads: number of slices of D that each have their own softmax; keys are normalised over the whole D.
        return_weights: also return the weights a_i.

    Returns:
        h of shape (..., D) in the promoted dtype of the sources; scores, softmax and sum are computed in fp32 (fp64 for
        fp64 sources). With `return_weights`, also the weights (n, ..., heads) in fp32 (fp64).

    Raises:
        ValueError: no sources, shapes that do not fit, heads that do not divide D, an unknown form.
        TypeError: an argument that is not a floating-point tensor.
    """
    return eager.depth_attention(
        sources, query, eps=eps, scale=scale, form=form, heads=heads, return_weights=return_weights
    )
