"""Backward pass of the norm that ends a read, for backward.py: h is mixed once more, so that it need not be kept.

With x the normalised h, y = (x w + b) (1 + scale) + shift and g = dy (1 + scale) w:

    LayerNorm   dh = rstd (g - mean(g) - x mean(g x))          RMSNorm   dh = rstd (g - x mean(g x))

The gradients of w, b, scale and shift all follow from sum(dy x) and sum(dy) over the tokens of a sample.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnres_vision.ops.triton.rows import columns, dot, inside


@triton.jit
def mix(hidden, values, weights, at, live, factor, HEADS: tl.constexpr, TILES: tl.constexpr):
    """hidden + factor * weight * values."""
    result = ()
    for head in tl.static_range(HEADS):
        weight = factor * tl.load(weights + at * HEADS + head, mask=live, other=0.0)
        for c in tl.static_range(head * TILES, (head + 1) * TILES):
            result = result + (hidden[c] + weight[:, None] * values[c].to(tl.float32),)
    return result


@triton.jit
def norm_gradient(
    upstream, hidden, scaled_sum, plain_sum, norm_weight, norm_scale, mean, rstd, sample, rows, live,
    HIDDEN: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dh, rounded like h, and the two sums with this tile added."""
    inverse = tl.load(rstd + rows, mask=live, other=0.0)
    centre = tl.zeros_like(inverse)
    if mean is not None:
        centre = tl.load(mean + rows, mask=live, other=0.0)
    normed, grads, new_scaled, new_plain = (), (), (), ()
    for c in tl.static_range(HEADS * TILES):
        column = columns(c, D, HEADS, TILE, TILES)[None, :]
        mask = inside(live, c, D, HEADS, TILE, TILES)
        rounded = hidden[c].to(HIDDEN).to(tl.float32)  # what the norm saw
        x = tl.where(mask, (rounded - centre[:, None]) * inverse[:, None], 0.0)
        grad = upstream[c].to(tl.float32)
        new_scaled = new_scaled + (scaled_sum[c] + grad * x,)
        new_plain = new_plain + (plain_sum[c] + grad,)
        if norm_weight is not None:
            grad *= tl.load(norm_weight + column, mask=mask, other=0.0).to(tl.float32)
        if norm_scale is not None:
            grad *= 1 + tl.load(norm_scale + sample * D + column, mask=mask, other=0.0).to(tl.float32)
        normed = normed + (x,)
        grads = grads + (grad,)
    along = dot(grads, normed) / D
    average = tl.zeros_like(along)
    if mean is not None:
        total = grads[0]
        for c in tl.static_range(1, HEADS * TILES):
            total += grads[c]
        average = tl.sum(total, 1) / D
    result = ()
    for c in tl.static_range(HEADS * TILES):
        mask = inside(live, c, D, HEADS, TILE, TILES)
        grad = inverse[:, None] * (grads[c] - average[:, None] - normed[c] * along[:, None])
        result = result + (tl.where(mask, grad, 0.0).to(HIDDEN),)
    return result, new_scaled, new_plain
