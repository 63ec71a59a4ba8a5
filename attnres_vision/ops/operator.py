"""The custom operator `attnres_vision::depth_attention`: schema, fakes, autograd and FLOPs of a read.

One operator computes a read and, on request, what stands beside it, so that neither has to be kept for backward: the
per-token query of a low-rank projection before it, the sum that makes the last source, and the norm that takes h.
Two implementations compute it: eager.py (any device) and triton/launch.py (GPUs).

No double backward: it raises (torch.func's transforms can be nested; they run decomposed.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnres_vision.ops import eager
from attnres_vision.ops.arguments import BACKWARD_FLOPS, FORWARD_FLOPS, Inputs, Options, Saved
from attnres_vision.ops.collect import SourceGradient, gradients_of, refuse_double_backward
from attnres_vision.ops.read import Read
from attnres_vision.ops.two_phase import Earlier

NUM_SMALL = len(Inputs._fields)
NUM_OPTIONS = len(Options._fields)


def depth_attention(sources: Sequence[Tensor], query: Tensor, **options: Any) -> Any:
    """`attend` of `Read(sources, query, **options)`."""
    return attend(Read(sources, query, **options))


def attend(read: Read) -> Any:
    """What a read returns, by the kernel that it names."""
    sources, earlier, add, norm = read.sources, read.earlier, read.add, read.norm
    left, right = read.low_rank or (None, None)
    mixed, lse = (None, None) if earlier is None else (earlier.mean(), earlier.lse)
    fused = norm if norm is not None and (read.kernel == "triton" or eager.can_fuse(sources, add, norm)) else None
    parameters = () if fused is None else (fused.weight, fused.bias, fused.scale, fused.shift)
    inputs = Inputs(read.query, left, right, add, mixed, lse, *parameters)
    kind, norm_eps = ("", 0.0) if fused is None else (fused.kind, fused.eps)
    options = Options(
        read.kernel, kind, norm_eps, read.eps, read.scale, read.factor, read.heads, read.fp32_sum, read.fp32_norm
    )
    # A compiler sees the operator alone: autograd then adds its gradients to what other readers have collected
    collecting = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    gradients = gradients_of(sources) if collecting else []
    if add is not None and gradients:
        gradients[-1] = None  # the last source is the sum then
    if any(gradient is not None for gradient in gradients) or (earlier is not None and gradients):
        out, partial, weights = _CollectingRead.apply(gradients, earlier, options, *inputs, *sources)
    else:
        out, partial, weights, *_ = forward_op(list(sources), *inputs, *options)
    read = read if fused is None else dataclasses.replace(read, norm=None)
    return read.results(out, partial, weights)


def _implementation(kernel: str) -> Any:
    if kernel == "eager":
        return eager
    from attnres_vision.ops.triton import launch  # imports Triton

    return launch


@torch.library.custom_op("attnres_vision::depth_attention", mutates_args=())
def forward_op(
    sources: list[Tensor],
    query: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    add: Tensor | None,
    mixed: Tensor | None,
    lse: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm_scale: Tensor | None,
    norm_shift: Tensor | None,
    kernel: str,
    norm: str,
    norm_eps: float,
    eps: float,
    scale: float,
    factor: float,
    heads: int,
    fp32_sum: bool,
    fp32_norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(h or its norm, sum that is the last source, weights, scores, 1/rms, mean, rstd); empty where there is none."""
    inputs = Inputs(query, left, right, add, mixed, lse, norm_weight, norm_bias, norm_scale, norm_shift)
    options = Options(kernel, norm, norm_eps, eps, scale, factor, heads, fp32_sum, fp32_norm)
    return _implementation(kernel).forward(sources, inputs, options)


@torch.library.custom_op("attnres_vision::depth_attention_backward", mutates_args=())
def backward_op(
    grad_out: Tensor | None,
    grad_partial: Tensor | None,
    grad_weights: Tensor | None,
    sources: list[Tensor],
    query: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    mixed: Tensor | None,
    lse: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm_scale: Tensor | None,
    norm_shift: Tensor | None,
    weights: Tensor,
    scores: Tensor,
    inv_rms: Tensor,
    mean: Tensor,
    rstd: Tensor,
    kernel: str,
    norm: str,
    norm_eps: float,
    eps: float,
    scale: float,
    factor: float,
    heads: int,
    fp32_sum: bool,
    fp32_norm: bool,
    needs_grad: list[bool],
) -> list[Tensor]:
    """Gradients of (*sources, *Inputs without add), those that `needs_grad` marks; `sources` ends with the sum."""
    inputs = Inputs(query, left, right, None, mixed, lse, norm_weight, norm_bias, norm_scale, norm_shift)
    grads = _implementation(kernel).gradients(
        (grad_out, grad_partial, grad_weights),
        sources,
        inputs,
        Saved(weights, scores, inv_rms, mean, rstd),
        Options(kernel, norm, norm_eps, eps, scale, factor, heads, fp32_sum, fp32_norm),
        needs_grad,
        [None] * len(sources),
    )
    return [grad for grad, needed in zip(grads, needs_grad, strict=True) if needed and grad is not None]


@forward_op.register_fake
def _(sources: list[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    inputs, options = Inputs(*rest[:NUM_SMALL]), Options(*rest[NUM_SMALL:])
    return eager.empty_results(sources, inputs, options)


@backward_op.register_fake
def _(
    grad_out: Tensor | None,
    grad_partial: Tensor | None,
    grad_weights: Tensor | None,
    sources: list[Tensor],
    *rest: Any,
) -> list[Tensor]:
    small, needs_grad = rest[: NUM_SMALL - 1], rest[-1]
    return [
        tensor.new_empty(tensor.shape)
        for tensor, needed in zip([*sources, *small], needs_grad, strict=True)
        if needed and tensor is not None
    ]


def _kept(sources: Sequence[Tensor], inputs: Inputs, partial: Tensor) -> tuple[Sequence[Tensor], Inputs]:
    """What backward takes instead of the forward pass's inputs: the sum as last source."""
    if inputs.add is not None:
        return [*sources[:-1], partial], inputs._replace(add=None)
    return sources, inputs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, small, ctx.options = inputs[0], Inputs(*inputs[1 : 1 + NUM_SMALL]), Options(*inputs[1 + NUM_SMALL :])
    _, partial, weights, *saved = output
    ctx.add_dtype = None if small.add is None else small.add.dtype
    ctx.last_dtype = sources[-1].dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved, *([partial] if small.add is None else []))
    sources, small = _kept(sources, small, partial)
    ctx.save_for_backward(*sources, *small, weights, *saved)


def _split(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Inputs, Saved]:
    num_saved = len(Saved._fields)
    sources = tensors[: -NUM_SMALL - num_saved]
    return sources, Inputs(*tensors[len(sources) : -num_saved]), Saved(*tensors[-num_saved:])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    sources, inputs, saved = _split(ctx.saved_tensors)
    source_marks, *marks = ctx.needs_input_grad[: 1 + NUM_SMALL]
    found: list[Tensor | None] = [None] * (len(sources) + NUM_SMALL)
    grads = (grads[0], None if ctx.add_dtype is None else grads[1], grads[2])
    if any(grad is not None for grad in grads):
        needs = _needs(list(source_marks), marks, grads[0])
        small = [value for name, value in inputs._asdict().items() if name != "add"]
        computed = iter(backward_op(*grads, sources, *small, *saved, *ctx.options, needs))
        found = _with_add([next(computed) if needed else None for needed in needs], len(sources), ctx)
    return (found[: len(sources)], *found[len(sources) :], *[None] * NUM_OPTIONS)


def _needs(source_marks: list[bool], marks: Sequence[bool], grad_out: Tensor | None) -> list[bool]:
    """What to compute, without an entry for `add`, whose gradient is that of the last source."""
    named = dict(zip(Inputs._fields, marks, strict=True))
    source_marks[-1] |= named.pop("add")
    if grad_out is None:  # the norm has no part in a gradient of the weights
        named |= {name: False for name in named if name.startswith("norm_")}
    return [*source_marks, *named.values()]


def _with_add(grads: list[Tensor | None], num_sources: int, ctx: Any) -> list[Tensor | None]:
    """The gradients with one for `add`."""
    last = grads[num_sources - 1]
    add = None
    if ctx.add_dtype is not None and last is not None:
        add = last.to(ctx.add_dtype)
        grads[num_sources - 1] = add if ctx.last_dtype == ctx.add_dtype else last.to(ctx.last_dtype)
    place = num_sources + Inputs._fields.index("add")
    return [*grads[:place], add, *grads[place:]]


forward_op.register_autograd(_backward, setup_context=_setup_context)


class _CollectingRead(torch.autograd.Function):
    """The operator for sources whose gradients are added up in place, which no operator's schema can say.

    And for reads that continue an earlier one: what they continue is not kept for backward, but mixed again.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: list[SourceGradient | None], earlier: Earlier | None, options: Options, *tensors: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs, sources = Inputs(*tensors[:NUM_SMALL]), list(tensors[NUM_SMALL:])
        out, partial, weights, *saved = forward_op(sources, *inputs, *options)
        ctx.gradients, ctx.options = gradients, options
        ctx.earlier = None if earlier is None else (earlier.group.exchange, earlier.index)
        ctx.add_dtype = None if inputs.add is None else inputs.add.dtype
        ctx.last_dtype = sources[-1].dtype
        ctx.set_materialize_grads(False)
        kept, inputs = _kept(sources, inputs, partial)
        phase_one = () if earlier is None else earlier.group.kept
        ctx.num_phase_one = len(phase_one)
        ctx.save_for_backward(*phase_one, *kept, *inputs._replace(mixed=None), weights, *saved)
        return out, partial, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        grads = (grads[0], None if ctx.add_dtype is None else grads[1], grads[2])
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors
        sources, inputs, saved = _split(tensors[ctx.num_phase_one :])
        if ctx.earlier is not None:
            exchange, index = ctx.earlier
            inputs = inputs._replace(mixed=exchange.mean(index, tensors[: ctx.num_phase_one], ctx.options.kernel))
        marks, source_marks = ctx.needs_input_grad[3 : 3 + NUM_SMALL], list(ctx.needs_input_grad[3 + NUM_SMALL :])
        needs = _needs(source_marks, marks, grads[0])
        implementation = _implementation(ctx.options.kernel)
        found = _with_add(
            implementation.gradients(grads, sources, inputs, saved, ctx.options, needs, ctx.gradients),
            len(sources),
            ctx,
        )
        small = Inputs(*found[len(sources) :])  # type: ignore[arg-type]
        if ctx.earlier is not None and small.mixed is not None and marks[Inputs._fields.index("lse")]:
            exchange.add(index, small.mixed)
        return None, None, None, *small._replace(mixed=None), *found[: len(sources)]


@register_flop_formula(torch.ops.attnres_vision.depth_attention)
def _forward_flops(
    sources_shape: list[torch.Size],
    query_shape: torch.Size,
    left_shape: torch.Size | None,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    elements = sources_shape[0].numel()
    rank = 0 if left_shape is None else left_shape[-1]
    return FORWARD_FLOPS * len(sources_shape) * elements + 2 * rank * elements


@register_flop_formula(torch.ops.attnres_vision.depth_attention_backward)
def _backward_flops(
    grad_out_shape: Any,
    grad_partial_shape: Any,
    grad_weights_shape: Any,
    sources_shape: list[torch.Size],
    query_shape: torch.Size,
    left_shape: torch.Size | None,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    elements = sources_shape[0].numel()
    rank = 0 if left_shape is None else left_shape[-1]
    return BACKWARD_FLOPS * len(sources_shape) * elements + 4 * rank * elements
