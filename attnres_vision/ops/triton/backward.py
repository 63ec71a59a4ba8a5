"""Backward pass of depth attention on a GPU: every source gradient is written once, without atomics.

The formulas are those of analytic.py. They take two walks over the sources of a token:

1. for what all sources share: sum_j a_j p_j of  ds_i = a_i (p_i - sum_j a_j p_j),  p_i = factor * (dh . v_i) + da_i.
   Where a norm ended the read, this walk mixes h again, the norm gives dh, and the sum is dh . h;
2. for the gradients of each source.

With HOLD the sources stay in registers between the walks, and memory is read once; without it the second walk finds
them in the cache. What tokens share (a query, the norm's parameters) gets one partial gradient from every program,
which walks over several row tiles; torch adds them up, in an order that is always the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnres_vision.ops.triton.norm_backward import mix, norm_gradient
from attnres_vision.ops.triton.rows import COUNTS, VIEWS, dot_by_head, load_row, place, store_row, store_sum, zeros
from attnres_vision.ops.triton.source_gradient import factors_of, plus, plus_products, products_of, store_gradient
from attnres_vision.ops.triton.source_table import load_entry, place_of, target_of


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VIEWS)
def gradient_kernel(
    blocks,  # these four as in forward.py
    block_strides,
    entries,
    bounds,
    block_grads,  # N pointers to contiguous rows; with ACCUMULATE the gradients are added to what is there
    last,
    last_strides,
    last_grad,  # None where no gradient is asked for
    last_upstream,  # None, or a gradient of the last source from elsewhere, to be added
    mixed,  # None, or what the forward pass merged with, its log-sum-exp, and the gradients of both
    lse,
    mixed_grad,
    lse_grad,
    query,
    query_strides,
    query_grad,  # None; rows, for a query per token; else (programs, D) fp32, partial sums
    grad_out,  # gradient of the result: contiguous rows
    grad_weights,  # (sources, rows, HEADS) or None
    weights,
    scores,
    inv_rms,
    norm_weight,  # as in forward.py; rstd is None without a norm
    norm_scale,
    mean,
    rstd,
    scaled_sums,  # (programs, D) fp32 partial sums of dy x and dy, x the normalised h; None if not asked for
    plain_sums,
    num_blocks,
    num_tokens,
    num_rows,
    num_steps,  # row tiles per program
    scale,
    factor,
    N: tl.constexpr,
    ALIGNED: tl.constexpr,
    MIXED: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    PER_TOKEN: tl.constexpr,  # every token has its query: the gradient is not summed
    ACCUMULATE: tl.constexpr,
    HOLD: tl.constexpr,
    HIDDEN: tl.constexpr,  # dtype of h, which the norm saw
):
    num_rows = num_rows.to(tl.int64)
    query_sum = zeros(ROWS, TILE, HEADS * TILES)
    scaled_sum = zeros(ROWS, TILE, HEADS * TILES)
    plain_sum = zeros(ROWS, TILE, HEADS * TILES)
    steps = tl.cdiv(num_tokens, ROWS)  # of one sample
    groups = tl.cdiv(steps, num_steps)
    group_sample, first = tl.program_id(0) // groups, (tl.program_id(0) % groups) * num_steps
    # Hoisting what the sources have out of this loop would fill the registers with addresses
    for step in tl.range(first, tl.minimum(first + num_steps, steps), disable_licm=True):
        sample, tokens, live, rows = place(group_sample * steps + step, num_tokens, ROWS)
        at = rows * D
        last_at = num_blocks * num_rows + rows  # of the statistics
        upstream = load_row(grad_out, at, live, D, HEADS, TILE, TILES)

        # First walk
        newest = load_row(last, sample * last_strides[0] + tokens * last_strides[1], live, D, HEADS, TILE, TILES)
        if rstd is not None:
            total = zeros(ROWS, TILE, HEADS * TILES)
        else:
            total = _none(ROWS, HEADS)
        total = _gather(
            total, newest, upstream, grad_weights, weights, last_at, live, factor, rstd is not None, HEADS, TILES
        )
        if mixed is not None:
            earlier = load_row(mixed, at, live, D, HEADS, TILE, TILES)
            rest = _rest(lse, scores, rows, num_rows, live, num_blocks + 1)
            if rstd is not None:
                total = plus_products(total, earlier, (factor * rest,), HEADS, TILES)
            else:
                total = (total[0] + rest * factor * dot_by_head(earlier, upstream, HEADS, TILES)[0],)
        held = ()
        for i in tl.static_range(N):
            offsets = sample * block_strides[i][0] + tokens * block_strides[i][1]
            if HOLD:  # all loads at once
                held = held + (load_row(blocks[i], offsets, live & (i < num_blocks), D, HEADS, TILE, TILES),)
        for i in tl.static_range(N):
            if i < num_blocks:
                if HOLD:
                    values = held[i]
                else:
                    offsets = sample * block_strides[i][0] + tokens * block_strides[i][1]
                    values = load_row(blocks[i], offsets, live, D, HEADS, TILE, TILES)
                total = _gather(
                    total, values, upstream, grad_weights, weights, i * num_rows + rows, live, factor,
                    rstd is not None, HEADS, TILES,
                )  # fmt: skip
        if entries is not None:
            for kind in tl.static_range(len(blocks)):
                for index in range(bounds[kind], bounds[kind + 1]):
                    values = load_entry(
                        entries, index, blocks[kind], sample, tokens, live, D, HEADS, TILE, TILES, ALIGNED, MIXED
                    )
                    total = _gather(
                        total, values, upstream, grad_weights, weights, place_of(entries, index) * num_rows + rows,
                        live, factor, rstd is not None, HEADS, TILES,
                    )  # fmt: skip
        if rstd is not None:
            upstream, scaled_sum, plain_sum = norm_gradient(
                upstream, total, scaled_sum, plain_sum, norm_weight, norm_scale, mean, rstd, sample, rows, live,
                HIDDEN, D, HEADS, TILE, TILES,
            )  # fmt: skip
            shared = dot_by_head(upstream, total, HEADS, TILES)
            if grad_weights is not None:
                shared = _plus_weight_terms(shared, grad_weights, weights, rows, num_rows, live, num_blocks + 1, HEADS)
        else:
            shared = total

        # Second walk
        query_at = sample * query_strides[0] + tokens * query_strides[1]
        query_sum = _scatter(
            query_sum, last_grad, last_upstream, at, newest, upstream, shared, query, query_at, grad_weights, weights,
            scores, inv_rms, last_at, live, scale, factor, D, HEADS, TILE, TILES,
        )  # fmt: skip
        if mixed is not None:  # one more source; the gradient of its score for a fixed e^lse mixed (ops/two_phase.py)
            tl.store(lse_grad + rows, -rest * shared[0], mask=live)
            store_row(
                mixed_grad, at, live,
                plus_products(zeros(ROWS, TILE, HEADS * TILES), upstream, (factor * rest,), HEADS, TILES),
                D, HEADS, TILE, TILES,
            )  # fmt: skip
        for i in tl.static_range(N):
            if i < num_blocks:
                if HOLD:
                    values = held[i]
                else:
                    offsets = sample * block_strides[i][0] + tokens * block_strides[i][1]
                    values = load_row(blocks[i], offsets, live, D, HEADS, TILE, TILES)
                query_sum = _scatter(
                    query_sum, block_grads[i], block_grads[i] if ACCUMULATE else None, at, values, upstream, shared,
                    query, query_at, grad_weights, weights, scores, inv_rms, i * num_rows + rows, live, scale, factor,
                    D, HEADS, TILE, TILES,
                )  # fmt: skip
        if entries is not None:
            for kind in tl.static_range(len(blocks)):
                for index in range(bounds[kind], bounds[kind + 1]):
                    values = load_entry(
                        entries, index, blocks[kind], sample, tokens, live, D, HEADS, TILE, TILES, ALIGNED, MIXED
                    )
                    target = target_of(entries, index, block_grads[kind])
                    query_sum = _scatter(
                        query_sum, target, target if ACCUMULATE else None, at, values, upstream, shared, query,
                        query_at, grad_weights, weights, scores, inv_rms, place_of(entries, index) * num_rows + rows,
                        live, scale, factor, D, HEADS, TILE, TILES,
                    )  # fmt: skip

        if query_grad is not None and PER_TOKEN:
            store_row(query_grad, at, live, query_sum, D, HEADS, TILE, TILES)
            query_sum = zeros(ROWS, TILE, HEADS * TILES)
    if query_grad is not None and not PER_TOKEN:
        store_sum(query_grad, query_sum, D, HEADS, TILE, TILES)
    if scaled_sums is not None:
        store_sum(scaled_sums, scaled_sum, D, HEADS, TILE, TILES)
        store_sum(plain_sums, plain_sum, D, HEADS, TILE, TILES)


@triton.jit
def _rest(lse, scores, rows, num_rows, live, num_sources):
    """The weight of what the read continued: not 1 - the others', which cancels."""
    earlier = tl.load(lse + rows, mask=live, other=0.0)
    total = tl.full(earlier.shape, 1.0, tl.float32)
    for index in range(num_sources):
        total += tl.exp(tl.load(scores + index * num_rows + rows, mask=live, other=0.0) - earlier)
    return 1 / total


@triton.jit
def _none(ROWS: tl.constexpr, HEADS: tl.constexpr):
    """A sum of nothing per head."""
    total = ()
    for _ in tl.static_range(HEADS):
        total = total + (tl.zeros((ROWS,), tl.float32),)
    return total


@triton.jit
def _gather(
    total, values, upstream, grad_weights, weights, at, live, factor,
    NORMED: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """What the first walk does with a source: its part of h if a norm follows, else its term of the shared sum."""
    if NORMED:
        total = mix(total, values, weights, at, live, factor, HEADS, TILES)
    else:
        total = plus(total, products_of(values, upstream, grad_weights, weights, at, live, factor, HEADS, TILES)[1])
    return total


@triton.jit
def _scatter(
    query_sum, target, earlier, at, values, upstream, shared, query, query_at, grad_weights, weights, scores, inv_rms,
    stats_at, live, scale, factor, D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """What the second walk does with a source: its gradient, and its part of the query's."""
    factors = factors_of(
        values, upstream, shared, grad_weights, weights, scores, inv_rms, stats_at, live, scale, factor, D, HEADS, TILES
    )
    if target is not None:
        store_gradient(target, earlier, at, values, upstream, query, query_at, factors, live, D, HEADS, TILE, TILES)
    return plus_products(query_sum, values, factors[1], HEADS, TILES)


@triton.jit
def _plus_weight_terms(shared, grad_weights, weights, rows, num_rows, live, num_sources, HEADS: tl.constexpr):
    """shared + sum_j a_j da_j, which is no part of dh . h."""
    for index in range(num_sources):
        terms = ()
        for head in tl.static_range(HEADS):
            at = (index * num_rows + rows) * HEADS + head
            weight = tl.load(weights + at, mask=live, other=0.0)
            terms = terms + (weight * tl.load(grad_weights + at, mask=live, other=0.0),)
        shared = plus(shared, terms)
    return shared
