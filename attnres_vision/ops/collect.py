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

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from attnres_vision.ops import dispatch
from attnres_vision.ops.dtypes import compute_dtype, no_autocast

T = TypeVar("T")


class OfPass(Generic[T]):
    """What nodes of a graph hand on in a backward pass. Each pass has its own: one may run inside another, in a hook.

    It goes when the pass has ended; that of a pass that failed goes with the graph.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._states: dict[int, T] = {}

    def get(self) -> T:
        """That of the running pass, made anew for its first node."""
        task = torch._C._current_graph_task_id()
        if task not in self._states:
            self._states[task] = self._make()
            if task != -1:
                torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end, task))
        return self._states[task]

    def _end(self, task: int) -> None:
        self._states.pop(task, None)

    def take(self) -> T | None:
        """That of the running pass, and nothing stays; None if no node has made one."""
        return self._states.pop(torch._C._current_graph_task_id(), None)


@dataclasses.dataclass
class _Sum:
    """What readers have added now, and the factors of what is added in the end."""

    direct: Tensor | None = None
    norm: Tensor | None = None
    query_terms: list[Tensor] = dataclasses.field(default_factory=list)
    queries: list[Tensor] = dataclasses.field(default_factory=list)


class SourceGradient:
    """The sum of what the readers of one source have contributed in the running backward pass."""

    def __init__(self) -> None:
        self._sums = OfPass(_Sum)

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy of a collected tensor is no identity node: it would never take what is added here

    def add(self, upstream: Tensor, upstream_term: Tensor, norm_term: Tensor) -> Tensor:
        """Add `upstream * upstream_term` now and `norm_term` times the source later. Returns the sum, to add more to.

        Args:
            upstream: gradient of the read, (B, T, D), or (B, T, heads, D / heads).
            upstream_term: its factor for every token and head, one dimension of size 1 at the end.
            norm_term: (B, T, 1) factor of the source itself.
        """
        found = self._sums.get()
        if found.direct is None:
            # The product would take on the strides of a transposed gradient, and `take` needs rows
            found.direct = (upstream * upstream_term).contiguous()
        else:
            found.direct.view(upstream.shape).addcmul_(upstream, upstream_term)
        found.norm = norm_term.clone() if found.norm is None else found.norm.add_(norm_term)
        return found.direct.view(upstream.shape)

    def accumulator(self, source: Tensor, make: Callable[..., Tensor] = torch.zeros_like) -> Tensor:
        """The sum itself, contiguous and in fp32, for a kernel that adds the whole of its term to it.

        `make` makes a new one: `torch.empty_like` if the kernel writes to it where `has_begun` says no.
        """
        found = self._sums.get()
        if found.direct is None:
            dtype = compute_dtype(source.dtype)
            found.direct = make(source, dtype=dtype, memory_format=torch.contiguous_format)
        return found.direct

    def has_begun(self) -> bool:
        """Whether a reader has contributed in the running backward pass."""
        return self._sums.get().direct is not None

    def add_query(self, query_term: Tensor, query: Tensor) -> None:
        """Add `query_term @ query` later: (B, T, 1) factors of a query (1 or B, 1, D)."""
        found = self._sums.get()
        found.query_terms.append(query_term)
        # A view of a parameter, which an optimiser that steps as soon as there is a gradient has changed by then
        found.queries.append(query.clone())

    def take(self, source: Tensor) -> Tensor | None:
        """The gradient, in the shape and dtype of the source; None if no reader has run in this backward pass."""
        found = self._sums.take()
        if found is None or found.direct is None:
            return None
        total, norm, queries = found.direct, found.norm, found.queries
        if norm is not None:
            total = total.view(*norm.shape[:-1], source.shape[-1])
            total.addcmul_(source.reshape(total.shape).to(total.dtype), norm)
        if queries:
            # Readers need not agree: one query for all samples or one for each, fp32 or with an fp64 source fp64
            samples = max(query.shape[0] for query in queries)
            terms = torch.cat(found.query_terms, -1).to(total.dtype)
            rows = torch.cat([query.expand(samples, -1, -1) for query in queries], 1).to(total.dtype)
            if samples == 1:
                total.view(-1, total.shape[-1]).addmm_(terms.flatten(0, 1), rows[0])
            else:
                total.view(*terms.shape[:-1], total.shape[-1]).baddbmm_(terms, rows)
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
    if not source.requires_grad or not torch.is_grad_enabled() or dispatch.is_traced():
        return source
    gradient = SourceGradient()
    collected = _Collect.apply(source, gradient)
    collected.source_gradient = gradient
    return collected


def gradients_of(sources: Sequence[Tensor]) -> list[SourceGradient | None]:
    """Where a reader adds the gradients of its sources; None for a tensor that did not come from `collect`.

    And None for one that was in the list before: one kernel cannot write to one place twice, so autograd adds these.
    """
    found: list[SourceGradient | None] = []
    for source in sources:
        gradient = getattr(source, "source_gradient", None)
        found.append(None if gradient in found else gradient)
    return found


def refuse_double_backward() -> None:
    """Raise in a backward pass that is to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "AttnRes models have no double backward (create_graph=True): for gradients of gradients use "
            "torch.func.grad(torch.func.grad(...)), with torch.func.functional_call"
        )
