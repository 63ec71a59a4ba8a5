"""Depth attention: the one operator that every model of this library shares.

`reference` is the specification. `eager` computes it with PyTorch, `triton` with GPU kernels, both behind one custom
operator (operator.py); `decomposed` is what `torch.compile` on a CPU, `torch.export`, `torch.func` and forward-mode AD
see. All compute what `depth_attention` below documents; only `depth_attention` checks its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnres_vision.ops import decomposed, dispatch, operator, reference
from attnres_vision.ops.dispatch import backend
from attnres_vision.ops.norms import Norm
from attnres_vision.ops.reference import promoted

__all__ = ["Norm", "backend", "decomposed", "depth_attention", "operator", "reference"]

FORMS = ("sum", "mean")


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    form: str = "sum",
    heads: int = 1,
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
    _check(sources, query, eps, scale, form, heads, add, norm)
    kernel = dispatch.choose(sources, heads, add)
    options: dict[str, Any] = {"eps": eps, "scale": scale, "form": form, "heads": heads}
    if not decomposed.is_needed(kernel):
        return operator.depth_attention(
            sources, query, add=add, norm=norm, return_weights=return_weights, kernel=kernel, **options
        )
    if add is not None:
        sources = [*sources[:-1], sources[-1] + add]
    out, weights = decomposed.depth_attention(sources, query, return_weights=True, **options)
    out = out if norm is None else norm.apply(out)
    results = (out, *([sources[-1]] if add is not None else []), *([weights] if return_weights else []))
    return results if len(results) > 1 else out


def _check(
    sources: Sequence[Tensor],
    query: Tensor,
    eps: float,
    scale: float,
    form: str,
    heads: int,
    add: Tensor | None,
    norm: Norm | None,
) -> None:
    """Raise for whatever `depth_attention` cannot compute. It runs at every read, so it only looks at metadata."""
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
