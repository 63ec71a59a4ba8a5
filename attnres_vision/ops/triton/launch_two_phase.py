"""The Triton kernels of two_phase.py with the interface of ops/two_phase.py: several queries, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_vision.ops.arguments import Inputs
from attnres_vision.ops.collect import SourceGradient
from attnres_vision.ops.dtypes import promoted_dtype
from attnres_vision.ops.triton import tiles
from attnres_vision.ops.triton.launch import BACKWARD_VALUES, constants, group_steps
from attnres_vision.ops.triton.layout import Rows, element_size, on_device, rows_of, strides
from attnres_vision.ops.triton.two_phase import attend_blocks_kernel, blocks_gradient_kernel, mix_blocks_kernel

# A thread holds its part of a row once for each query: so many numbers in all, or queries go through in several passes.
# Backward holds two such rows per query, of which the gradients are packed if their numbers have two bytes.
QUERY_VALUES = {2: 72, 4: 64}
# Forward holds the queries too if both together are no more than this.
HELD_VALUES = 144
# Tokens that a program of the forward kernel walks over with the queries it holds.
FORWARD_STEPS = 4


def tiling_of(width: int, element_size: int, count: int) -> tuple[tiles.Tiling, int]:
    """The tiling for so many queries, and how many of them go through in one pass."""
    most = QUERY_VALUES[element_size]
    tiling = tiles.tiling(width, 1, element_size, min(BACKWARD_VALUES, max(1, most // count)))
    passes = -(-count // max(1, most // tiling.values))
    return tiling, -(-count // passes)


def forward(
    sources: Sequence[Tensor], queries: Sequence[Tensor], eps: float, scale: float, factor: float
) -> list[Tensor]:
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
    tiling, at_once = tiling_of(rows.width, element_size(rows), count)
    steps = min(FORWARD_STEPS, group_steps(rows, tiling))
    grid = (rows.samples * -(-rows.tokens // (tiling.rows * steps)),)
    with on_device(sources[0]):
        blocks = rows.table_arguments()
        for start in range(0, count, at_once):
            part = slice(start, start + at_once)
            attend_blocks_kernel[grid](
                queries=tuple(viewed[part]),
                query_strides=tuple(strides(query) for query in viewed[part]),
                mixed=tuple(means[part]),
                lse=lse[part],
                scores=scores[part],
                inv_rms=inv_rms,
                num_blocks=num,
                num_tokens=rows.tokens,
                num_rows=rows.samples * rows.tokens,
                num_steps=steps,
                scale=scale,
                eps=eps,
                factor=1.0 if start else factor,
                M=len(viewed[part]),
                PER_TOKEN=_per_token(sources, queries),
                SHARED=queries[0].dim() == 1,
                HOLD=2 * tiling.values * at_once <= HELD_VALUES,
                **blocks,
                **constants(rows, tiling, 1),
            )
    return [*means, lse, scores, inv_rms]


def mix(sources: Sequence[Tensor], lse: Tensor, scores: Tensor) -> list[Tensor]:
    """The means that `forward` gave for these (M, ...) and (M, n, ...)."""
    means = [sources[0].new_empty(sources[0].shape, dtype=promoted_dtype(sources)) for _ in lse]
    if not means[0].numel():
        return means
    rows = rows_of([*sources, sources[-1]], sources[-1], Inputs(sources[-1]))
    tiling, at_once = tiling_of(rows.width, element_size(rows), len(means))
    grid = (rows.samples * -(-rows.tokens // tiling.rows),)
    with on_device(sources[0]):
        blocks = rows.table_arguments()
        for start in range(0, len(means), at_once):
            part = slice(start, start + at_once)
            mix_blocks_kernel[grid](
                mixed=tuple(means[part]),
                lse=lse[part],
                scores=scores[part],
                num_blocks=len(sources),
                num_tokens=rows.tokens,
                num_rows=rows.samples * rows.tokens,
                M=len(means[part]),
                **blocks,
                **constants(rows, tiling, 1),
            )
    return means


def gradients(
    grads: Sequence[Tensor],
    opening: Tensor | None,
    grad_lse: Tensor,
    sources: Sequence[Tensor],
    queries: Sequence[Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    scale: float,
    factor: float,
    needs_grad: Sequence[bool],
    collected: Sequence[SourceGradient | None],
) -> list[Tensor | None]:
    """Gradients of the sources and the queries; None where there is none, or where `collected` took it."""
    lse, scores, inv_rms = saved
    if not sources[0].numel():
        tensors = [*sources, *queries]
        return [torch.zeros_like(tensor) if need else None for tensor, need in zip(tensors, needs_grad, strict=True)]
    upstream = [grad.contiguous() for grad in grads]
    rows, viewed = _rows(sources, queries)
    tiling, at_once = tiling_of(rows.width, element_size(rows), len(queries))
    per_token = _per_token(sources, queries)
    steps = 1 if per_token else group_steps(rows, tiling)
    programs = rows.samples * -(-rows.tokens // (tiling.rows * steps))
    targets, num_added = _targets(sources, needs_grad, collected)
    shape = sources[0].shape if per_token else (programs, rows.width)
    query_grads = [lse.new_empty(shape, dtype=query.dtype if per_token else None) for query in queries]
    with on_device(sources[0]):
        blocks = rows.table_arguments(targets)
        for start in range(0, len(queries), at_once):
            part = slice(start, start + at_once)
            blocks_gradient_kernel[(programs,)](
                queries=tuple(viewed[part]),
                query_strides=tuple(strides(query) for query in viewed[part]),
                query_grads=tuple(query_grads[part]),
                grads=tuple(upstream[part]),
                opening=None if start else opening,
                grad_lse=grad_lse[part],
                lse=lse[part],
                scores=scores[part],
                inv_rms=inv_rms,
                num_blocks=len(sources),
                num_tokens=rows.tokens,
                num_rows=rows.samples * rows.tokens,
                num_steps=steps,
                num_added=len(sources) if start else num_added,  # later passes add to what the first one wrote
                scale=scale,
                factor=factor,
                M=len(viewed[part]),
                PER_TOKEN=per_token,
                SHARED=queries[0].dim() == 1,
                **blocks,
                **constants(rows, tiling, 1),
            )
    results: list[Tensor | None] = [None if c is not None else t for t, c in zip(targets, collected, strict=True)]
    for query, grad, need in zip(queries, query_grads, needs_grad[len(sources) :], strict=True):
        if not per_token:
            per_sample = query.dim() == 2 and sources[0].dim() > 2
            grad = grad.view(rows.samples if per_sample else 1, -1, rows.width).sum(1).view(query.shape)
        results.append(grad.to(query.dtype) if need else None)
    return results


def _targets(
    sources: Sequence[Tensor], needs_grad: Sequence[bool], collected: Sequence[SourceGradient | None]
) -> tuple[list[Tensor | None], int]:
    """Where the gradient of each source goes, and how many of the first ones are added to what is there."""
    begun = [entry is not None and entry.has_begun() for entry in collected]
    num_added = max((index + 1 for index, known in enumerate(begun) if known), default=0)
    targets: list[Tensor | None] = []
    for index, (source, gradient) in enumerate(zip(sources, collected, strict=True)):
        make = torch.zeros_like if index < num_added else torch.empty_like
        if not needs_grad[index]:
            targets.append(None)
        elif gradient is not None:
            targets.append(gradient.accumulator(source, make))
        else:
            targets.append(make(source, memory_format=torch.contiguous_format))
    return targets, num_added


def _per_token(sources: Sequence[Tensor], queries: Sequence[Tensor]) -> bool:
    return queries[0].dim() > 1 and queries[0].shape == sources[0].shape


def _rows(sources: Sequence[Tensor], queries: Sequence[Tensor]) -> tuple[Rows, list[Tensor]]:
    """The rows of a read without a last source, and the queries as rows."""
    rows = rows_of([*sources, sources[-1]], queries[0], Inputs(queries[0]))
    return rows, [rows.view_query(query) for query in queries]
