"""How a kernel cuts its work: columns of a row into tiles, rows into programs, sources into buckets.

Triton's blocks have sides that are powers of two, vision's widths do not: 768 = 3 x 256, 1152 = 9 x 128. A row is
therefore a tuple of equal tiles, exact where the width allows it, so that no lane and no register holds padding.
A 256-wide tile of 2-byte numbers is one 16-byte load for each of a warp's 32 lanes. A program is one warp as long as
its registers suffice: sums over a row are then shuffles, without a barrier or shared memory.
"""

from __future__ import annotations

import dataclasses
import functools

MIN_TILE = 16  # of columns
# Up to so many blocks come as a tuple of pointers, and the walk over them is unrolled; more are walked with a loop
# (source_table.py). A kernel is compiled for these sizes of the tuple; the surplus loads are switched off.
UNROLLED = 8
BUCKETS = (1, 2, 3, 4, 6, UNROLLED)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel covers rows of `heads` slices.

    Attributes:
        rows: rows (tokens) that a program works on at a time.
        tile: columns of a tile, a power of two.
        tiles: tiles per slice; the last one is partly empty unless `tile * tiles` is the slice's width.
        warps: warps per program.
        values: numbers of a row tile that each thread holds: what decides about registers.
        load_bytes: what a thread loads in one instruction, 16 or 8.
    """

    rows: int
    tile: int
    tiles: int
    warps: int
    values: int
    load_bytes: int


@functools.cache
def tiling(width: int, heads: int, element_size: int, max_values: int) -> Tiling:
    """The tiling for rows of `width` in `heads` slices, stored in numbers of `element_size` bytes.

    Args:
        max_values: how many numbers of a row a thread may hold; a kernel that keeps several rows at once allows less.
    """
    slice_width = width // heads
    unit = 512 // element_size  # columns that a warp loads in one instruction of 16 bytes per lane
    choices = []
    for warps in (1, 2, 4, 8):
        tile = MIN_TILE
        while tile <= unit * warps:
            tiles = -(-slice_width // tile)
            waste = tiles * tile / slice_width
            for narrow in (1, 2):  # loads of 16 or 8 bytes
                rows = unit * warps // tile // narrow
                if rows == 0 or (warps > 1 and rows > 1):
                    continue
                values = heads * tiles * rows * tile // (32 * warps)
                # In this order: fits into registers, wide loads, little padding, few warps, exact, wide tiles. Padding
                # takes lanes and registers but no bandwidth, so up to a third of it is better than narrow loads.
                crowded = max(0, values + 2 * (rows - 1) - max_values)  # every row has statistics of its own
                order = (crowded, waste > 1.34, narrow, waste > 1.13, warps, waste, -tile)
                choices.append((order, Tiling(rows, tile, tiles, warps, values, 16 // narrow)))
            tile *= 2
    return min(choices, key=lambda choice: choice[0])[1]


def bucket(count: int) -> int:
    """The smallest bucket for `count` blocks."""
    return next(size for size in BUCKETS if size >= count)
