"""Depth attention for eager PyTorch: a custom operator with an analytic backward (arXiv 2603.15031, Eq. 1 to 6).

With r_i = 1 / rms(v_i), s_i = scale * r_i * (q . v_i), a = softmax(s) and f = n ("sum") or 1 ("mean"):

    forward    h    = f * sum_i a_i v_i
    backward   p_i  = f * (dh . v_i) + da_i
               ds_i = a_i * (p_i - sum_j a_j p_j)
               dv_i = f a_i dh + scale r_i ds_i q - (r_i^2 / D) (ds_i . s_i) v_i
               dq   = scale * sum_i r_i ds_i v_i

Nothing is stacked. Saved for backward are the sources, the query and three numbers per source, token and depth head
(a, s, r). No double backward: autograd raises if it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnres_vision.ops.reference import compute_dtype, promoted_dtype

__all__ = ["depth_attention"]

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
) -> Tensor | tuple[Tensor, Tensor]:
    """Same arguments, shapes and results as `attnres_vision.ops.depth_attention`, which documents them."""
    factor = float(len(sources)) if form == "sum" else 1.0
    out, weights, _, _ = forward_op(list(sources), query, eps, scale, factor, heads)
    return (out, weights) if return_weights else out


@torch.library.custom_op("attnres_vision::depth_attention", mutates_args=())
def forward_op(
    sources: list[Tensor], query: Tensor, eps: float, scale: float, factor: float, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, weights a, scores s, 1/rms r): (..., D), (n, ..., heads), (n, ..., heads), (n, ...)."""
    out_dtype = promoted_dtype(sources)
    dtype = compute_dtype(out_dtype)
    shape = sources[0].shape
    values = [_rows(source) for source in sources]
    num_samples, num_tokens, width = values[0].shape
    query, shared = _query_rows(query, shape, dtype)
    out = torch.empty((num_samples, num_tokens, width), dtype=dtype, device=query.device)
    inv_rms = out.new_empty(len(sources), num_samples, num_tokens)
    scores = out.new_empty(len(sources), num_samples, num_tokens, heads)
    with _no_autocast(out.device.type):
        use_bmm = shared and heads == 1 and _exact_bmm(out.device)
        if use_bmm:
            column = query.expand(num_samples, 1, width).contiguous().transpose(1, 2)
        for value, norm, score in zip(values, inv_rms.unbind(0), scores.unbind(0), strict=True):
            value = value.to(dtype)
            # The norm first: it streams a cold source into the cache at full bandwidth, a matrix product does not.
            torch.linalg.vector_norm(value, dim=-1, out=norm)
            if use_bmm:
                torch.bmm(value, column, out=score)
            else:
                _row_dot(value, query, scratch=out, result=score)
        inv_rms.square_().div_(width).add_(eps).rsqrt_()
        scores.mul_(inv_rms.unsqueeze(-1)).mul_(scale)
        weights = scores.softmax(0)
        mix = (weights * factor).unsqueeze(-1).unbind(0)
        mixed = out.view(num_samples, num_tokens, heads, -1)
        # Backwards: the last source is still in the cache.
        for i in reversed(range(len(sources))):
            value = values[i].to(dtype).unflatten(-1, (heads, -1))
            if i == len(sources) - 1:
                torch.mul(value, mix[i], out=mixed)
            else:
                mixed.addcmul_(value, mix[i])
    stats = (len(sources), *shape[:-1])
    out = out.view(shape).to(out_dtype)
    return out, weights.view(*stats, heads), scores.view(*stats, heads), inv_rms.view(stats)


@torch.library.custom_op("attnres_vision::depth_attention_backward", mutates_args=())
def backward_op(
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    sources: list[Tensor],
    query: Tensor,
    weights: Tensor,
    scores: Tensor,
    inv_rms: Tensor,
    scale: float,
    factor: float,
    needs_grad: list[bool],
) -> list[Tensor]:
    """Gradients of the sources marked in `needs_grad`, then of the query if its mark, the last one, is set."""
    dtype, heads, num_sources = weights.dtype, weights.shape[-1], len(sources)
    values = [_rows(source) for source in sources]
    num_samples, num_tokens, width = values[0].shape
    rows, shared = _query_rows(query, sources[0].shape, dtype)
    by_head = (heads, width // heads)
    stats = (num_sources, num_samples, num_tokens)
    weights, scores, inv_rms = weights.view(*stats, heads), scores.view(*stats, heads), inv_rms.view(*stats, 1)

    grads = {
        i: torch.empty_like(sources[i], memory_format=torch.contiguous_format)
        for i in range(num_sources)
        if needs_grad[i]
    }
    first = grads.get(min(grads, default=-1))
    # The gradient that is written last holds the products until then: a fresh buffer costs page faults.
    scratch = _rows(first) if first is not None and first.dtype == dtype else weights.new_empty(values[0].shape)
    grad_query = torch.zeros_like(rows, memory_format=torch.contiguous_format) if needs_grad[-1] else None

    with _no_autocast(weights.device.type):
        products = weights.new_zeros(weights.shape)
        if grad_out is not None:
            grad_out = _rows(grad_out).to(dtype)
            for value, product in zip(values, products.unbind(0), strict=True):
                _row_dot(value.to(dtype), grad_out, scratch=scratch, result=product)
            products.mul_(factor)
        if grad_weights is not None:
            products.add_(grad_weights.view(weights.shape))
        grad_scores = weights * (products - (weights * products).sum(0))
        norm_term = (grad_scores * scores).sum(-1, keepdim=True).mul_(inv_rms.square()).div_(-width)
        query_term = (grad_scores * inv_rms).mul_(scale)
        value_term = weights * factor
        for i in reversed(range(num_sources)):
            value = values[i].to(dtype)
            if grad_query is not None:
                _add_query_grad(grad_query, value, query_term[i], shared, scratch)
            if i in grads:
                result = _rows(grads[i])
                target = (result if result.dtype == dtype else scratch).unflatten(-1, by_head)
                torch.mul(rows.unflatten(-1, by_head), query_term[i].unsqueeze(-1), out=target)
                if grad_out is not None:
                    target.addcmul_(grad_out.unflatten(-1, by_head), value_term[i].unsqueeze(-1))
                target.addcmul_(value.unflatten(-1, by_head), norm_term[i].unsqueeze(-1))
                if result.dtype != dtype:
                    result.copy_(scratch)
    source_grads = [grads[i] for i in sorted(grads)]
    return source_grads if grad_query is None else [*source_grads, grad_query.reshape(query.shape).to(query.dtype)]


def _add_query_grad(grad_query: Tensor, value: Tensor, query_term: Tensor, shared: bool, scratch: Tensor) -> None:
    """grad_query += query_term * value, summed over what the query is shared by; `scratch` is overwritten."""
    heads = query_term.shape[-1]
    value_by_head = value.unflatten(-1, (heads, -1))
    if not shared:
        grad_query.unflatten(-1, (heads, -1)).addcmul_(value_by_head, query_term.unsqueeze(-1))
        return
    if heads == 1 and _exact_bmm(value.device):
        summed = torch.bmm(query_term.transpose(1, 2), value)
    else:
        torch.mul(value_by_head, query_term.unsqueeze(-1), out=scratch.unflatten(-1, (heads, -1)))
        summed = scratch.sum(1, keepdim=True)
    grad_query.add_(summed if grad_query.shape[0] == summed.shape[0] else summed.sum(0))


def _rows(tensor: Tensor) -> Tensor:
    """(..., D) as (samples, tokens, D), a view wherever possible. One sample is cut in two, for two threads in bmm."""
    rows = tensor.flatten(1, -2) if tensor.dim() > 2 else tensor.view(1, -1, tensor.shape[-1])
    if rows.shape[0] == 1 and rows.shape[1] % 2 == 0:
        rows = rows.unflatten(1, (2, -1)).squeeze(0)
    return rows


def _query_rows(query: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """The query as (1 or samples, 1 or tokens, D) and whether the tokens of a sample share it."""
    query = query.to(dtype)
    if query.dim() == 1 or query.dim() < len(shape):
        return query.view(-1, 1, shape[-1]), True
    return _rows(query), False


def _row_dot(left: Tensor, right: Tensor, *, scratch: Tensor, result: Tensor) -> None:
    """result[..., h] = the dot product of slice h of every row; `scratch` is overwritten."""
    torch.mul(left, right, out=scratch)
    torch.sum(scratch.unflatten(-1, (result.shape[-1], -1)), -1, out=result)


def _exact_bmm(device: torch.device) -> bool:
    """Whether a matrix product stays in full fp32. On a GPU, and if the user asks for less, it may not."""
    return device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Scores stay in fp32 under autocast too; entering a disabled autocast costs microseconds, so only if needed."""
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else contextlib.nullcontext()


@forward_op.register_fake
def _(
    sources: list[Tensor], query: Tensor, eps: float, scale: float, factor: float, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out_dtype = promoted_dtype(sources)
    dtype = compute_dtype(out_dtype)
    shape = sources[0].shape
    stats = (len(sources), *shape[:-1])
    return (
        sources[0].new_empty(shape, dtype=out_dtype),
        sources[0].new_empty((*stats, heads), dtype=dtype),
        sources[0].new_empty((*stats, heads), dtype=dtype),
        sources[0].new_empty(stats, dtype=dtype),
    )


@backward_op.register_fake
def _(
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    sources: list[Tensor],
    query: Tensor,
    weights: Tensor,
    scores: Tensor,
    inv_rms: Tensor,
    scale: float,
    factor: float,
    needs_grad: list[bool],
) -> list[Tensor]:
    tensors = [*sources, query]
    return [tensor.new_empty(tensor.shape) for tensor, needed in zip(tensors, needs_grad, strict=True) if needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, query, _, ctx.scale, ctx.factor, _ = inputs
    _, weights, scores, inv_rms = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(scores, inv_rms)
    ctx.save_for_backward(*sources, query, weights, scores, inv_rms)


def _backward(ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
    *sources, query, weights, scores, inv_rms = ctx.saved_tensors
    source_marks, query_mark = ctx.needs_input_grad[:2]
    needs_grad = [*source_marks, query_mark]
    grads: list[Tensor | None] = [None] * len(needs_grad)
    if grad_out is not None or grad_weights is not None:
        computed = iter(
            backward_op(
                grad_out, grad_weights, sources, query, weights, scores, inv_rms, ctx.scale, ctx.factor, needs_grad
            )
        )
        grads = [next(computed) if needed else None for needed in needs_grad]
    return grads[:-1], grads[-1], None, None, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.attnres_vision.depth_attention)
def _forward_flops(sources_shape: list[torch.Size], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return FORWARD_FLOPS * len(sources_shape) * sources_shape[0].numel()


@register_flop_formula(torch.ops.attnres_vision.depth_attention_backward)
def _backward_flops(
    grad_out_shape: Any,
    grad_weights_shape: Any,
    sources_shape: list[torch.Size],
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    return BACKWARD_FLOPS * len(sources_shape) * sources_shape[0].numel()
