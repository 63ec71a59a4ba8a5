"""One pass over finished blocks for the queries of several readers (two-phase Block AttnRes, arXiv 2603.15031, sec. 4).

The readers of an open block differ in their queries and in the block's partial sum, not in the finished blocks. Phase
one, here, reads those once for all queries and leaves for each a weighted mean and the log-sum-exp of its scores;
phase two is `read_kernel` (forward.py) with these and the partial sum, an online-softmax merge. One depth head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnres_vision.ops.triton.forward import attend, scaled
from attnres_vision.ops.triton.rows import (
    COUNTS,
    VIEWS,
    columns,
    dot,
    inside,
    load_row,
    place,
    store_row,
    store_sum,
    to_fp32,
    zeros,
)
from attnres_vision.ops.triton.source_gradient import plus, plus_products


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VIEWS)
def attend_blocks_kernel(
    blocks,  # as in forward.py
    block_strides,
    queries,  # M pointers and their strides, 0 where samples or tokens share a query
    query_strides,
    mixed,  # M results, contiguous rows
    lse,  # (M, rows) fp32
    scores,  # (M, sources, rows) fp32
    inv_rms,  # (sources, rows) fp32
    num_blocks,
    num_tokens,
    num_rows,
    scale,
    eps,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    MIXED: tl.constexpr,
):
    sample, tokens, live, rows = place(tl.program_id(0), num_tokens, ROWS)
    maxima, sums = (), ()
    for _ in tl.static_range(M):
        maxima = maxima + (tl.full((ROWS,), float("-inf"), tl.float32),)
        sums = sums + (tl.zeros((ROWS,), tl.float32),)
    mixtures = zeros(ROWS, TILE, M * TILES)
    offsets = sample * block_strides[0][0] + tokens * block_strides[0][1]
    following = load_row(blocks[0], offsets, live, D, 1, TILE, TILES)
    following = to_fp32(following) if MIXED else following
    for i in tl.static_range(N):
        if i < num_blocks:
            values = following
            if i + 1 < N:
                offsets = sample * block_strides[i + 1][0] + tokens * block_strides[i + 1][1]
                following = load_row(blocks[i + 1], offsets, live & (i + 1 < num_blocks), D, 1, TILE, TILES)
                following = to_fp32(following) if MIXED else following
            norm = tl.rsqrt(dot(values, values) / D + eps)
            tl.store(inv_rms + i * num_rows + rows, norm, mask=live)
            found = ()
            for m in tl.static_range(M):
                query_at = sample * query_strides[m][0] + tokens * query_strides[m][1]
                query = load_row(queries[m], query_at, live, D, 1, TILE, TILES)
                score = scale * norm * dot(query, values)
                tl.store(scores + (m * num_blocks + i) * num_rows + rows, score, mask=live)
                found = found + (score,)
            maxima, sums, mixtures = attend(values, found, maxima, sums, mixtures, M, TILES)
    for m in tl.static_range(M):
        tl.store(lse + m * num_rows + rows, maxima[m] + tl.log(sums[m]), mask=live)
        mean = scaled(mixtures[m * TILES : (m + 1) * TILES], (sums[m],), 1.0, mixed[m], 1, TILES)
        store_row(mixed[m], rows * D, live, mean, D, 1, TILE, TILES)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VIEWS)
def blocks_gradient_kernel(
    blocks,
    block_strides,
    block_grads,  # as in backward.py
    queries,
    query_strides,
    query_grads,  # M pointers: rows, for queries per token; else (programs, D) fp32, partial sums
    grads,  # M gradients of `mixed`, contiguous rows
    grad_lse,  # (M, rows)
    lse,
    scores,
    inv_rms,
    num_blocks,
    num_tokens,
    num_rows,
    scale,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Two walks, as in backward.py, with the sums over all queries inside."""
    query_sums = zeros(ROWS, TILE, M * TILES)
    steps = tl.cdiv(num_tokens, ROWS)
    groups = tl.cdiv(steps, STEPS)
    group_sample, first = tl.program_id(0) // groups, (tl.program_id(0) % groups) * STEPS
    for step in tl.range(first, tl.minimum(first + STEPS, steps), disable_licm=True):
        sample, tokens, live, rows = place(group_sample * steps + step, num_tokens, ROWS)
        at = rows * D
        upstream, shared = (), ()
        for m in tl.static_range(M):
            upstream = upstream + load_row(grads[m], at, live, D, 1, TILE, TILES)
            # sum_j a_j p_j, and what the gradient of the log-sum-exp adds to every score's
            shared = shared + (-tl.load(grad_lse + m * num_rows + rows, mask=live, other=0.0),)
        for i in tl.static_range(N):
            if i < num_blocks:
                offsets = sample * block_strides[i][0] + tokens * block_strides[i][1]
                values = load_row(blocks[i], offsets, live, D, 1, TILE, TILES)
                terms = ()
                for m in tl.static_range(M):
                    weight = _weight(scores, lse, m, i, num_blocks, num_rows, rows, live)
                    terms = terms + (weight * dot(values, upstream[m * TILES : (m + 1) * TILES]),)
                shared = plus(shared, terms)
        for i in tl.static_range(N):
            if i < num_blocks:
                offsets = sample * block_strides[i][0] + tokens * block_strides[i][1]
                values = load_row(blocks[i], offsets, live, D, 1, TILE, TILES)
                norm = tl.load(inv_rms + i * num_rows + rows, mask=live, other=0.0)
                key_term = tl.zeros_like(norm)
                weights, of_query = (), ()
                for m in tl.static_range(M):
                    weight = _weight(scores, lse, m, i, num_blocks, num_rows, rows, live)
                    product = dot(values, upstream[m * TILES : (m + 1) * TILES])
                    grad_score = weight * (product - shared[m])
                    score = tl.load(scores + (m * num_blocks + i) * num_rows + rows, mask=live, other=0.0)
                    key_term += grad_score * score
                    weights = weights + (weight,)
                    of_query = of_query + (scale * norm * grad_score,)
                if block_grads[i] is not None:
                    _store_gradient(
                        block_grads[i], at, values, upstream, queries, query_strides, weights, of_query,
                        -norm * norm * key_term / D, sample, tokens, live, ACCUMULATE, M, D, TILE, TILES,
                    )  # fmt: skip
                query_sums = plus_products(query_sums, values, of_query, M, TILES)
        if PER_TOKEN:
            for m in tl.static_range(M):
                store_row(query_grads[m], at, live, query_sums[m * TILES : (m + 1) * TILES], D, 1, TILE, TILES)
            query_sums = zeros(ROWS, TILE, M * TILES)
    if not PER_TOKEN:
        for m in tl.static_range(M):
            store_sum(query_grads[m], query_sums[m * TILES : (m + 1) * TILES], D, 1, TILE, TILES)


@triton.jit
def _weight(scores, lse, m: tl.constexpr, i: tl.constexpr, num_blocks, num_rows, rows, live):
    score = tl.load(scores + (m * num_blocks + i) * num_rows + rows, mask=live, other=0.0)
    return tl.exp(score - tl.load(lse + m * num_rows + rows, mask=live, other=0.0))


@triton.jit
def _store_gradient(
    target, at, values, upstream, queries, query_strides, weights, of_query, of_value, sample, tokens, live,
    ACCUMULATE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dv = sum over queries of a dh + scale r ds q, minus (r^2 / D) (sum of ds s) v."""
    for c in tl.static_range(TILES):
        column = columns(c, D, 1, TILE, TILES)[None, :]
        mask = inside(live, c, D, 1, TILE, TILES)
        gradient = of_value[:, None] * values[c].to(tl.float32)
        for m in tl.static_range(M):
            query_at = sample * query_strides[m][0] + tokens * query_strides[m][1]
            query = tl.load(queries[m] + query_at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
            gradient += weights[m][:, None] * upstream[m * TILES + c].to(tl.float32) + of_query[m][:, None] * query
        if ACCUMULATE:
            gradient += tl.load(target + at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + at[:, None] + column, gradient.to(target.dtype.element_ty), mask=mask)
