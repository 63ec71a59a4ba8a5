"""Two-phase reads of an open block: the finished blocks once for the queries of all its readers, then one merge each.

    first, second, third = attend_blocks(blocks, [q1, q2, q3], eps=..., scale=..., kernel=...)
    h = operator.depth_attention([partial], q2, earlier=(*second, len(blocks)), ...)

Phase one gives, for each query, the weighted mean of the blocks and the log-sum-exp of its scores. A custom operator
like the read itself (operator.py), in PyTorch and in Triton; depth heads are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnres_vision.ops.analytic import read_backward, read_forward
from attnres_vision.ops.collect import SourceGradient, gradient_of
from attnres_vision.ops.operator import BACKWARD_FLOPS, FORWARD_FLOPS, refuse_double_backward
from attnres_vision.ops.reference import compute_dtype, promoted_dtype

NUM_SAVED = 3  # log-sum-exp, scores, 1/rms


def attend_blocks(
    sources: Sequence[Tensor], queries: Sequence[Tensor], *, eps: float, scale: float, kernel: str
) -> list[tuple[Tensor, Tensor]]:
    """For each query, the mean of the sources (..., D) that its softmax gives, and the log-sum-exp (...) of its scores.

    Args:
        sources: the finished blocks, each (..., D).
        queries: one per reader, all of one kind: (D,), (B, D) or the shape of a source.
        eps, scale, kernel: as in operator.depth_attention.
    """
    gradients = [gradient_of(source) for source in sources] if torch.is_grad_enabled() else []
    if any(gradient is not None for gradient in gradients):
        results = _CollectingPass.apply(gradients, len(sources), eps, scale, kernel, *sources, *queries)
    else:
        results = blocks_op(list(sources), list(queries), eps, scale, kernel)
    means, lse = results[: len(queries)], results[len(queries)]
    return list(zip(means, lse.unbind(0), strict=True))


@torch.library.custom_op("attnres_vision::attend_blocks", mutates_args=())
def blocks_op(sources: list[Tensor], queries: list[Tensor], eps: float, scale: float, kernel: str) -> list[Tensor]:
    """[mean for each query, log-sum-exp, scores, 1/rms]: (..., D) each, (M, ...), (M, n, ...), (n, ...)."""
    if kernel == "triton":
        from attnres_vision.ops.triton import launch_two_phase

        return launch_two_phase.forward(sources, queries, eps, scale)
    reads = [read_forward(sources, query, eps, scale, 1.0, 1) for query in queries]
    means = [mean for mean, *_ in reads]
    scores = torch.stack([scores.squeeze(-1) for _, _, scores, _ in reads])
    return [*means, scores.logsumexp(1), scores, reads[0][3]]


@torch.library.custom_op("attnres_vision::attend_blocks_backward", mutates_args=())
def blocks_backward_op(
    grads: list[Tensor],
    grad_lse: Tensor | None,
    sources: list[Tensor],
    queries: list[Tensor],
    lse: Tensor,
    scores: Tensor,
    inv_rms: Tensor,
    scale: float,
    kernel: str,
    needs_grad: list[bool],
) -> list[Tensor]:
    """Gradients of (*sources, *queries), those that `needs_grad` marks."""
    found = _gradients(
        grads, grad_lse, sources, queries, (lse, scores, inv_rms), scale, kernel, needs_grad, [None] * len(sources)
    )
    return [grad for grad, needed in zip(found, needs_grad, strict=True) if needed and grad is not None]


def _gradients(
    grads: Sequence[Tensor | None],
    grad_lse: Tensor | None,
    sources: Sequence[Tensor],
    queries: Sequence[Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    scale: float,
    kernel: str,
    needs_grad: Sequence[bool],
    collected: Sequence[SourceGradient | None],
) -> list[Tensor | None]:
    if kernel == "triton":
        from attnres_vision.ops.triton import launch_two_phase

        return launch_two_phase.gradients(grads, grad_lse, sources, queries, saved, scale, needs_grad, collected)
    lse, scores, inv_rms = saved
    totals: list[Tensor | None] = [None] * len(sources)
    query_grads: list[Tensor | None] = []
    for m, query in enumerate(queries):
        weights = (scores[m] - lse[m]).exp().unsqueeze(-1)
        marks = [*needs_grad[: len(sources)], needs_grad[len(sources) + m]]
        grad = torch.zeros_like(sources[0]) if grads[m] is None else grads[m]
        *terms, query_grad, _, _ = read_backward(
            grad, None, sources, query, weights, scores[m].unsqueeze(-1), inv_rms, scale, 1.0, marks, collected,
            grad_lse=None if grad_lse is None else grad_lse[m],
        )  # fmt: skip
        for i, term in enumerate(terms):
            total = totals[i]
            totals[i] = term if total is None or term is None else total.add_(term)
        query_grads.append(query_grad)
    return [*totals, *query_grads]


@blocks_op.register_fake
def _(sources: list[Tensor], queries: list[Tensor], eps: float, scale: float, kernel: str) -> list[Tensor]:
    first, shape = sources[0], sources[0].shape
    dtype = promoted_dtype(sources)
    stats = compute_dtype(dtype)
    sizes = ((len(queries), *shape[:-1]), (len(queries), len(sources), *shape[:-1]), (len(sources), *shape[:-1]))
    means = [first.new_empty(shape, dtype=dtype) for _ in queries]
    return [*means, *(first.new_empty(size, dtype=stats) for size in sizes)]


@blocks_backward_op.register_fake
def _(
    grads: list[Tensor], grad_lse: Tensor | None, sources: list[Tensor], queries: list[Tensor], *rest: Any
) -> list[Tensor]:
    tensors = zip([*sources, *queries], rest[-1], strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, needed in tensors if needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    sources, queries, _, ctx.scale, ctx.kernel = inputs
    ctx.num_sources = len(sources)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*sources, *queries, *output[-NUM_SAVED:])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    *tensors, lse, scores, inv_rms = ctx.saved_tensors  # once: checkpointing gives them out once
    saved = (lse, scores, inv_rms)
    sources, queries = list(tensors[: ctx.num_sources]), list(tensors[ctx.num_sources :])
    needs = [*ctx.needs_input_grad[0], *ctx.needs_input_grad[1]]
    *means, grad_lse, _, _ = grads
    whole = [torch.zeros_like(sources[0]) if grad is None else grad for grad in means]
    computed = iter(blocks_backward_op(whole, grad_lse, sources, queries, *saved, ctx.scale, ctx.kernel, needs))
    found = [next(computed) if needed else None for needed in needs]
    return found[: len(sources)], found[len(sources) :], None, None, None


blocks_op.register_autograd(_backward, setup_context=_setup_context)


class _CollectingPass(torch.autograd.Function):
    """The operator for sources whose gradients are added up in place (see operator.py)."""

    @staticmethod
    def forward(ctx: Any, gradients: list[SourceGradient | None], num_sources: int, *rest: Any) -> tuple[Tensor, ...]:
        eps, ctx.scale, ctx.kernel, *tensors = rest
        sources, queries = list(tensors[:num_sources]), list(tensors[num_sources:])
        results = blocks_op(sources, queries, eps, ctx.scale, ctx.kernel)
        ctx.gradients, ctx.num_sources = gradients, num_sources
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results[-NUM_SAVED:])
        return tuple(results[: 1 - NUM_SAVED])  # scores and 1/rms are nobody else's

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_double_backward()
        *tensors, lse, scores, inv_rms = ctx.saved_tensors
        saved = (lse, scores, inv_rms)
        sources, queries = tensors[: ctx.num_sources], tensors[ctx.num_sources :]
        found = _gradients(
            grads[:-1], grads[-1], sources, queries, saved, ctx.scale, ctx.kernel, ctx.needs_input_grad[5:],
            ctx.gradients,
        )  # fmt: skip
        return None, None, None, None, None, *found


@register_flop_formula(torch.ops.attnres_vision.attend_blocks)
def _forward_flops(
    sources_shape: list[torch.Size], queries_shape: list[torch.Size], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return FORWARD_FLOPS * len(sources_shape) * len(queries_shape) * sources_shape[0].numel()


@register_flop_formula(torch.ops.attnres_vision.attend_blocks_backward)
def _backward_flops(
    grads_shape: Any, grad_lse_shape: Any, sources_shape: Any, queries_shape: Any, *args: Any, out_shape: Any = None,
    **kwargs: Any,
) -> int:  # fmt: skip
    return BACKWARD_FLOPS * len(sources_shape) * len(queries_shape) * sources_shape[0].numel()
