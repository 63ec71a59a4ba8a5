"""The Triton kernels of two_phase.py with the interface of ops/two_phase.py: several queries, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_vision.ops.arguments import Inputs
from attnres_vision.ops.collect import SourceGradient
from attnres_vision.ops.reference import promoted_dtype
from attnres_vision.ops.triton import tiles
from attnres_vision.ops.triton.launch import BACKWARD_VALUES, GROUP_TOKENS, constants, gradient_targets
from attnres_vision.ops.triton.layout import Rows, element_size, on_device, rows_of, strides
from attnres_vision.ops.triton.two_phase import attend_blocks_kernel, blocks_gradient_kernel

# A thread holds a row of sums for each query: at most this many numbers, or queries go through in several passes.
QUERY_VALUES = 72


def tiling_of(width: int, element_size: int) -> tuple[tiles.Tiling, int]:
    """The tiling of both kernels, and how many queries go through in one pass."""
    tiling = tiles.tiling(width, 1, element_size, BACKWARD_VALUES)
    return tiling, max(1, QUERY_VALUES // tiling.values)


def forward(sources: Sequence[Tensor], queries: Sequence[Tensor], eps: float, scale: float) -> list[Tensor]:
    """[mean for each query, log-sum-exp, scores, 1/rms]: (..., D) each, (M, ...), (M, n, ...), (n, ...)."""
    shape, dtype = sources[0].shape, promoted_dtype(sources)
    count, num = len(queries), len(sources)
    means = [sources[0].new_empty(shape, dtype=dtype) for _ in queries]
    stats = {"dtype": torch.float32, "device": sources[0].device}
    lse = torch.empty(count, *shape[:-1], **stats)
    scores = torch.empty(count, num, *shape[:-1], **stats)
    inv_rms = torch.empty(num, *shape[:-1], **stats)
    if not means[0].numel():
        return [*means, lse, scores, inv_rms]
    rows, viewed = _rows(sources, queries)
    tiling, at_once = tiling_of(rows.width, element_size(rows))
    blocks, block_strides = rows.block_arguments()
    grid = (rows.samples * -(-rows.tokens // tiling.rows),)
    with on_device(sources[0]):
        for start in range(0, count, at_once):
            part = slice(start, start + at_once)
            attend_blocks_kernel[grid](
                blocks,
                block_strides,
                tuple(viewed[part]),
                tuple(strides(query) for query in viewed[part]),
                tuple(means[part]),
                lse[part],
                scores[part],
                inv_rms,
                num,
                rows.tokens,
                rows.samples * rows.tokens,
                scale,
                eps,
                M=len(viewed[part]),
                N=len(blocks),
                MIXED=len({block.dtype for block in blocks}) > 1,
                **constants(rows, tiling, 1),
            )
    return [*means, lse, scores, inv_rms]


def gradients(
    grads: Sequence[Tensor | None],
    grad_lse: Tensor | None,
    sources: Sequence[Tensor],
    queries: Sequence[Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    scale: float,
    needs_grad: Sequence[bool],
    collected: Sequence[SourceGradient | None],
) -> list[Tensor | None]:
    """Gradients of the sources and the queries; None where there is none, or where `collected` took it."""
    lse, scores, inv_rms = saved
    if not sources[0].numel():
        tensors = [*sources, *queries]
        return [torch.zeros_like(tensor) if need else None for tensor, need in zip(tensors, needs_grad, strict=True)]
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.contiguous()
    upstream = [torch.zeros_like(sources[0]) if grad is None else grad.contiguous() for grad in grads]
    rows, viewed = _rows(sources, queries)
    tiling, at_once = tiling_of(rows.width, element_size(rows))
    per_token = queries[0].dim() > 1 and queries[0].shape == sources[0].shape
    group = 1 if per_token else max(1, GROUP_TOKENS // tiling.rows)
    programs = rows.samples * -(-rows.tokens // (tiling.rows * group))
    several = len(queries) > at_once  # later passes add to what the first one wrote
    targets, accumulate = gradient_targets(
        [*sources, sources[-1]], [*needs_grad[: len(sources)], False], [*collected, None], several
    )
    targets = targets[:-1]
    shape = sources[0].shape if per_token else (programs, rows.width)
    query_grads: list[Tensor] = [lse.new_empty(shape) for _ in queries]
    blocks, block_strides = rows.block_arguments()
    block_targets = [*targets, *[targets[-1]] * (len(blocks) - len(targets))]
    with on_device(sources[0]):
        for start in range(0, len(queries), at_once):
            part = slice(start, start + at_once)
            blocks_gradient_kernel[(programs,)](
                blocks,
                block_strides,
                tuple(block_targets),
                tuple(viewed[part]),
                tuple(strides(query) for query in viewed[part]),
                tuple(query_grads[part]),
                tuple(upstream[part]),
                grad_lse[part],
                lse[part],
                scores[part],
                inv_rms,
                len(sources),
                rows.tokens,
                rows.samples * rows.tokens,
                scale,
                M=len(viewed[part]),
                N=len(blocks),
                STEPS=group,
                PER_TOKEN=per_token,
                ACCUMULATE=accumulate,
                **constants(rows, tiling, 1),
            )
    results: list[Tensor | None] = [None if c is not None else t for t, c in zip(targets, collected, strict=True)]
    for query, grad, need in zip(queries, query_grads, needs_grad[len(sources) :], strict=True):
        if not per_token:
            per_sample = query.dim() == 2 and sources[0].dim() > 2
            grad = grad.view(rows.samples if per_sample else 1, -1, rows.width).sum(1).view(query.shape)
        results.append(grad.to(query.dtype) if need else None)
    return results


def _rows(sources: Sequence[Tensor], queries: Sequence[Tensor]) -> tuple[Rows, list[Tensor]]:
    """The rows of a read without a last source, and the queries as rows."""
    rows = rows_of([*sources, sources[-1]], queries[0], Inputs(queries[0]))
    return rows, [rows.view_query(query) for query in queries]
