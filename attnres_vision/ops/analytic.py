"""What the eager operator computes (eager.py): depth attention and its gradient, written out.

With r_i = 1 / rms(v_i), s_i = scale * r_i * (q . v_i), a = softmax(s) and f = n ("sum") or 1 ("mean"), from
arXiv 2603.15031, Eq. 1 to 6:

    forward    h    = f * sum_i a_i v_i
    backward   p_i  = f * (dh . v_i) + da_i
               ds_i = a_i * (p_i - sum_j a_j p_j)
               dv_i = f a_i dh + scale r_i ds_i q - (r_i^2 / D) (ds_i . s_i) v_i
               dq   = scale * sum_i r_i ds_i v_i

A read may continue an earlier one of other sources (`mixed`, their weighted mean, and `lse`, the log-sum-exp of their
scores): that is one more source, whose score is `lse`.

Nothing is stacked, and a backward pass needs only the sources, the query and three numbers per source, token and depth
head (a, s, r): h itself can be had again from `mix`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_vision.ops.collect import SourceGradient
from attnres_vision.ops.dtypes import compute_dtype, no_autocast, promoted_dtype


def read_forward(
    sources: Sequence[Tensor],
    query: Tensor,
    eps: float,
    scale: float,
    factor: float,
    heads: int,
    mixed: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, weights a, scores s, 1/rms r): (..., D), (n, ..., heads), (n, ..., heads), (n, ...)."""
    out_dtype = promoted_dtype(sources if mixed is None else [*sources, mixed])
    dtype = compute_dtype(out_dtype)
    shape = sources[0].shape
    values = [_rows(source) for source in sources]
    num_samples, num_tokens, width = values[0].shape
    query, shared = _query_rows(query, shape, dtype)
    out = torch.empty((num_samples, num_tokens, width), dtype=dtype, device=query.device)
    inv_rms = out.new_empty(len(sources), num_samples, num_tokens)
    scores = out.new_empty(len(sources), num_samples, num_tokens, heads)
    with no_autocast(out.device.type):
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
        if mixed is None or lse is None:
            weights = scores.softmax(0)
            _mix_into(out, values, weights, factor)
        else:
            weights, rest = _with_earlier(scores, lse)
            _mix_into(out, values, weights, factor, (_rows(mixed), rest))
    stats = (len(sources), *shape[:-1])
    out = out.view(shape).to(out_dtype)
    return out, weights.view(*stats, heads), scores.view(*stats, heads), inv_rms.view(stats)


def mix(
    sources: Sequence[Tensor],
    weights: Tensor,
    factor: float,
    scores: Tensor,
    mixed: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """h = factor * sum_i a_i v_i once more, from the weights (n, ..., heads): the same bits as `read_forward`."""
    values = [_rows(source) for source in sources]
    out = weights.new_empty(values[0].shape)
    with no_autocast(out.device.type):
        weights = weights.view(len(values), *out.shape[:-1], weights.shape[-1])
        earlier = None
        if mixed is not None and lse is not None:
            earlier = _rows(mixed), _with_earlier(scores.view(weights.shape), lse)[1]
        _mix_into(out, values, weights, factor, earlier)
    return out.view(sources[0].shape).to(promoted_dtype(sources if mixed is None else [*sources, mixed]))


def _mix_into(
    out: Tensor, values: list[Tensor], weights: Tensor, factor: float, earlier: tuple[Tensor, Tensor] | None = None
) -> None:
    heads = weights.shape[-1]
    mixed = _by_head(out, heads)
    # Backwards: the last source is still in the cache.
    for i, weight in reversed(list(enumerate(_per_head(weights * factor).unbind(0)))):
        value = _by_head(values[i].to(out.dtype), heads)
        if i == len(values) - 1:
            torch.mul(value, weight, out=mixed)
        else:
            mixed.addcmul_(value, weight)
    if earlier is not None:
        mixed.addcmul_(earlier[0].to(out.dtype), factor * earlier[1])


def _with_earlier(scores: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the sources, and of what the read continues (not 1 - theirs, which would cancel)."""
    weights = torch.cat([scores, lse.view(1, *scores.shape[1:])]).softmax(0)
    return weights[:-1], weights[-1]


def read_backward(
    grad_out: Tensor | None,
    grad_weights: Tensor | None,
    sources: Sequence[Tensor],
    query: Tensor,
    weights: Tensor,
    scores: Tensor,
    inv_rms: Tensor,
    scale: float,
    factor: float,
    needs_grad: Sequence[bool],
    gradients: Sequence[SourceGradient | None],
    mixed: Tensor | None = None,
    lse: Tensor | None = None,
    average: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of the sources, the query, `mixed` and `lse`, None where `needs_grad` has no mark or nothing was given.

    The gradient of a source with an entry in `gradients` is added there, and None in the result. `average` (...) is
    sum_j a_j p_j where that is known, and the gradient of `lse` is that for a fixed e^lse mixed (two_phase.py).
    """
    dtype, heads, num_sources = weights.dtype, weights.shape[-1], len(sources)
    if grad_out is None and mixed is not None:  # which has a gradient through the weights
        grad_out = torch.zeros_like(mixed)
    elif grad_out is None:  # only the weights have a gradient: rare, and not worth a case of its own there
        gradients = [None] * num_sources
    values = [_rows(source) for source in sources]
    num_samples, num_tokens, width = values[0].shape
    rows, shared = _query_rows(query, sources[0].shape, dtype)
    stats = (num_sources, num_samples, num_tokens)
    weights, scores, inv_rms = weights.view(*stats, heads), scores.view(*stats, heads), inv_rms.view(*stats, 1)

    grads = {
        i: torch.empty_like(sources[i], memory_format=torch.contiguous_format)
        for i in range(num_sources)
        if needs_grad[i] and gradients[i] is None
    }
    first = grads.get(min(grads, default=-1))
    # The gradient that is written last holds the products until then: a fresh buffer costs page faults.
    scratch = _rows(first) if first is not None and first.dtype == dtype else weights.new_empty(values[0].shape)
    grad_query = torch.zeros_like(rows, memory_format=torch.contiguous_format) if needs_grad[-1] else None

    with no_autocast(weights.device.type):
        products = weights.new_zeros(weights.shape)
        if grad_out is not None:
            grad_out = _rows(grad_out).to(dtype)
            for value, product in zip(values, products.unbind(0), strict=True):
                _row_dot(value.to(dtype), grad_out, scratch=scratch, result=product)
            products.mul_(factor)
        if grad_weights is not None:
            products.add_(grad_weights.reshape(weights.shape))
        average = (weights * products).sum(0) if average is None else average.reshape(*stats[1:], 1)
        mixed_grad = lse_grad = None
        if (
            mixed is not None and lse is not None and grad_out is not None
        ):  # one more source, of which only the score counts
            left_over = _with_earlier(scores, lse)[1]
            product = torch.empty_like(average)
            _row_dot(_rows(mixed).to(dtype), grad_out, scratch=scratch, result=product)
            average += left_over * factor * product
            mixed_grad = (factor * left_over * grad_out).to(mixed.dtype).view(mixed.shape)
            lse_grad = (-left_over * average).view(mixed.shape[:-1])
        grad_scores = weights * (products - average)
        norm_term = (grad_scores * scores).sum(-1, keepdim=True).mul_(inv_rms.square()).div_(-width)
        query_term = (grad_scores * inv_rms).mul_(scale)
        value_terms, query_terms = _per_head(weights * factor), _per_head(query_term)
        upstream = None if grad_out is None else _by_head(grad_out, heads)
        rows_by_head = _by_head(rows, heads)
        # The gradients that are returned come last: one of them is the scratch until then.
        for i in sorted(range(num_sources), key=lambda i: (i in grads, -i)):
            value = values[i].to(dtype)
            if grad_query is not None:
                _add_query_grad(grad_query, value, query_term[i], shared, scratch)
            gradient = gradients[i]
            norm_factor = norm_term[i]
            if gradient is not None and upstream is not None:
                total = gradient.add(upstream, value_terms[i], norm_factor)
                if shared and heads == 1:
                    gradient.add_query(query_term[i], rows)
                else:
                    total.addcmul_(rows_by_head, query_terms[i])
            elif i in grads:
                result = _rows(grads[i])
                target = _by_head(result if result.dtype == dtype else scratch, heads)
                torch.mul(rows_by_head, query_terms[i], out=target)
                if upstream is not None:
                    target.addcmul_(upstream, value_terms[i])
                target.addcmul_(_by_head(value, heads), norm_factor if heads == 1 else norm_factor.unsqueeze(-1))
                if result.dtype != dtype:
                    result.copy_(scratch)
    query_grad = None if grad_query is None else grad_query.reshape(query.shape).to(query.dtype)
    return [*(grads.get(i) for i in range(num_sources)), query_grad, mixed_grad, lse_grad]


def _add_query_grad(grad_query: Tensor, value: Tensor, query_term: Tensor, shared: bool, scratch: Tensor) -> None:
    """grad_query += query_term * value, summed over what the query is shared by; `scratch` is overwritten."""
    heads = query_term.shape[-1]
    if not shared:
        _by_head(grad_query, heads).addcmul_(_by_head(value, heads), _per_head(query_term))
        return
    if heads == 1 and _exact_bmm(value.device):
        summed = torch.bmm(query_term.transpose(1, 2), value)
    else:
        torch.mul(_by_head(value, heads), _per_head(query_term), out=_by_head(scratch, heads))
        summed = scratch.sum(1, keepdim=True)
    grad_query.add_(summed if grad_query.shape[0] == summed.shape[0] else summed.sum(0))


def _rows(tensor: Tensor) -> Tensor:
    """(..., D) as (samples, tokens, D), a view wherever possible. One sample is cut in two, for two threads in bmm."""
    rows = tensor.flatten(1, -2) if tensor.dim() > 2 else tensor.view(1, -1, tensor.shape[-1])
    if rows.shape[0] == 1 and rows.shape[1] % 2 == 0:
        rows = rows.unflatten(1, (2, -1)).squeeze(0)
    return rows


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """(..., D) as (..., heads, D / heads); as it is with one head, where every view would only cost time."""
    return rows if heads == 1 else rows.unflatten(-1, (heads, -1))


def _per_head(terms: Tensor) -> Tensor:
    """(..., heads) as a factor for `_by_head`."""
    return terms if terms.shape[-1] == 1 else terms.unsqueeze(-1)


def _query_rows(query: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """The query as (1 or samples, 1 or tokens, D) and whether the tokens of a sample share it."""
    query = query.to(dtype)
    if query.dim() == 1 or query.dim() < len(shape):
        return query.view(-1, 1, shape[-1]), True
    return _rows(query), False


def _row_dot(left: Tensor, right: Tensor, *, scratch: Tensor, result: Tensor) -> None:
    """result[..., h] = the dot product of slice h of every row; `scratch` is overwritten."""
    torch.mul(left, right, out=scratch)
    heads = result.shape[-1]
    torch.sum(_by_head(scratch, heads), -1, keepdim=heads == 1, out=result)


def _exact_bmm(device: torch.device) -> bool:
    """Whether a matrix product stays in full fp32. On a GPU, and if the user asks for less, it may not."""
    return device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
