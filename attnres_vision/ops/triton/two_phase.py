"""One pass over finished blocks for the queries of several readers (two-phase AttnRes, arXiv 2603.15031, sec. 4).

The readers of a group differ in their queries and in the sources that come later, not in the finished blocks. Phase
one, here, reads those once for all queries and leaves for each a weighted mean and the log-sum-exp of its scores;
phase two is `read_kernel` (forward.py) with these and the later sources, an online-softmax merge. One depth head.

A program is as many warps as it takes for a thread to hold its part of a row once per query. Backward walks once: what
a score's gradient needs of the other sources is known per token beforehand (ops/two_phase.py), and the means, which
nobody keeps, are mixed again from the scores.
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
    products,
    row_sums,
    store_row,
    store_sum,
    zeros,
)
from attnres_vision.ops.triton.source_gradient import plus_products
from attnres_vision.ops.triton.source_table import load_entry, place_of, target_of


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VIEWS)
def attend_blocks_kernel(
    blocks,  # of a SourceTable, as are the next two
    entries,
    bounds,
    queries,  # M pointers and their strides, 0 where samples or tokens share a query
    query_strides,
    mixed,  # M results, contiguous rows
    lse,  # (M, rows) fp32
    scores,  # (M, sources, rows) fp32
    inv_rms,  # (sources, rows) fp32
    num_blocks,
    num_tokens,
    num_rows,
    num_steps,  # row tiles per program
    scale,
    eps,
    factor,  # of the first result: it is a read already
    M: tl.constexpr,
    ALIGNED: tl.constexpr,
    MIXED: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    PER_TOKEN: tl.constexpr,  # every token has its queries
    SHARED: tl.constexpr,  # all of them share the queries
    HOLD: tl.constexpr,  # queries stay in registers; else they come from the first cache for every source
):
    num_rows = num_rows.to(tl.int64)
    steps = tl.cdiv(num_tokens, ROWS)
    groups = tl.cdiv(steps, num_steps)
    group_sample, first = tl.program_id(0) // groups, (tl.program_id(0) % groups) * num_steps
    held = ()
    if HOLD and not PER_TOKEN:
        everywhere = tl.full((1,), 1, tl.int1)
        for m in tl.static_range(M):
            query_at = _query_at(query_strides[m], group_sample.to(tl.int64), tl.full((1,), 0, tl.int64), SHARED)
            held = held + load_row(queries[m], query_at, everywhere, D, 1, TILE, TILES)
    for step in tl.range(first, tl.minimum(first + num_steps, steps), disable_licm=True):
        sample, tokens, live, rows = place(group_sample * steps + step, num_tokens, ROWS)
        own = held
        if HOLD and PER_TOKEN:
            for m in tl.static_range(M):
                query_at = _query_at(query_strides[m], sample, tokens, SHARED)
                own = own + load_row(queries[m], query_at, live, D, 1, TILE, TILES)
        maxima, sums = (), ()
        for _ in tl.static_range(M):
            maxima = maxima + (tl.full((ROWS,), float("-inf"), tl.float32),)
            sums = sums + (tl.zeros((ROWS,), tl.float32),)
        state = (maxima, sums, zeros(ROWS, TILE, M * TILES))
        for kind in tl.static_range(len(blocks)):
            start, stop = bounds[kind], bounds[kind + 1]
            following = load_entry(
                entries, start, blocks[kind], sample, tokens, live, D, 1, TILE, TILES, ALIGNED, MIXED
            )
            for index in range(start, stop):
                values = following
                following = load_entry(
                    entries, tl.minimum(index + 1, stop - 1), blocks[kind], sample, tokens,
                    live & (index + 1 < stop), D, 1, TILE, TILES, ALIGNED, MIXED,
                )  # fmt: skip
                tl.debug_barrier()  # see forward.py
                state = _attend_block(
                    values, place_of(entries, index), state, own, queries, query_strides, scores, inv_rms, sample,
                    tokens, live, rows, num_blocks, num_rows, scale, eps, M, D, TILE, TILES, SHARED, HOLD,
                )  # fmt: skip
        maxima, sums, mixtures = state
        for m in tl.static_range(M):
            tl.store(lse + m * num_rows + rows, maxima[m] + tl.log(sums[m]), mask=live)
            own_factor = factor if m == 0 else 1.0
            mean = scaled(mixtures[m * TILES : (m + 1) * TILES], (sums[m],), own_factor, mixed[m], 1, TILES)
            store_row(mixed[m], rows * D, live, mean, D, 1, TILE, TILES)


@triton.jit
def _attend_block(
    values, i, state, held, queries, query_strides, scores, inv_rms, sample, tokens, live, rows,
    num_blocks, num_rows, scale, eps,
    M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SHARED: tl.constexpr,
    HOLD: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax of every query."""
    parts = (products(values, values),)
    for m in tl.static_range(M):
        if HOLD:
            query = held[m * TILES : (m + 1) * TILES]
        else:
            query_at = _query_at(query_strides[m], sample, tokens, SHARED)
            query = load_row(queries[m], query_at, live, D, 1, TILE, TILES)
        parts = parts + (products(query, values),)
    dots = row_sums(parts)
    norm = tl.rsqrt(dots[0] / D + eps)
    tl.store(inv_rms + i * num_rows + rows, norm, mask=live)
    found = ()
    for m in tl.static_range(M):
        score = scale * norm * dots[1 + m]
        tl.store(scores + (m * num_blocks + i) * num_rows + rows, score, mask=live)
        found = found + (score,)
    return attend(values, found, state[0], state[1], state[2], M, TILES)


@triton.jit
def _query_at(query_strides, sample, tokens, SHARED: tl.constexpr):
    """Where the query of a token is: known beforehand if all share it, which leaves registers for other things."""
    if SHARED:
        at = tl.zeros_like(tokens)
    else:
        at = sample * query_strides[0] + tokens * query_strides[1]
    return at


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VIEWS)
def mix_blocks_kernel(
    blocks,
    entries,
    bounds,
    mixed,  # M results, contiguous rows
    lse,
    scores,
    num_blocks,
    num_tokens,
    num_rows,
    M: tl.constexpr,
    ALIGNED: tl.constexpr,
    MIXED: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The means once more, for backward."""
    num_rows = num_rows.to(tl.int64)
    sample, tokens, live, rows = place(tl.program_id(0), num_tokens, ROWS)
    mixtures = zeros(ROWS, TILE, M * TILES)
    for kind in tl.static_range(len(blocks)):
        for index in range(bounds[kind], bounds[kind + 1]):
            values = load_entry(entries, index, blocks[kind], sample, tokens, live, D, 1, TILE, TILES, ALIGNED, MIXED)
            weights = _weights(scores, lse, place_of(entries, index), num_blocks, num_rows, rows, live, M)
            mixtures = plus_products(mixtures, values, weights, M, TILES)
    for m in tl.static_range(M):
        store_row(mixed[m], rows * D, live, mixtures[m * TILES : (m + 1) * TILES], D, 1, TILE, TILES)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VIEWS)
def blocks_gradient_kernel(
    blocks,
    entries,
    bounds,
    block_grads,  # contiguous rows, None where no gradient is asked for
    queries,
    query_strides,
    query_grads,  # M pointers: rows, for queries per token; else (programs, D) fp32, partial sums
    grads,  # M gradients of `mixed`, contiguous rows
    opening,  # None, or the first of `mixed`, which was scaled by `factor` and whose `grad_lse` is not used
    grad_lse,  # (M, rows), for fixed sums e^lse mixed: see ops/two_phase.py
    lse,
    scores,
    inv_rms,
    num_blocks,
    num_tokens,
    num_rows,
    num_steps,
    num_added,  # the gradients of the first so many blocks are added to what is there
    scale,
    factor,
    M: tl.constexpr,
    ALIGNED: tl.constexpr,
    MIXED: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,
):
    num_rows = num_rows.to(tl.int64)
    query_sums = zeros(ROWS, TILE, M * TILES)
    steps = tl.cdiv(num_tokens, ROWS)
    groups = tl.cdiv(steps, num_steps)
    group_sample, first = tl.program_id(0) // groups, (tl.program_id(0) % groups) * num_steps
    for step in tl.range(first, tl.minimum(first + num_steps, steps), disable_licm=True):
        sample, tokens, live, rows = place(group_sample * steps + step, num_tokens, ROWS)
        at = rows * D
        upstream, opened = (), ()
        for m in tl.static_range(M):
            upstream = upstream + load_row(grads[m], at, live, D, 1, TILE, TILES)
        if opening is not None:
            result = load_row(opening, at, live, D, 1, TILE, TILES)
            opened = opened + (dot(result, upstream[:TILES]),)
        for kind in tl.static_range(len(blocks)):
            for index in tl.range(bounds[kind], bounds[kind + 1], disable_licm=True):
                values = load_entry(
                    entries, index, blocks[kind], sample, tokens, live, D, 1, TILE, TILES, ALIGNED, MIXED
                )
                target = target_of(entries, index, block_grads[kind])  # a pair would not do: it may be None
                i = place_of(entries, index)
                query_sums = _block_gradient(
                    values, i, query_sums, target, i < num_added, upstream, opened, factor, queries,
                    query_strides, grad_lse, lse, scores, inv_rms, sample, tokens, live, rows, num_blocks, num_rows,
                    scale, M, D, TILE, TILES, SHARED,
                )  # fmt: skip
        if PER_TOKEN:
            for m in tl.static_range(M):
                store_row(query_grads[m], at, live, query_sums[m * TILES : (m + 1) * TILES], D, 1, TILE, TILES)
            query_sums = zeros(ROWS, TILE, M * TILES)
    if not PER_TOKEN:
        for m in tl.static_range(M):
            store_sum(query_grads[m], query_sums[m * TILES : (m + 1) * TILES], D, 1, TILE, TILES)


@triton.jit
def _dots(values, rows, M: tl.constexpr, TILES: tl.constexpr):
    """Sums over a row times each of M rows. Of more than six one by one: registers are scarcer than barriers then."""
    parts, dots = (), ()
    for m in tl.static_range(M):
        part = products(values, rows[m * TILES : (m + 1) * TILES])
        if M > 6:
            dots = dots + (tl.sum(part, 1),)
        else:
            parts = parts + (part,)
    return dots + row_sums(parts)


@triton.jit
def _block_gradient(
    values, i, query_sums, target, added, upstream, opened, factor, queries, query_strides, grad_lse, lse, scores,
    inv_rms, sample, tokens, live, rows, num_blocks, num_rows, scale,
    M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Store dv = sum over queries of a dh + scale r ds q, minus (r^2 / D) (sum of ds s) v; the queries' sums go on."""
    norm = tl.load(inv_rms + i * num_rows + rows, mask=live, other=0.0)
    key_term = tl.zeros_like(norm)
    dots = _dots(values, upstream, M, TILES)
    of_upstream, of_query = (), ()
    for m in tl.static_range(M):
        score, weight = _score_and_weight(scores, lse, m, i, num_blocks, num_rows, rows, live)
        if m == 0 and len(opened) == 1:
            grad_score = weight * (factor * dots[0] - opened[0])
            weight *= factor
        else:  # loaded for every source: registers are scarcer than the first cache
            grad_score = weight * (dots[m] + tl.load(grad_lse + m * num_rows + rows, mask=live, other=0.0))
        key_term += grad_score * score
        of_upstream = of_upstream + (weight,)
        of_query = of_query + (scale * norm * grad_score,)
    if target is not None:
        _store_gradient(
            target, added, rows * D, values, upstream, queries, query_strides, of_upstream, of_query,
            -norm * norm * key_term / D, sample, tokens, live, M, D, TILE, TILES, SHARED,
        )  # fmt: skip
    return plus_products(query_sums, values, of_query, M, TILES)


@triton.jit
def _score_and_weight(scores, lse, m, i, num_blocks, num_rows, rows, live):
    """Of source `i`, for query `m`."""
    score = tl.load(scores + (m * num_blocks + i) * num_rows + rows, mask=live, other=0.0)
    return score, tl.exp(score - tl.load(lse + m * num_rows + rows, mask=live, other=0.0))


@triton.jit
def _weights(scores, lse, i, num_blocks, num_rows, rows, live, M: tl.constexpr):
    found = ()
    for m in tl.static_range(M):
        found = found + (_score_and_weight(scores, lse, m, i, num_blocks, num_rows, rows, live)[1],)
    return found


@triton.jit
def _store_gradient(
    target, added, at, values, upstream, queries, query_strides, of_upstream, of_query, of_value, sample, tokens, live,
    M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    for c in tl.static_range(TILES):
        column = columns(c, D, 1, TILE, TILES)[None, :]
        mask = inside(live, c, D, 1, TILE, TILES)
        gradient = of_value[:, None] * values[c].to(tl.float32)
        for m in tl.static_range(M):
            query_at = _query_at(query_strides[m], sample, tokens, SHARED)
            query = tl.load(queries[m] + query_at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
            gradient += of_upstream[m][:, None] * upstream[m * TILES + c].to(tl.float32)
            gradient += of_query[m][:, None] * query
        gradient += tl.load(target + at[:, None] + column, mask=mask & added, other=0.0).to(tl.float32)
        tl.store(target + at[:, None] + column, gradient.to(target.dtype.element_ty), mask=mask)
