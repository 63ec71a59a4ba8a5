"""Depth attention: the one operator that every model of this library shares.

`reference` is the specification. `eager` computes it with PyTorch, `triton` with GPU kernels, both behind one custom
operator (operator.py); `decomposed` is what `torch.compile` on a CPU, `torch.export`, `torch.func` and forward-mode AD
see. All compute what `depth_attention` below documents, of a `Read` (read.py); only `depth_attention` checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from attnres_vision.ops import decomposed, dispatch, operator, reference
from attnres_vision.ops.dispatch import backend
from attnres_vision.ops.norms import Norm
from attnres_vision.ops.read import Read

__all__ = ["Norm", "backend", "decomposed", "depth_attention", "operator", "reference"]


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    eps: float = Read.eps,
    scale: float = Read.scale,
    form: str = Read.form,
    heads: int = Read.heads,
    add: Tensor | None = None,
    norm: Norm | nn.LayerNorm | nn.RMSNorm | None = None,
    return_weights: bool = False,
) -> Any:
    """Softmax attention of one query over the outputs of earlier layers (arXiv 2603.15031, Eq. 1 to 6).

        k_i = RMSNorm(v_i),   a_i = softmax_i(scale * q . k_i),   h = n * sum_i a_i v_i

    What stands before and behind a read in a transformer can be part of it: the sum that makes the newest source, and
    the norm that reads h. On a GPU all of it is one kernel (see `backend`).

    Args:
        sources: the n earlier outputs v_i, each (..., D), never stacked. Their dtypes may differ.
        query: (D,), one query for all tokens; (B, D), one per sample; or (B, T, D), in general one per token with the
            shape of a source. Any floating dtype.
        eps: epsilon of the keys' RMSNorm.
        scale: factor on the scores.
        form: "sum" (n times the weighted mean: zero query gives the plain sum) or "mean" (the paper's formula).
        heads: number of slices of D that each have their own softmax; keys are normalised over the whole D.
        add: (..., D), added to the last source before anything else: the output of the layer in front of this read,
            where the last source is the partial sum of its block.
        norm: the norm that h goes through, a `Norm` (which may have adaLN's scale and shift per sample) or the module.
            It takes h as it would be returned without it, and its parameters' dtypes are what PyTorch's own function
            takes for that h: a LayerNorm's are those of h, or fp32 where h is fp16 or bf16; an RMSNorm's are any.
        return_weights: also return the weights a_i.

    Returns:
        h of shape (..., D), or its norm, in the promoted dtype of the sources (the last one with `add`), whatever those
        of the query and the norm's parameters are and whether autocast is on; scores, softmax and sum are computed in
        fp32 (fp64 for fp64 sources). With `add`, also the new last source (..., D). With `return_weights`, also the
        weights (n, ..., heads) in fp32 (fp64). Several results are a tuple in this order.

    Raises:
        ValueError: no sources, misfit shapes or devices, heads that do not divide D, an unknown form, a negative eps.
        TypeError: an argument that is not a floating-point tensor, or not a number; parameters of a LayerNorm of
            another dtype.
    """
    norm = norm if norm is None or isinstance(norm, Norm) else Norm.of(norm)
    read = Read(sources, query, eps, scale, form, heads, add, norm, return_weights)
    read.check()
    read.kernel = dispatch.choose(sources, heads, add)
    return decomposed.attend(read) if dispatch.is_traced(read.kernel) else operator.attend(read)
