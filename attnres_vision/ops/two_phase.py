"""Two-phase reads: the sources there are once for the queries of a group of readers, then a merge for each later one.

    first, (second, third) = attend_blocks(blocks, [q1, q2, q3], eps=..., scale=..., form=..., kernel=...)
    h = operator.depth_attention([*newer_blocks, partial], q2, earlier=second, ...)

Phase one gives the first query's read, and for each other query a weighted mean of the blocks and the log-sum-exp of
its scores. In PyTorch and in Triton; depth heads are not supported.

A mean lives until its reader has run: backward mixes those of a group again, in one pass, when the first of its readers
needs one. What autograd sees of a merge is the log-sum-exp alone; the gradient of the mean goes to phase one past it
(`Exchange`). That of lse is for a fixed U = e^lse mean, the sum before the softmax divides: then phase one needs the
mean no more, ds_i = a_i (dmean . v_i + dlse), and one walk over the blocks is enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnres_vision.ops import eager_two_phase
from attnres_vision.ops.arguments import FORWARD_FLOPS
from attnres_vision.ops.collect import OfPass, SourceGradient, gradients_of, refuse_double_backward
from attnres_vision.ops.dtypes import compute_dtype, promoted_dtype


@dataclasses.dataclass
class _Handed:
    means: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    grads: dict[int, Tensor] = dataclasses.field(default_factory=dict)


class Exchange:
    """What the nodes of a group hand on in a backward pass: the means, and the means' gradients for phase one."""

    def __init__(self) -> None:
        self._handed = OfPass(_Handed)

    def mean(self, index: int, kept: Sequence[Tensor], kernel: str, keep: bool = False) -> Tensor:
        """The mean of a reader; those of the readers before it, whose backward comes next, are mixed with it.

        Args:
            kept: `Group.kept`, as saved for backward.
            keep: there will be another use, in the backward pass of what is recomputed now.
        """
        means = self._handed.get().means
        if index not in means:
            means.update(enumerate(mix(kept, kernel, 1, index + 1), start=1))
        return means[index] if keep else means.pop(index)

    def add(self, index: int, grad: Tensor) -> None:
        """Add to the gradient of a reader's mean."""
        grads = self._handed.get().grads
        grads[index] = grad if index not in grads else grads[index] + grad

    def take(self) -> dict[int, Tensor]:
        """The gradients of the means, by reader. Nothing stays."""
        handed = self._handed.take()
        return {} if handed is None else handed.grads


class Group:
    """A pass over the blocks, as its readers see it in the forward pass.

    Attributes:
        means: of the readers that have still to run.
        kept: what the means can be mixed again from: the blocks, (M, ...) log-sum-exp, (M, n, ...) scores.
    """

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.exchange = Exchange()
        self.means: dict[int, Tensor] = {}
        self.kept: tuple[Tensor, ...] = ()


@dataclasses.dataclass(eq=False)
class Earlier:
    """What a reader of a group continues: (...) log-sum-exp of its scores of the group's blocks, and their mean."""

    lse: Tensor
    group: Group
    index: int

    @property
    def count(self) -> int:
        """How many blocks."""
        return len(self.group.kept) - 2

    @property
    def dtype(self) -> torch.dtype:
        """That of the mean."""
        return promoted_dtype(self.group.kept[:-2])

    def mean(self) -> Tensor:
        """(..., D), without an edge to the graph. Asked for a second time (checkpointing) it is mixed again."""
        group, index = self.group, self.index
        if index in group.means:
            return group.means.pop(index)
        if torch._C._current_graph_task_id() != -1:
            return group.exchange.mean(index, group.kept, group.kernel, keep=True)
        return mix(group.kept, group.kernel, index, index + 1)[0]


def attend_blocks(
    sources: Sequence[Tensor], queries: Sequence[Tensor], *, eps: float, scale: float, form: str, kernel: str
) -> tuple[Tensor, list[Earlier]]:
    """What the first query reads of the sources, and what the readers with the other queries continue.

    Args:
        sources: the blocks, each (..., D).
        queries: one per reader, all of one kind: (D,), (B, D) or the shape of a source.
        eps, scale, form, kernel: as in operator.depth_attention.
    """
    group, factor = Group(kernel), float(len(sources)) if form == "sum" else 1.0
    if torch.is_grad_enabled():
        first, *lse = _Pass.apply(group, gradients_of(sources), eps, scale, factor, *sources, *queries)
    else:
        first, lse, _ = _attend(group, sources, queries, eps, scale, factor)
    return first, [Earlier(sums, group, index) for index, sums in enumerate(lse, start=1)]


def _attend(
    group: Group, sources: Sequence[Tensor], queries: Sequence[Tensor], eps: float, scale: float, factor: float
) -> tuple[Tensor, Sequence[Tensor], Tensor]:
    """(the first query's read, log-sum-exp of each other one, 1/rms), and the rest to `group`."""
    first, *means, lse, scores, inv_rms = blocks_op(list(sources), list(queries), eps, scale, factor, group.kernel)
    group.means, group.kept = dict(enumerate(means, start=1)), (*sources, lse, scores)
    return first, lse.unbind(0)[1:], inv_rms


@torch.no_grad()
def mix(kept: Sequence[Tensor], kernel: str, start: int, stop: int) -> list[Tensor]:
    """The means of the readers `start ... stop - 1`."""
    *sources, lse, scores = kept
    return _implementation(kernel).mix(sources, lse[start:stop], scores[start:stop])


@torch.library.custom_op("attnres_vision::attend_blocks", mutates_args=())
def blocks_op(
    sources: list[Tensor], queries: list[Tensor], eps: float, scale: float, factor: float, kernel: str
) -> list[Tensor]:
    """[mean for each query, log-sum-exp, scores, 1/rms]: (..., D) each, (M, ...), (M, n, ...), (n, ...).

    The first mean is multiplied by `factor`.
    """
    return _implementation(kernel).forward(sources, queries, eps, scale, factor)


@blocks_op.register_fake
def _(
    sources: list[Tensor], queries: list[Tensor], eps: float, scale: float, factor: float, kernel: str
) -> list[Tensor]:
    first, shape = sources[0], sources[0].shape
    dtype = promoted_dtype(sources)
    stats = compute_dtype(dtype)
    sizes = ((len(queries), *shape[:-1]), (len(queries), len(sources), *shape[:-1]), (len(sources), *shape[:-1]))
    means = [first.new_empty(shape, dtype=dtype) for _ in queries]
    return [*means, *(first.new_empty(size, dtype=stats) for size in sizes)]


class _Pass(torch.autograd.Function):
    """Phase one. Its backward runs after those of all readers of the group that take part: they have its edges."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, gradients: list[SourceGradient | None], eps: float, scale: float, factor: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        sources, queries = tensors[: len(gradients)], tensors[len(gradients) :]
        first, lse, inv_rms = _attend(group, sources, queries, eps, scale, factor)
        ctx.exchange, ctx.gradients, ctx.options = group.exchange, gradients, (group.kernel, scale, factor)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, first, *group.kept[len(sources) :], inv_rms)
        return first, *lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_double_backward()
        *tensors, first, lse, scores, inv_rms = ctx.saved_tensors
        num_sources, (kernel, scale, factor) = len(ctx.gradients), ctx.options
        sources, queries, needs = tensors[:num_sources], tensors[num_sources:], ctx.needs_input_grad[5:]
        upstream = ctx.exchange.take()
        if grads[0] is not None:
            upstream[0] = grads[0]
        readers = sorted(upstream)
        found: list[Tensor | None] = [None] * len(tensors)
        if readers:
            saved = (lse, scores)
            if len(readers) < len(queries):  # an index that is a list would make the GPU wait for the CPU
                saved = (torch.stack([lse[m] for m in readers]), torch.stack([scores[m] for m in readers]))
            marks = [*needs[:num_sources], *(needs[num_sources + m] for m in readers)]
            grad_lse = torch.stack([lse[0] if m == 0 else grads[m] for m in readers])  # the first one is not used
            results = _implementation(kernel).gradients(
                [upstream[m] for m in readers], first if readers[0] == 0 else None, grad_lse, sources,
                [queries[m] for m in readers], (*saved, inv_rms), scale, factor, marks, ctx.gradients,
            )  # fmt: skip
            found[:num_sources] = results[:num_sources]
            for m, grad in zip(readers, results[num_sources:], strict=True):
                found[num_sources + m] = grad
        return (*[None] * 5, *found)


def _implementation(kernel: str) -> Any:
    if kernel == "triton":
        from attnres_vision.ops.triton import launch_two_phase  # imports Triton

        return launch_two_phase
    return eager_two_phase


@register_flop_formula(torch.ops.attnres_vision.attend_blocks)
def _forward_flops(
    sources_shape: list[torch.Size], queries_shape: list[torch.Size], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return FORWARD_FLOPS * len(sources_shape) * len(queries_shape) * sources_shape[0].numel()
