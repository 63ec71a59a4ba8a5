"""Depth attention for eager PyTorch: the custom operator `attnres_vision::depth_attention`, with fakes and FLOPs.

The formulas are in analytic.py.
One operator computes a read and, on request, what stands beside it, so that neither has to be kept for backward:

    q = query + left @ right.T       the per-token query of a low-rank projection
    y = LayerNorm(h)                 the norm that reads h: backward mixes h again from the weights

Saved for backward are the sources, the small inputs and three numbers per source, token and depth head. No double
backward: it raises (torch.func's transforms can be nested; they run decomposed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnres_vision.ops.analytic import mix, read_backward, read_forward
from attnres_vision.ops.collect import SourceGradient, gradient_of
from attnres_vision.ops.reference import compute_dtype, no_autocast, promoted_dtype

# Floating-point operations per element of a source. Forward: score, norm and sum, a multiply and an add each. Backward:
# one dot product, the three terms of dv, and dq.
FORWARD_FLOPS = 6
BACKWARD_FLOPS = 10


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    form: str = "sum",
    heads: int = 1,
    return_weights: bool = False,
    low_rank: tuple[Tensor, Tensor] | None = None,
    layer_norm: tuple[Tensor | None, Tensor | None, float] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnres_vision.ops.depth_attention`, which documents the arguments, and two that only the depth stream uses.

    Args:
        low_rank: left (..., r) and right (D, r): the query of a token is `query + left @ right.T`.
        layer_norm: weight, bias and eps of the LayerNorm to apply to h; all dtypes must then be one.
    """
    factor = float(len(sources)) if form == "sum" else 1.0
    left, right = low_rank or (None, None)
    weight, bias, norm_eps = layer_norm or (None, None, None)
    arguments = (left, right, weight, bias, norm_eps, eps, scale, factor, heads)
    gradients = [gradient_of(source) for source in sources] if torch.is_grad_enabled() else []
    if any(gradient is not None for gradient in gradients):
        out, weights = _CollectingRead.apply(gradients, query, *arguments, *sources)
    else:
        out, weights, *_ = forward_op(list(sources), query, *arguments)
    return (out, weights) if return_weights else out


@torch.library.custom_op("attnres_vision::depth_attention", mutates_args=())
def forward_op(
    sources: list[Tensor],
    query: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm_eps: float | None,
    eps: float,
    scale: float,
    factor: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(h or y, weights, scores, 1/rms, mean, rstd); the last two are the LayerNorm's, empty without one."""
    dtype = compute_dtype(promoted_dtype(sources))
    query = _token_query(query, left, right, dtype)
    out, weights, scores, inv_rms = read_forward(sources, query, eps, scale, factor, heads)
    if norm_eps is None:
        return out, weights, scores, inv_rms, out.new_empty(0), out.new_empty(0)
    out, mean, rstd = torch.native_layer_norm(out, out.shape[-1:], norm_weight, norm_bias, norm_eps)
    return out, weights, scores, inv_rms, mean, rstd


@torch.library.custom_op("attnres_vision::depth_attention_backward", mutates_args=())
def backward_op(
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    sources: list[Tensor],
    query: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weights: Tensor,
    scores: Tensor,
    inv_rms: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: float,
    factor: float,
    needs_grad: list[bool],
) -> list[Tensor]:
    """Gradients of (*sources, query, left, right, norm_weight, norm_bias), those that `needs_grad` marks."""
    small = (query, left, right, norm_weight, norm_bias)
    saved = (weights, scores, inv_rms, mean, rstd)
    grads = _gradients(grad_out, grad_weights, sources, small, saved, scale, factor, needs_grad, [None] * len(sources))
    return [grad for grad, needed in zip(grads, needs_grad, strict=True) if needed and grad is not None]


def _gradients(
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    sources: Sequence[Tensor],
    small: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    scale: float,
    factor: float,
    needs_grad: Sequence[bool],
    gradients: Sequence[SourceGradient | None],
) -> list[Tensor | None]:
    """The gradient of every input; None where there is none, or where it went to `gradients` (see collect.py)."""
    query, left, right, norm_weight, norm_bias = small
    weights, scores, inv_rms, mean, rstd = saved
    assert query is not None
    *needs_read, needs_left, needs_right, needs_weight, needs_bias = needs_grad
    norm_grads: list[Tensor | None] = [None, None]
    if _has_norm(mean) and grad_out is not None:
        hidden = mix(sources, weights, factor)
        marks = [True, needs_weight, needs_bias]
        grad_out, *norm_grads = torch.ops.aten.native_layer_norm_backward(
            grad_out.contiguous(), hidden, hidden.shape[-1:], mean, rstd, norm_weight, norm_bias, marks
        )
    token_query = _token_query(query, left, right, weights.dtype)
    if left is not None:
        needs_read[-1] = needs_read[-1] or needs_left or needs_right
    *source_grads, query_grad = read_backward(
        grad_out, grad_weights, sources, token_query, weights, scores, inv_rms, scale, factor, needs_read, gradients
    )
    low_rank_grads: list[Tensor | None] = [None, None]
    if left is not None and right is not None and query_grad is not None:
        with no_autocast(weights.device.type):
            rows = query_grad.flatten(0, -2)
            low_rank_grads = [
                (query_grad @ right.to(rows.dtype)).to(left.dtype),
                (rows.T @ left.flatten(0, -2).to(rows.dtype)).to(right.dtype),
            ]
            query_grad = rows.sum(0).to(query.dtype)
    return [*source_grads, query_grad, *low_rank_grads, *norm_grads]


def _has_norm(mean: Tensor) -> bool:
    """Whether a read was fused with its LayerNorm. Not numel(): an empty batch has empty moments, (0, ..., 1)."""
    return mean.shape != (0,)


def _token_query(query: Tensor, left: Tensor | None, right: Tensor | None, dtype: torch.dtype) -> Tensor:
    if left is None or right is None:
        return query
    with no_autocast(query.device.type):
        rows = torch.addmm(query.to(dtype), left.flatten(0, -2).to(dtype), right.to(dtype).T)
    return rows.view(*left.shape[:-1], -1)


@forward_op.register_fake
def _(
    sources: list[Tensor],
    query: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm_eps: float | None,
    eps: float,
    scale: float,
    factor: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out_dtype = promoted_dtype(sources)
    dtype = compute_dtype(out_dtype)
    shape = sources[0].shape
    stats = (len(sources), *shape[:-1])
    moments = (0,) if norm_eps is None else (*shape[:-1], 1)
    return (
        sources[0].new_empty(shape, dtype=out_dtype),
        sources[0].new_empty((*stats, heads), dtype=dtype),
        sources[0].new_empty((*stats, heads), dtype=dtype),
        sources[0].new_empty(stats, dtype=dtype),
        sources[0].new_empty(moments, dtype=out_dtype),
        sources[0].new_empty(moments, dtype=out_dtype),
    )


@backward_op.register_fake
def _(
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    sources: list[Tensor],
    query: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weights: Tensor,
    scores: Tensor,
    inv_rms: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: float,
    factor: float,
    needs_grad: list[bool],
) -> list[Tensor]:
    inputs = [*sources, query, left, right, norm_weight, norm_bias]
    return [
        tensor.new_empty(tensor.shape)
        for tensor, needed in zip(inputs, needs_grad, strict=True)
        if needed and tensor is not None
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, *small, _, _, ctx.scale, ctx.factor, _ = inputs
    _, weights, *saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*sources, *small, weights, *saved)


def _backward(ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
    *inputs, weights, scores, inv_rms, mean, rstd = ctx.saved_tensors
    sources, small = inputs[:-5], inputs[-5:]
    source_marks, *marks = ctx.needs_input_grad[:6]
    needs_grad = [*source_marks, *marks]
    grads: list[Tensor | None] = [None] * len(needs_grad)
    if _has_norm(mean) and grad_out is None:  # the norm has no part in a gradient of the weights
        needs_grad[-2:] = [False, False]
    if grad_out is not None or grad_weights is not None:
        saved = (weights, scores, inv_rms, mean, rstd)
        computed = iter(backward_op(grad_out, grad_weights, sources, *small, *saved, ctx.scale, ctx.factor, needs_grad))
        grads = [next(computed) if needed else None for needed in needs_grad]
    return grads[:-5], *grads[-5:], None, None, None, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


class _CollectingRead(torch.autograd.Function):
    """The operator for sources whose gradients are added up in place, which no operator's schema can say."""

    @staticmethod
    def forward(ctx: Any, gradients: list[SourceGradient | None], query: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        small, (norm_eps, eps, scale, factor, heads), sources = inputs[:4], inputs[4:9], list(inputs[9:])
        out, weights, *saved = forward_op(sources, query, *small, norm_eps, eps, scale, factor, heads)
        ctx.gradients, ctx.scale, ctx.factor = gradients, scale, factor
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*sources, query, *small, weights, *saved)
        return out, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "AttnRes models have no double backward (create_graph=True): for gradients of gradients use "
                "torch.func.grad(torch.func.grad(...)), with torch.func.functional_call"
            )
        *inputs, weights, scores, inv_rms, mean, rstd = ctx.saved_tensors
        sources, small, saved = inputs[:-5], inputs[-5:], (weights, scores, inv_rms, mean, rstd)
        _, needs_query, *marks = ctx.needs_input_grad
        needs_grad = [*marks[9:], needs_query, *marks[:4]]
        if grads[0] is None and grads[1] is None:
            return (None,) * len(ctx.needs_input_grad)
        grad_out, grad_weights = grads
        found = _gradients(
            grad_out, grad_weights, sources, small, saved, ctx.scale, ctx.factor, needs_grad, ctx.gradients
        )
        *source_grads, query_grad, left, right, weight, bias = found
        return None, query_grad, left, right, weight, bias, None, None, None, None, None, *source_grads


@register_flop_formula(torch.ops.attnres_vision.depth_attention)
def _forward_flops(
    sources_shape: list[torch.Size],
    query_shape: torch.Size,
    left_shape: torch.Size | None,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    elements = sources_shape[0].numel()
    rank = 0 if left_shape is None else left_shape[-1]
    return FORWARD_FLOPS * len(sources_shape) * elements + 2 * rank * elements


@register_flop_formula(torch.ops.attnres_vision.depth_attention_backward)
def _backward_flops(
    grad_out_shape: Any,
    grad_weights_shape: Any,
    sources_shape: list[torch.Size],
    query_shape: torch.Size,
    left_shape: torch.Size | None,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    elements = sources_shape[0].numel()
    rank = 0 if left_shape is None else left_shape[-1]
    return BACKWARD_FLOPS * len(sources_shape) * elements + 4 * rank * elements
