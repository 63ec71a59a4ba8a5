"""Traffic of depth attention as formulas, in S: the minimum, and peers by their algorithms (field/kernels.md).

Nothing here is counted or measured: benchmarks/traffic.py prints these rows beside what it counts of our kernels.
"""

from __future__ import annotations

from collections.abc import Callable


def sources_of_reads(depth: int, num_blocks: int | None) -> list[tuple[int, int, bool]]:
    """(finished blocks, readers of the open block, whether there is a partial sum) for every read."""
    sublayers = 2 * depth
    size = 1 if num_blocks is None else sublayers // num_blocks
    reads = [(1 + k // size, size, k % size > 0) for k in range(1, sublayers)]
    return [*reads, (1 + sublayers // size, 1, False)]


ONE_PASS: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {
    "minimum": (lambda n: n + 1, lambda n: 2 * n + 1),
    "list kernels (fla, fast-attnres)": (lambda n: n + 1, lambda n: 2 * n + 5 + 3 * n),
    "stacking (liger)": (lambda n: 3 * n + 1, lambda n: 2 * n + 5 + 3 * n),
}


NORM = 5  # a LayerNorm of its own: forward 2, backward 3
ADD = 3  # a sum in memory


def one_pass(name: str, depth: int, num_blocks: int | None) -> float:
    """All reads of a step, with their norms unless these are part of the read, and the sums within blocks."""
    forward, backward = ONE_PASS[name]
    total = 0.0
    for blocks, _, partial in sources_of_reads(depth, num_blocks):
        n = blocks + partial
        total += forward(n) + backward(n) + (0 if name == "minimum" else NORM)
    return total + ADD * num_sums(depth, num_blocks)


def two_phase_step(depth: int, num_blocks: int | None, minimum: bool) -> float:
    """Per read: phase one n/M + 1 and a merge 3; backward 2n/M + 1 and 5.

    A block's first reader finds no partial sum and does not merge. Peers add 4 for fp32 query gradients per token, a
    norm, and autograd's sums of 3n/M.
    """
    total = 0.0
    for blocks, readers, partial in sources_of_reads(depth, num_blocks):
        total += 3 * blocks / readers + 2 + (8 if partial else 0)
        total += 0 if minimum else 4 + NORM + 3 * blocks / readers
    return total + ADD * num_sums(depth, num_blocks)


def num_sums(depth: int, num_blocks: int | None) -> int:
    """Sums within blocks: every output but a block's first is added to a partial sum."""
    return 2 * depth - (2 * depth if num_blocks is None else num_blocks)
