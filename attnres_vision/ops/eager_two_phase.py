"""Phase one of two-phase reads in eager PyTorch, query by query, as ops/triton/launch_two_phase.py does it in Triton.

They are those of ops/two_phase.py: the pass, its means once more, its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_vision.ops import analytic
from attnres_vision.ops.analytic import read_backward, read_forward
from attnres_vision.ops.collect import SourceGradient


def forward(
    sources: Sequence[Tensor], queries: Sequence[Tensor], eps: float, scale: float, factor: float
) -> list[Tensor]:
    factors = [factor, *[1.0] * (len(queries) - 1)]
    reads = [read_forward(sources, query, eps, scale, f, 1) for query, f in zip(queries, factors, strict=True)]
    scores = torch.stack([scores.squeeze(-1) for _, _, scores, _ in reads])
    return [*(mean for mean, *_ in reads), scores.logsumexp(1), scores, reads[0][3]]


def mix(sources: Sequence[Tensor], lse: Tensor, scores: Tensor) -> list[Tensor]:
    weights = (scores - lse.unsqueeze(1)).exp().unsqueeze(-1)
    return [analytic.mix(sources, w, 1.0, s) for w, s in zip(weights, scores, strict=True)]


def gradients(
    grads: Sequence[Tensor], opening: Tensor | None, grad_lse: Tensor, sources: Sequence[Tensor],
    queries: Sequence[Tensor], saved: tuple[Tensor, Tensor, Tensor], scale: float, factor: float,
    needs_grad: Sequence[bool], collected: Sequence[SourceGradient | None],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of the sources and the queries; `opening` is the first result where that is among `grads`."""
    lse, scores, inv_rms = saved
    totals: list[Tensor | None] = [None] * len(sources)
    query_grads: list[Tensor | None] = []
    for m, (query, grad) in enumerate(zip(queries, grads, strict=True)):
        is_opening, average = False, -grad_lse[m]
        if m == 0 and opening is not None:
            is_opening, average = True, (opening.to(lse.dtype) * grad.to(lse.dtype)).sum(-1)
        weights = (scores[m] - lse[m]).exp().unsqueeze(-1)
        marks = [*needs_grad[: len(sources)], needs_grad[len(sources) + m]]
        *terms, query_grad, _, _ = read_backward(
            grad, None, sources, query, weights, scores[m].unsqueeze(-1), inv_rms, scale,
            factor if is_opening else 1.0, marks, collected, average=average,
        )  # fmt: skip
        for i, term in enumerate(terms):
            total = totals[i]
            totals[i] = term if total is None or term is None else total.add_(term)
        query_grads.append(query_grad)
    return [*totals, *query_grads]
