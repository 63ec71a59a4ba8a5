"""Source gradients that the readers of a source add up in place.

A finished block is read by every layer behind it. Left to autograd, each of these reads writes a gradient of the whole
source and autograd adds them up. Here the source enters the stream through an identity node with a `SourceGradient`;
a reader's backward adds its term `f a_i dh` there, in place and in fp32, and leaves per-token factors of the two terms
that can wait (the query's and the key norm's), which are applied once per source when the identity node runs. (A GPU
kernel has all three terms at hand and adds them at once.) Autograd runs that node after all readers, whatever the
graph, since every reader still has its edge to it.

What autograd sees is the same gradient. Only a hook or `retain_grad` on the collected tensor itself would see less: put
it on the tensor before `collect`. And one graph (`retain_graph=True`) must not be walked by two threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnres_vision.ops import decomposed
from attnres_vision.ops.reference import compute_dtype, no_autocast


class SourceGradient:
    """The sum of what the readers of one source have contributed in the running backward pass."""

    def __init__(self) -> None:
        self._task = -1
        self._clear()

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy of a collected tensor is no identity node: it would never take what is added here

    def _clear(self) -> None:
        self._direct: Tensor | None = None
        self._norm: Tensor | None = None
        self._query_terms: list[Tensor] = []
        self._queries: list[Tensor] = []

    def add(self, upstream: Tensor, upstream_term: Tensor, norm_term: Tensor) -> Tensor:
        """Add `upstream * upstream_term` now and `norm_term` times the source later. Returns the sum, to add more to.

        Args:
            upstream: gradient of the read, (B, T, D), or (B, T, heads, D / heads).
            upstream_term: its factor for every token and head, one dimension of size 1 at the end.
            norm_term: (B, T, 1) factor of the source itself.
        """
        self._begin()
        if self._direct is None:
            # The product would take on the strides of a transposed gradient, and `take` needs rows
            self._direct = (upstream * upstream_term).contiguous()
        else:
            self._direct.view(upstream.shape).addcmul_(upstream, upstream_term)
        self._norm = norm_term.clone() if self._norm is None else self._norm.add_(norm_term)
        return self._direct.view(upstream.shape)

    def accumulator(self, source: Tensor, make: Callable[..., Tensor] = torch.zeros_like) -> Tensor:
        """The sum itself, contiguous and in fp32, for a kernel that adds the whole of its term to it.

        `make` makes a new one: `torch.empty_like` if the kernel writes to it where `has_begun` says no.
        """
        self._begin()
        if self._direct is None:
            dtype = compute_dtype(source.dtype)
            self._direct = make(source, dtype=dtype, memory_format=torch.contiguous_format)
        return self._direct

    def has_begun(self) -> bool:
        """Whether a reader has contributed in the running backward pass."""
        self._begin()
        return self._direct is not None

    def _begin(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:  # what a backward pass for other inputs, or one that failed, has left behind
            self._clear()
            self._task = task

    def add_query(self, query_term: Tensor, query: Tensor) -> None:
        """Add `query_term @ query` later: (B, T, 1) factors of a query (1 or B, 1, D)."""
        self._query_terms.append(query_term)
        self._queries.append(query)

    def take(self, source: Tensor) -> Tensor | None:
        """The gradient, in the shape and dtype of the source; None if no reader has run in this backward pass."""
        norm, total = self._norm, self._direct
        if total is None or self._task != torch._C._current_graph_task_id():
            return None
        if norm is not None:
            total = total.view(*norm.shape[:-1], source.shape[-1])
            total.addcmul_(source.reshape(total.shape).to(total.dtype), norm)
        if self._queries:
            terms, queries = torch.cat(self._query_terms, -1), torch.cat(self._queries, 1)
            if queries.shape[0] == 1:
                total.view(-1, total.shape[-1]).addmm_(terms.flatten(0, 1), queries[0])
            else:
                total.baddbmm_(terms, queries)
        self._clear()
        return total.view(source.shape).to(source.dtype)


def _nothing() -> None:
    return None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, gradient: SourceGradient) -> Tensor:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(source)
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (source,) = ctx.saved_tensors
        (grad,) = grads
        with no_autocast(source.device.type):
            total = ctx.gradient.take(source)
        if total is not None:
            grad = total if grad is None else total.add_(grad)
        return grad, None


def collect(source: Tensor) -> Tensor:
    """The source, set up to collect what its readers add to its gradient; as it is where autograd is not in use."""
    if not source.requires_grad or not torch.is_grad_enabled() or decomposed.is_needed():
        return source
    gradient = SourceGradient()
    collected = _Collect.apply(source, gradient)
    collected.source_gradient = gradient
    return collected


def gradient_of(source: Tensor) -> SourceGradient | None:
    """Where readers add up the gradient of a source; None for a tensor that did not come from `collect`."""
    return getattr(source, "source_gradient", None)
