"""What the kernels do with rows: load them as tuples of tiles, store them, sum over them.

A tile has shape (ROWS, TILE); tile `head * TILES + c` covers columns `c * TILE ...` of the slice of a head. Inside a
kernel D is the whole width, HEADS, TILE and TILES are those of tiles.Tiling.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments of the kernels that take every value: by default Triton compiles anew for 1 and for multiples of 16.
COUNTS = ["num_blocks", "num_tokens", "num_rows", "num_steps", "num_added", "bounds"]
# Statistics of one reader of several: views, which 16 bytes divide only for some numbers of rows. Likewise.
VIEWS = ["lse", "grad_lse", "scores"]


@triton.jit
def place(step, num_tokens, ROWS: tl.constexpr):
    """Sample, tokens (ROWS,), which of them exist, and their places (ROWS,) in a contiguous tensor: int64.

    A step is ROWS tokens of one sample.
    """
    steps = tl.cdiv(num_tokens, ROWS)
    sample = (step // steps).to(tl.int64)
    tokens = (step % steps).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return sample, tokens, tokens < num_tokens, sample * num_tokens + tokens


@triton.jit
def columns(index: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Columns of a tile, (TILE,)."""
    return (index // TILES) * (D // HEADS) + (index % TILES) * TILE + tl.arange(0, TILE)


@triton.jit
def inside(live, index: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Mask of a tile: rows that are `live` (ROWS,), and columns that exist."""
    if TILE * TILES * HEADS == D:
        mask = live[:, None]
    else:
        mask = live[:, None] & ((index % TILES) * TILE + tl.arange(0, TILE) < D // HEADS)[None, :]
    return mask


@triton.jit
def load_row(pointer, offsets, live, D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Rows at `offsets` (ROWS,), in the dtype of the memory: zero where they are not live."""
    row = ()
    for c in tl.static_range(HEADS * TILES):
        at = offsets[:, None] + columns(c, D, HEADS, TILE, TILES)[None, :]
        row = row + (tl.load(pointer + at, mask=inside(live, c, D, HEADS, TILE, TILES), other=0.0),)
    return row


@triton.jit
def store_row(
    pointer, offsets, live, row, D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    for c in tl.static_range(HEADS * TILES):
        at = offsets[:, None] + columns(c, D, HEADS, TILE, TILES)[None, :]
        mask = inside(live, c, D, HEADS, TILE, TILES)
        tl.store(pointer + at, row[c].to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def to_fp32(row):
    # Before any arithmetic: products of two bf16 numbers would round, and the interpreter computes nonsense.
    result = ()
    for c in tl.static_range(len(row)):
        result = result + (row[c].to(tl.float32),)
    return result


@triton.jit
def rounded(row, DTYPE: tl.constexpr):
    result = ()
    for c in tl.static_range(len(row)):
        result = result + (row[c].to(DTYPE),)
    return result


@triton.jit
def zeros(ROWS: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr):
    row = ()
    for _ in tl.static_range(COUNT):
        row = row + (tl.zeros((ROWS, TILE), tl.float32),)
    return row


@triton.jit
def products(left, right):
    """left * right in fp32, with the tiles of the row added up: (ROWS, TILE)."""
    total = left[0].to(tl.float32) * right[0].to(tl.float32)
    for c in tl.static_range(1, len(left)):
        total += left[c].to(tl.float32) * right[c].to(tl.float32)
    return total


@triton.jit
def row_sums(parts):
    """Sums over the rows of several (ROWS, TILE), a tuple of (ROWS,).

    Four at a time: the warps of a program wait for each other once for all of them.
    """
    sums = ()
    for i in tl.static_range(0, len(parts) - 3, 4):
        sums = sums + tl.reduce((parts[i], parts[i + 1], parts[i + 2], parts[i + 3]), 1, _add_four)
    if len(parts) % 4 >= 2:
        at: tl.constexpr = len(parts) // 4 * 4
        sums = sums + tl.reduce((parts[at], parts[at + 1]), 1, _add_two)
    if len(parts) % 2 == 1:
        sums = sums + (tl.sum(parts[len(parts) - 1], 1),)
    return sums


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def dot(left, right):
    """Sum over the row of left * right, (ROWS,), in fp32."""
    return tl.sum(products(left, right), 1)


@triton.jit
def products_by_head(left, right, HEADS: tl.constexpr, TILES: tl.constexpr):
    """`products` of every head's slice of the row, a tuple."""
    parts = ()
    for head in tl.static_range(HEADS):
        left_slice, right_slice = left[head * TILES : (head + 1) * TILES], right[head * TILES : (head + 1) * TILES]
        parts = parts + (products(left_slice, right_slice),)
    return parts


@triton.jit
def dot_by_head(left, right, HEADS: tl.constexpr, TILES: tl.constexpr):
    """Sums over the slices of the row, one (ROWS,) for every head."""
    return row_sums(products_by_head(left, right, HEADS, TILES))


@triton.jit
def store_sum(target, row, D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Sum over the rows of a tile, into row `program` of (programs, D)."""
    everywhere = tl.full((1,), 1, tl.int1)
    for c in tl.static_range(HEADS * TILES):
        at = tl.program_id(0).to(tl.int64) * D + columns(c, D, HEADS, TILE, TILES)[None, :]
        tl.store(target + at, tl.sum(row[c], 0)[None, :], mask=inside(everywhere, c, D, HEADS, TILE, TILES))
