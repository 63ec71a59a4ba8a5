"""Depth attention for eager PyTorch: a custom operator with an analytic backward; what a CPU runs (arXiv 2603.15031, Eq. 1 to 6).

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

from attnres_vision.ops.reference import promoted_dtype

__all__ = ["depth_attention"]

# Floating-point operations per element of a source: score, norm and sum are a multiply and an add each; backward has one
# dot product, three terms of dv and one of dq.
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
    dtype = torch.promote_types(out_dtype, torch.float32)
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
            # The norm first: it streams a cold source into the cache at full bandwidth, a matrix-vector product does not.
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
    """Gradients of the sources marked in `needs_grad`, then, if its mark (the last) is set, of the query."""
    dtype, device, shape = weights.dtype, weights.device, sources[0].shape
    heads = weights.shape[-1]
    values = [_rows(source) for source in sources]
    num_samples, num_tokens, width = values[0].shape
    by_head = (num_samples, num_tokens, heads, width // heads)
    rows, shared = _query_rows(query, shape, dtype)
    query_by_head = rows.unflatten(-1, (heads, -1))
    stats = (len(sources), num_samples, num_tokens)
    weights, scores, inv_rms = weights.view(*stats, heads), scores.view(*stats, heads), inv_rms.view(*stats, 1)
    grad = None if grad_out is None else _rows(grad_out).to(dtype).contiguous()
    grads = [torch.empty(by_head, dtype=source.dtype, device=device) for source in sources if needs_grad_of(source)] if (
        needs_grad_of := None
    ) else []
    return grads
