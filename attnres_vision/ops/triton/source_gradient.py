"""The gradient of one source, for backward.py: dv = f a dh + scale r ds q - (r^2 / D) (ds . s) v."""

from __future__ import annotations

import triton
import triton.language as tl

from attnres_vision.ops.triton.rows import columns, dot_by_head, inside


@triton.jit
def products_of(values, upstream, grad_weights, weights, at, live, factor, HEADS: tl.constexpr, TILES: tl.constexpr):
    """Per head: p = factor * (dh . v) + da, and a p."""
    dots = dot_by_head(values, upstream, HEADS, TILES)
    products, weighted = (), ()
    for head in tl.static_range(HEADS):
        product = factor * dots[head]
        if grad_weights is not None:
            product += tl.load(grad_weights + at * HEADS + head, mask=live, other=0.0)
        weight = tl.load(weights + at * HEADS + head, mask=live, other=0.0)
        products = products + (product,)
        weighted = weighted + (weight * product,)
    return products, weighted


@triton.jit
def factors_of(
    values, upstream, shared, grad_weights, weights, scores, inv_rms, at, live, scale, factor,
    D: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The factors of dh and of q in a source's gradient, per head, and that of the source itself."""
    products = products_of(values, upstream, grad_weights, weights, at, live, factor, HEADS, TILES)[0]
    norm = tl.load(inv_rms + at, mask=live, other=0.0)
    of_upstream, of_query = (), ()
    key_term = tl.zeros_like(norm)
    for head in tl.static_range(HEADS):
        weight = tl.load(weights + at * HEADS + head, mask=live, other=0.0)
        grad_score = weight * (products[head] - shared[head])
        of_upstream = of_upstream + (factor * weight,)
        of_query = of_query + (scale * norm * grad_score,)
        key_term += grad_score * tl.load(scores + at * HEADS + head, mask=live, other=0.0)
    return of_upstream, of_query, -norm * norm * key_term / D


@triton.jit
def store_gradient(
    target, earlier, at, values, upstream, query, query_at, factors, live,
    D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write a source's gradient, plus what is in `earlier`."""
    for c in tl.static_range(HEADS * TILES):
        column = columns(c, D, HEADS, TILE, TILES)[None, :]
        mask = inside(live, c, D, HEADS, TILE, TILES)
        direction = tl.load(query + query_at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        gradient = factors[0][c // TILES][:, None] * upstream[c].to(tl.float32)
        gradient += factors[1][c // TILES][:, None] * direction
        gradient += factors[2][:, None] * values[c].to(tl.float32)
        if earlier is not None:
            gradient += tl.load(earlier + at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + at[:, None] + column, gradient.to(target.dtype.element_ty), mask=mask)


@triton.jit
def plus_products(sums, values, factors, HEADS: tl.constexpr, TILES: tl.constexpr):
    """sums + factors * values, with one factor (ROWS,) per head."""
    result = ()
    for c in tl.static_range(HEADS * TILES):
        value = values[c % len(values)].to(tl.float32)  # see forward.attend
        result = result + (sums[c] + factors[c // TILES][:, None] * value,)
    return result


@triton.jit
def plus(left, right):
    """left + right, for tuples."""
    result = ()
    for i in tl.static_range(len(left)):
        result = result + (left[i] + right[i],)
    return result
