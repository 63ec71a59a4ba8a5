"""Many sources: a table of them in memory, which the kernels walk with a loop.

Up to tiles.UNROLLED blocks are a tuple of pointers, and the walk over them is unrolled. For a Full model's 50 that
would take minutes to compile, once per bucket; so a larger read first puts what the tuple says into a table (a launch
of one program, a few microseconds) and loops over its entries. An entry is what one block needs: its address, its two
strides, the address of its gradient if it has one, and its place among the sources, where its statistics are.

A loop loads one dtype and stores one dtype, so entries are sorted by these *kinds*, of which there are one or two.
"""

from __future__ import annotations

import dataclasses
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

    def kind(place: int) -> tuple[torch.dtype, torch.dtype | None]:
        target = targets[place]
        return blocks[place].dtype, None if target is None else target.dtype

    kinds = list(dict.fromkeys(map(kind, range(len(blocks)))))
    order = sorted(range(len(blocks)), key=lambda place: kinds.index(kind(place)))
    firsts = [next(i for i, place in enumerate(order) if kind(place) == each) for each in kinds]
    size = triton.next_power_of_2(len(blocks))
    entries = torch.empty(size, FIELDS.value, dtype=torch.int64, device=blocks[0].device)
    padded = order + [order[-1]] * (size - len(order))
    write_kernel[(1,)](
        entries,
        # As bytes, or every mixture of dtypes would be a kernel of its own
        tuple(triton.reinterpret(blocks[place], tl.uint8) for place in padded),
        tuple(blocks[place].stride()[:2] for place in padded),
        tuple(triton.reinterpret(_or(targets[place], blocks[place]), tl.uint8) for place in padded),
        tuple(padded),
        N=size,
        num_warps=1,
    )
    numbers = [stride for block in blocks for stride in block.stride()[:2]] + [block.data_ptr() for block in blocks]
    return SourceTable(
        entries,
        tuple(blocks[order[first]] for first in firsts),
        tuple(targets[order[first]] for first in firsts),
        (*firsts, len(blocks)),
        all(number % 16 == 0 for number in numbers),
    )


def _or(target: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if target is None else target


@triton.jit(
    do_not_specialize=["block_strides", "places"], do_not_specialize_on_alignment=["entries", "blocks", "targets"]
)
def write_kernel(entries, blocks, block_strides, targets, places, N: tl.constexpr):
    for i in tl.static_range(N):
        entry = entries + i * FIELDS
        tl.store(entry, blocks[i].to(tl.int64))
        tl.store(entry + 1, block_strides[i][0])
        tl.store(entry + 2, block_strides[i][1])
        tl.store(entry + 3, targets[i].to(tl.int64))
        tl.store(entry + 4, places[i])


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
