"""Many sources: a table of them in memory, which the kernels walk with a loop.

Up to tiles.UNROLLED blocks are a tuple of pointers, and the walk over them is unrolled. For a Full model's 50 that
would take minutes to compile, once per bucket; so a larger read first puts what the tuple says into a table (a launch
of one program, a few microseconds) and loops over its entries. An entry is what one block needs: its address, its two
strides, the address of its gradient if it has one, and its place among the sources, where its statistics are.

A loop loads one dtype and stores one dtype, so entries are sorted by these *kinds*, of which there are one or two.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_vision.ops.triton.rows import load_row, to_fp32

FIELDS = tl.constexpr(5)


@dataclasses.dataclass(frozen=True)
class SourceTable:
    """Blocks as the kernels take them beyond tiles.UNROLLED.

    Attributes:
        entries: (at least as many as blocks, FIELDS) int64.
        blocks, targets: a block of every kind and its gradient, for their dtypes; None for a kind without gradients.
        bounds: kind k has the entries from bounds[k] to bounds[k + 1].
        aligned: 16 divides all addresses (in bytes) and strides (in numbers), so 16 bytes can be loaded at once.
    """

    entries: Tensor
    blocks: tuple[Tensor, ...]
    targets: tuple[Tensor | None, ...]
    bounds: tuple[int, ...]
    aligned: bool


def source_table(blocks: Sequence[Tensor], targets: Sequence[Tensor | None]) -> SourceTable:
    """The table of blocks (samples, tokens, D) and of their gradients, contiguous rows or None."""
    places: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = {}
    for place, (block, target) in enumerate(zip(blocks, targets, strict=True)):
        places.setdefault((block.dtype, None if target is None else target.dtype), []).append(place)
    order = list(itertools.chain(*places.values()))
    size = triton.next_power_of_2(len(order))
    numbers: list[int] = []
    for place in order + order[-1:] * (size - len(order)):
        block, target = blocks[place], targets[place]
        address = block.data_ptr()
        numbers += (address, *block.stride()[:2], address if target is None else target.data_ptr(), place)
    entries = torch.empty(size, FIELDS.value, dtype=torch.int64, device=blocks[0].device)
    write_kernel[(1,)](entries, tuple(numbers), COUNT=len(numbers), num_warps=1)
    firsts = [kind[0] for kind in places.values()]
    return SourceTable(
        entries,
        tuple(blocks[first] for first in firsts),
        tuple(targets[first] for first in firsts),
        tuple(itertools.accumulate(map(len, places.values()), initial=0)),
        all(numbers[i] % 16 == 0 for i in range(len(numbers)) if i % FIELDS.value < 3),
    )


@triton.jit(do_not_specialize=["numbers"], do_not_specialize_on_alignment=["entries"])
def write_kernel(entries, numbers, COUNT: tl.constexpr):
    """Numbers and not pointers: these would bring their dtypes, and every mixture of them would be another kernel."""
    for i in tl.static_range(COUNT):
        tl.store(entries + i, numbers[i])


@triton.jit
def load_entry(
    entries, index, like, sample, tokens, live,
    D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ALIGNED: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """rows.load_row of the block in an entry: `like` points to one of its dtype."""
    entry = entries + index * FIELDS
    pointer = tl.load(entry).to(like.dtype)
    sample_stride, token_stride = tl.load(entry + 1), tl.load(entry + 2)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        sample_stride, token_stride = tl.multiple_of(sample_stride, 16), tl.multiple_of(token_stride, 16)
    row = load_row(pointer, sample * sample_stride + tokens * token_stride, live, D, HEADS, TILE, TILES)
    return to_fp32(row) if MIXED else row


@triton.jit
def place_of(entries, index):
    """Where the statistics of the block in an entry are."""
    return tl.load(entries + index * FIELDS + 4)


@triton.jit
def target_of(entries, index, like):
    """Where the gradient of the block in an entry goes, as a pointer like that of its kind; None if that is None."""
    if like is None:
        target = None
    else:
        target = tl.multiple_of(tl.load(entries + index * FIELDS + 3).to(like.dtype), 16)
    return target
