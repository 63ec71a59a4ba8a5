"""Forward pass of depth attention on a GPU (arXiv 2603.15031, Eq. 1 to 6): every source row is read once.

A program takes a few tokens and walks over their sources with a running softmax (as in FlashAttention, over depth):

    s_i = scale * (q . v_i) / rms(v_i)
    m'  = max(m, s_i),   l' = l e^(m-m') + e^(s_i-m'),   acc' = acc e^(m-m') + e^(s_i-m') v_i,   h = factor * acc / l

It starts from the last source, which may be a sum made here (`add`), then takes the finished blocks. It may end in the
norm that reads h. With `mixed` and `lse` the blocks have been attended over before (two_phase.py) and only merge.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnres_vision.ops.triton.rows import (
    COUNTS,
    VIEWS,
    columns,
    dot,
    inside,
    load_row,
    place,
    products,
    products_by_head,
    rounded,
    row_sums,
    store_row,
    to_fp32,
)
from attnres_vision.ops.triton.source_table import load_entry, place_of

STATS = tl.constexpr(8)  # sources whose weights are computed at a time


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VIEWS)
def read_kernel(
    blocks,  # N pointers to (samples, tokens, D), the last one repeated up to the bucket, or a SourceTable's
    block_strides,  # their strides: N pairs of sample, token
    entries,  # a SourceTable's, or None
    bounds,
    last,
    last_strides,
    add,  # None, or what is to be added to `last` first; the sum goes to `partial`
    add_strides,
    partial,
    mixed,  # None, or (samples, tokens, D): a read of earlier blocks; `lse` (rows,) is its log-sum-exp
    lse,
    query,
    query_strides,  # 0 where samples or tokens share the query
    out,
    weights,  # (sources, rows, HEADS) fp32, and so `scores`; inv_rms (sources, rows)
    scores,
    inv_rms,
    norm_weight,  # (D,) or None
    norm_bias,
    norm_scale,  # (samples, D) or None: adaLN's
    norm_shift,
    mean,  # (rows,) fp32, None without a LayerNorm
    rstd,  # (rows,) fp32, None without a norm
    num_blocks,
    num_tokens,
    num_rows,
    scale,
    eps,
    factor,
    norm_eps,
    N: tl.constexpr,  # 0 with a table
    ALIGNED: tl.constexpr,  # as in a SourceTable
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    MIXED: tl.constexpr,  # the blocks have several dtypes
    HIDDEN: tl.constexpr,  # dtype of h, which a norm may take to a wider one
):
    sample, tokens, live, rows = place(tl.program_id(0), num_tokens, ROWS)
    num_rows = num_rows.to(tl.int64)  # times sources it may pass 2^31
    query_offsets = sample * query_strides[0] + tokens * query_strides[1]

    # The last source. It may have a dtype of its own, and so a name: a variable that a branch sets keeps its type.
    offsets = sample * last_strides[0] + tokens * last_strides[1]
    newest = load_row(last, offsets, live, D, HEADS, TILE, TILES)
    if add is not None:
        offsets = sample * add_strides[0] + tokens * add_strides[1]
        newest = _add_rows(newest, load_row(add, offsets, live, D, HEADS, TILE, TILES), partial)
        store_row(partial, rows * D, live, newest, D, HEADS, TILE, TILES)
    mixture = to_fp32(newest)
    maxima, norm = _scores(newest, query, query_offsets, live, scale, eps, D, HEADS, TILE, TILES)
    _store_stats(scores, inv_rms, num_blocks, maxima, norm, rows, num_rows, live, HEADS)
    sums = _ones(maxima)
    if mixed is not None:
        before = load_row(mixed, rows * D, live, D, HEADS, TILE, TILES)
        earlier = (tl.load(lse + rows, mask=live, other=0.0),)
        maxima, sums, mixture = attend(before, earlier, maxima, sums, mixture, HEADS, TILES)

    # The finished blocks. The next one is under way while this one is computed: the assembler would move its loads down
    # to where they are used, but not across a barrier, which costs a program of one warp nothing.
    if entries is not None:
        for kind in tl.static_range(len(blocks)):
            start, stop = bounds[kind], bounds[kind + 1]
            following = load_entry(
                entries, start, blocks[kind], sample, tokens, live, D, HEADS, TILE, TILES, ALIGNED, MIXED
            )
            for index in range(start, stop):
                values = following
                following = load_entry(
                    entries, tl.minimum(index + 1, stop - 1), blocks[kind], sample, tokens, live & (index + 1 < stop),
                    D, HEADS, TILE, TILES, ALIGNED, MIXED,
                )  # fmt: skip
                tl.debug_barrier()
                found, norm = _scores(values, query, query_offsets, live, scale, eps, D, HEADS, TILE, TILES)
                _store_stats(scores, inv_rms, place_of(entries, index), found, norm, rows, num_rows, live, HEADS)
                maxima, sums, mixture = attend(values, found, maxima, sums, mixture, HEADS, TILES)
    elif N > 0:
        offsets = sample * block_strides[0][0] + tokens * block_strides[0][1]
        following = load_row(blocks[0], offsets, live, D, HEADS, TILE, TILES)
        following = to_fp32(following) if MIXED else following  # what branches give has one type
    # A branch per block, not a mask: else this becomes one piece of code that takes minutes to compile and spills
    for i in tl.static_range(N):
        if i < num_blocks:
            values = following
            if i + 1 < N:
                offsets = sample * block_strides[i + 1][0] + tokens * block_strides[i + 1][1]
                exists = live & (i + 1 < num_blocks)
                following = load_row(blocks[i + 1], offsets, exists, D, HEADS, TILE, TILES)
                following = to_fp32(following) if MIXED else following
                tl.debug_barrier()
            found, norm = _scores(values, query, query_offsets, live, scale, eps, D, HEADS, TILE, TILES)
            _store_stats(scores, inv_rms, i, found, norm, rows, num_rows, live, HEADS)
            maxima, sums, mixture = attend(values, found, maxima, sums, mixture, HEADS, TILES)

    _store_weights(weights, scores, maxima, sums, rows, num_rows, live, num_blocks + 1, HEADS)
    hidden = scaled(mixture, sums, factor, out, HEADS, TILES)
    if rstd is not None:
        hidden = _normed(
            rounded(hidden, HIDDEN), sample, rows, live, norm_weight, norm_bias, norm_scale, norm_shift, mean, rstd,
            norm_eps, D, HEADS, TILE, TILES,
        )  # fmt: skip
    store_row(out, rows * D, live, hidden, D, HEADS, TILE, TILES)


@triton.jit
def _add_rows(left, right, target):
    """The sum, rounded to what it is stored as: the read sees what later readers will."""
    total = ()
    for c in tl.static_range(len(left)):
        total = total + ((left[c].to(tl.float32) + right[c].to(tl.float32)).to(target.dtype.element_ty),)
    return total


@triton.jit
def _scores(
    values, query, query_offsets, live, scale, eps,
    D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The scores of a source, one (ROWS,) per head, and its 1/rms.

    The query is loaded for every source: it stays in the first cache, and registers are scarcer. (The mask differs from
    source to source, or the compiler would merge the loads.)
    """
    row = load_row(query, query_offsets, live, D, HEADS, TILE, TILES)
    dots = row_sums((products(values, values),) + products_by_head(row, values, HEADS, TILES))
    norm = tl.rsqrt(dots[0] / D + eps)
    scores = ()
    for head in tl.static_range(HEADS):
        scores = scores + (scale * norm * dots[1 + head],)
    return scores, norm


@triton.jit
def _ones(like):
    result = ()
    for head in tl.static_range(len(like)):
        result = result + (tl.full(like[head].shape, 1.0, tl.float32),)
    return result


@triton.jit
def attend(values, scores, maxima, sums, mixture, HEADS: tl.constexpr, TILES: tl.constexpr):
    """One step of the running softmax."""
    new_maxima, new_sums, new_mixture = (), (), ()
    for head in tl.static_range(HEADS):
        maximum = tl.maximum(maxima[head], scores[head])
        kept = tl.exp(maxima[head] - maximum)
        weight = tl.exp(scores[head] - maximum)
        new_maxima = new_maxima + (maximum,)
        new_sums = new_sums + (sums[head] * kept + weight,)
        for c in tl.static_range(head * TILES, (head + 1) * TILES):
            # Queries of several readers (two_phase.py) are like heads that each take the whole row
            value = values[c % len(values)].to(tl.float32)
            new_mixture = new_mixture + (mixture[c] * kept[:, None] + value * weight[:, None],)
    return new_maxima, new_sums, new_mixture


@triton.jit
def scaled(mixture, sums, factor, out, HEADS: tl.constexpr, TILES: tl.constexpr):
    """h, rounded to what it is stored as: a norm that follows sees the same numbers, fused or not."""
    hidden = ()
    for head in tl.static_range(HEADS):
        ratio = factor / sums[head]
        for c in tl.static_range(head * TILES, (head + 1) * TILES):
            hidden = hidden + ((mixture[c] * ratio[:, None]).to(out.dtype.element_ty),)
    return hidden


@triton.jit
def _store_stats(scores, inv_rms, index, found, norm, rows, num_rows, live, HEADS: tl.constexpr):
    at = index * num_rows + rows
    tl.store(inv_rms + at, norm, mask=live)
    for head in tl.static_range(HEADS):
        tl.store(scores + at * HEADS + head, found[head], mask=live)


@triton.jit
def _store_weights(weights, scores, maxima, sums, rows, num_rows, live, num_sources, HEADS: tl.constexpr):
    """Weights of all sources from the scores stored above, which may have been written by other threads."""
    tl.debug_barrier()
    for first in range(0, num_sources, STATS):
        index = first + tl.arange(0, STATS)
        exists = live[None, :] & (index < num_sources)[:, None]
        for head in tl.static_range(HEADS):
            at = (index[:, None] * num_rows + rows[None, :]) * HEADS + head
            score = tl.load(scores + at, mask=exists, other=0.0)
            tl.store(weights + at, tl.exp(score - maxima[head][None, :]) / sums[head][None, :], mask=exists)


@triton.jit
def _normed(
    hidden, sample, rows, live, norm_weight, norm_bias, norm_scale, norm_shift, mean, rstd, norm_eps,
    D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """LayerNorm (with `mean`) or RMSNorm, then its affine parameters, then adaLN's: y (1 + scale) + shift."""
    if mean is not None:
        total = hidden[0].to(tl.float32)
        for c in tl.static_range(1, HEADS * TILES):
            total += hidden[c].to(tl.float32)
        centre = tl.sum(total, 1) / D
        tl.store(mean + rows, centre, mask=live)
        centred = ()
        for c in tl.static_range(HEADS * TILES):
            # Columns that do not exist must stay zero
            exists = inside(live, c, D, HEADS, TILE, TILES)
            centred = centred + (tl.where(exists, hidden[c].to(tl.float32) - centre[:, None], 0.0),)
    else:
        centred = to_fp32(hidden)
    inverse = tl.rsqrt(dot(centred, centred) / D + norm_eps)
    tl.store(rstd + rows, inverse, mask=live)
    result = ()
    for c in tl.static_range(HEADS * TILES):
        at = columns(c, D, HEADS, TILE, TILES)[None, :]
        exists = inside(live, c, D, HEADS, TILE, TILES)
        normed = centred[c] * inverse[:, None]
        if norm_weight is not None:
            normed *= tl.load(norm_weight + at, mask=exists, other=0.0).to(tl.float32)
        if norm_bias is not None:
            normed += tl.load(norm_bias + at, mask=exists, other=0.0).to(tl.float32)
        if norm_scale is not None:
            normed *= 1 + tl.load(norm_scale + sample * D + at, mask=exists, other=0.0).to(tl.float32)
        if norm_shift is not None:
            normed += tl.load(norm_shift + sample * D + at, mask=exists, other=0.0).to(tl.float32)
        result = result + (normed,)
    return result
