"""Depth attention in eager PyTorch, forward and backward, for any device: what the operator runs on a CPU.

The formulas are in analytic.py. Saved for backward are the sources, the small inputs and three numbers per source,
token and depth head: a norm that was fused has its input h mixed again from the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_vision.ops.analytic import mix, read_backward, read_forward
from attnres_vision.ops.arguments import Inputs, Options, Saved
from attnres_vision.ops.collect import SourceGradient
from attnres_vision.ops.dtypes import autocast_enabled, compute_dtype, no_autocast, promoted_dtype
from attnres_vision.ops.norms import Norm

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def can_fuse(sources: Sequence[Tensor], add: Tensor | None, norm: Norm) -> bool:
    """Whether norm and read can be one operation here: one dtype, as PyTorch's LayerNorm wants it, no modulation."""
    operands = [value for value in (*sources, add, norm.weight, norm.bias) if value is not None]
    one_dtype = all(value.dtype == sources[0].dtype for value in operands)
    return one_dtype and not norm.is_modulated and not autocast_enabled(sources[0].device.type)


def forward(sources: Sequence[Tensor], inputs: Inputs, options: Options) -> Results:
    """(h or its norm, the sum that is the last source, weights, scores, 1/rms, mean, rstd)."""
    partial = sources[0].new_empty(0)
    if inputs.add is not None:
        partial = (sources[-1].float() if options.fp32_sum else sources[-1]) + inputs.add
        sources = [*sources[:-1], partial]
    query = token_query(inputs, compute_dtype(promoted_dtype(sources)))
    out, weights, scores, inv_rms = read_forward(
        sources, query, options.eps, options.scale, options.factor, options.heads, inputs.mixed, inputs.lse
    )
    if not options.norm:
        return out, partial, weights, scores, inv_rms, out.new_empty(0), out.new_empty(0)
    if options.norm == "layer":
        out, mean, rstd = torch.native_layer_norm(
            out, out.shape[-1:], inputs.norm_weight, inputs.norm_bias, options.norm_eps
        )
        return out, partial, weights, scores, inv_rms, mean, rstd
    hidden = out.to(weights.dtype)
    rstd = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + options.norm_eps)
    out = (hidden * rstd).to(out.dtype)
    out = out if inputs.norm_weight is None else out * inputs.norm_weight
    return out, partial, weights, scores, inv_rms, rstd.new_empty(0), rstd


def gradients(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    sources: Sequence[Tensor],
    inputs: Inputs,
    saved: Saved,
    options: Options,
    needs_grad: Sequence[bool],
    collected: Sequence[SourceGradient | None],
) -> list[Tensor | None]:
    """The gradients of (*sources, *inputs without add), None where there is none, or where `collected` took it."""
    grad_out, grad_partial, grad_weights = grads
    names = [name for name in Inputs._fields if name != "add"]
    needs = dict(zip(names, needs_grad[len(sources) :], strict=True))
    found: dict[str, Tensor | None] = dict.fromkeys(names)
    if options.norm and grad_out is not None:
        grad_out, found["norm_weight"], found["norm_bias"] = _norm_gradients(
            grad_out, sources, inputs, saved, options, needs
        )
    low_rank = inputs.left is not None and (needs["left"] or needs["right"])
    marks = [*needs_grad[: len(sources)], needs["query"] or low_rank]
    *source_grads, query_grad, found["mixed"], found["lse"] = read_backward(
        grad_out,
        grad_weights,
        sources,
        token_query(inputs, saved.weights.dtype),
        saved.weights,
        saved.scores,
        saved.inv_rms,
        options.scale,
        options.factor,
        marks,
        collected,
        inputs.mixed,
        inputs.lse,
    )
    if grad_partial is not None:
        last = source_grads[-1]
        source_grads[-1] = grad_partial if last is None else last + grad_partial
    found["query"], found["left"], found["right"] = query_gradients(inputs, query_grad)
    return [*source_grads, *found.values()]


def _norm_gradients(
    grad_out: Tensor,
    sources: Sequence[Tensor],
    inputs: Inputs,
    saved: Saved,
    options: Options,
    needs: dict[str, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of h and of the norm's weight and bias."""
    hidden = mix(sources, saved.weights, options.factor, saved.scores, inputs.mixed, inputs.lse)
    if options.norm == "layer":
        marks = [True, needs["norm_weight"], needs["norm_bias"]]
        return torch.ops.aten.native_layer_norm_backward(
            grad_out.contiguous(), hidden, hidden.shape[-1:], saved.mean, saved.rstd, inputs.norm_weight,
            inputs.norm_bias, marks,
        )  # fmt: skip
    dtype = saved.rstd.dtype
    normed = hidden.to(dtype) * saved.rstd
    grad = grad_out.to(dtype)
    weight_grad = (grad * normed).flatten(0, -2).sum(0) if needs["norm_weight"] else None
    if inputs.norm_weight is not None:
        grad = grad * inputs.norm_weight.to(dtype)
    grad = saved.rstd * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    weight_grad = None if weight_grad is None else weight_grad.to(hidden.dtype)
    return grad.to(hidden.dtype), weight_grad, None


def token_query(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """The query with its low-rank part, per token if it has one."""
    query, left, right = inputs[:3]
    if left is None or right is None:
        return query
    with no_autocast(query.device.type):
        rows = torch.addmm(query.to(dtype), left.flatten(0, -2).to(dtype), right.to(dtype).T)
    return rows.view(*left.shape[:-1], -1)


def query_gradients(inputs: Inputs, query_grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, left and right from that of the per-token query."""
    left, right = inputs.left, inputs.right
    if left is None or right is None or query_grad is None:
        return query_grad, None, None
    with no_autocast(query_grad.device.type):
        rows = query_grad.flatten(0, -2)
        return (
            rows.sum(0).to(inputs.query.dtype),
            (query_grad @ right.to(rows.dtype)).to(left.dtype),
            (rows.T @ left.flatten(0, -2).to(rows.dtype)).to(right.dtype),
        )


def empty_results(sources: Sequence[Tensor], inputs: Inputs, options: Options) -> Results:
    """What `forward` returns, without contents, for whichever kernel computes it."""
    first, shape = sources[0], sources[0].shape
    partial_shape: tuple[int, ...] = (0,)
    partial_dtype = first.dtype
    if inputs.add is not None:
        partial_shape, partial_dtype = shape, torch.promote_types(sources[-1].dtype, inputs.add.dtype)
        partial_dtype = torch.float32 if options.fp32_sum else partial_dtype
        sources = [*sources[:-1], first.new_empty(shape, dtype=partial_dtype)]
    dtypes = [*sources, *([inputs.mixed] if inputs.mixed is not None else [])]
    out_dtype = promoted_dtype(dtypes)
    dtype = compute_dtype(out_dtype)
    # PyTorch's LayerNorm on a CPU keeps the moments in the dtype of its input
    moments_dtype = out_dtype if options.kernel == "eager" and first.device.type == "cpu" else dtype
    stats = (len(sources), *shape[:-1])
    mean = (*shape[:-1], 1) if options.norm == "layer" else (0,)
    rstd = (*shape[:-1], 1) if options.norm else (0,)
    return (
        first.new_empty(shape, dtype=torch.float32 if options.fp32_norm else out_dtype),
        first.new_empty(partial_shape, dtype=partial_dtype),
        first.new_empty((*stats, options.heads), dtype=dtype),
        first.new_empty((*stats, options.heads), dtype=dtype),
        first.new_empty(stats, dtype=dtype),
        first.new_empty(mean, dtype=moments_dtype if options.norm == "layer" else out_dtype),
        first.new_empty(rstd, dtype=moments_dtype if options.norm == "layer" else dtype if options.norm else out_dtype),
    )
