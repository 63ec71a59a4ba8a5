"""The Triton kernels with the interface of eager.py: `forward` and `gradients` of the custom operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_vision.ops import dispatch
from attnres_vision.ops.arguments import Inputs, Options, Saved
from attnres_vision.ops.collect import SourceGradient
from attnres_vision.ops.dtypes import promoted_dtype
from attnres_vision.ops.eager import Results, empty_results, query_gradients, token_query
from attnres_vision.ops.triton import tiles
from attnres_vision.ops.triton.backward import gradient_kernel
from attnres_vision.ops.triton.forward import read_kernel
from attnres_vision.ops.triton.layout import Rows, element_size, on_device, rows_of, strides

# Numbers of a row that a thread may hold at once, so that its 255 registers suffice (benchmarks/compile_targets.py):
# backward keeps dh, a source, up to three sums of such rows and what the norm needs, about nine rows in fp32. A source
# held between its two walks is one more: the compiler keeps it as fp32 too.
FORWARD_VALUES = 48
BACKWARD_VALUES = 24
LOW_VALUES = 16  # which leave room for more programs, where loads stay 16 bytes wide
BACKWARD_ROWS = 9
HELD_REGISTERS = 225
# Tokens that one program of a backward kernel walks over before it writes its partial sums: 4 bytes per column and
# group then stand against 4 n bytes per column and token.
GROUP_TOKENS = 32
MIN_PROGRAMS = 512  # or fewer tokens: a GPU has over a hundred multiprocessors, for several programs each


def forward(sources: Sequence[Tensor], inputs: Inputs, options: Options) -> Results:
    """(h or its norm, the sum that is the last source, weights, scores, 1/rms, mean, rstd)."""
    results = empty_results(sources, inputs, options)
    out, partial, weights, scores, inv_rms, mean, rstd = results
    if not out.numel():
        return results
    rows = rows_of(sources, token_query(inputs, torch.float32), inputs)
    tiling = tiles.tiling(rows.width, options.heads, element_size(rows), FORWARD_VALUES)
    add = None if inputs.add is None else rows.view(inputs.add)
    grid = (rows.samples * -(-rows.tokens // tiling.rows),)
    with on_device(out):
        read_kernel[grid](
            last=rows.last,
            last_strides=strides(rows.last),
            add=add,
            add_strides=(0, 0) if add is None else strides(add),
            partial=None if add is None else partial,
            mixed=_contiguous(inputs.mixed),
            lse=_contiguous(inputs.lse),
            query=rows.query,
            query_strides=strides(rows.query),
            out=out,
            weights=weights,
            scores=scores,
            inv_rms=inv_rms,
            norm_weight=_contiguous(inputs.norm_weight),
            norm_bias=_contiguous(inputs.norm_bias),
            norm_scale=_contiguous(inputs.norm_scale),
            norm_shift=_contiguous(inputs.norm_shift),
            mean=mean if options.norm == "layer" else None,
            rstd=rstd if options.norm else None,
            num_blocks=len(rows.blocks),
            num_tokens=rows.tokens,
            num_rows=rows.samples * rows.tokens,
            scale=options.scale,
            eps=options.eps,
            factor=options.factor,
            norm_eps=options.norm_eps,
            **rows.block_arguments(),
            HIDDEN=_hidden_type([*sources[:-1], sources[-1] if add is None else partial], inputs),
            **constants(rows, tiling, options.heads),
        )
    return results


def gradients(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    sources: Sequence[Tensor],
    inputs: Inputs,
    saved: Saved,
    options: Options,
    needs_grad: Sequence[bool],
    collected: Sequence[SourceGradient | None],
) -> list[Tensor | None]:
    """The gradients of (*sources, *inputs without add), None where there is none, or where `collected` took it."""
    grad_out, grad_partial, grad_weights = grads
    names = [name for name in Inputs._fields if name != "add"]
    needs = dict(zip(names, needs_grad[len(sources) :], strict=True))
    found: dict[str, Tensor | None] = dict.fromkeys(names)
    if not sources[0].numel():
        tensors = [*sources, *(getattr(inputs, name) for name in names)]
        return [torch.zeros_like(t) if n and t is not None else None for t, n in zip(tensors, needs_grad, strict=True)]
    query = token_query(inputs, torch.float32)
    rows = rows_of(sources, query, inputs)
    heads, width = options.heads, rows.width
    tiling, hold = backward_tiling(width, heads, element_size(rows), len(rows.blocks))
    per_token = query.dim() > 1 and query.shape == sources[0].shape
    steps = 1 if per_token and not options.norm else group_steps(rows, tiling)
    programs = rows.samples * -(-rows.tokens // (tiling.rows * steps))
    has_norm = bool(options.norm) and grad_out is not None
    if grad_out is None:  # only the weights or the sum have a gradient: rare, and not worth a case of its own
        grad_out = torch.zeros_like(sources[0], memory_format=torch.contiguous_format)

    targets, accumulate = gradient_targets(sources, needs_grad, collected)
    query_grad = scaled_sums = plain_sums = None
    if needs["query"] or needs["left"] or needs["right"]:
        stored = per_token and inputs.left is None  # as it is, not summed first
        query_grad = saved.weights.new_empty(
            sources[0].shape if per_token else (programs, width), dtype=query.dtype if stored else None
        )
    if has_norm and any(needs[name] for name in names if name.startswith("norm_")):
        scaled_sums = saved.weights.new_empty(programs, width)
        plain_sums = torch.empty_like(scaled_sums)
    mixed = _contiguous(inputs.mixed)
    found["mixed"] = None if mixed is None else torch.empty_like(mixed)
    found["lse"] = None if inputs.lse is None else torch.empty_like(inputs.lse, memory_format=torch.contiguous_format)
    with on_device(grad_out):
        gradient_kernel[(programs,)](
            last=rows.last,
            last_strides=strides(rows.last),
            last_grad=targets[-1],
            last_upstream=_contiguous(targets[-1] if collected[-1] is not None else grad_partial),
            mixed=mixed,
            lse=_contiguous(inputs.lse),
            mixed_grad=found["mixed"],
            lse_grad=found["lse"],
            query=rows.query,
            query_strides=strides(rows.query),
            query_grad=query_grad,
            grad_out=grad_out.contiguous(),
            grad_weights=_contiguous(grad_weights),
            weights=saved.weights,
            scores=saved.scores,
            inv_rms=saved.inv_rms,
            norm_weight=_contiguous(inputs.norm_weight),
            norm_scale=_contiguous(inputs.norm_scale),
            mean=saved.mean if has_norm and options.norm == "layer" else None,
            rstd=saved.rstd if has_norm else None,
            scaled_sums=scaled_sums,
            plain_sums=plain_sums,
            num_blocks=len(rows.blocks),
            num_tokens=rows.tokens,
            num_rows=rows.samples * rows.tokens,
            num_steps=steps,
            scale=options.scale,
            factor=options.factor,
            **rows.block_arguments(targets[:-1]),
            PER_TOKEN=per_token,
            ACCUMULATE=accumulate,
            HOLD=hold,
            HIDDEN=_hidden_type(sources, inputs),
            **constants(rows, tiling, heads),
        )
    if query_grad is not None and not per_token:
        per_sample = query.dim() == 2 and sources[0].dim() > 2
        query_grad = query_grad.view(rows.samples if per_sample else 1, -1, width).sum(1).view(query.shape)
    if query_grad is not None and inputs.left is None:
        query_grad = query_grad.to(query.dtype)
    found["query"], found["left"], found["right"] = query_gradients(inputs, query_grad)
    if scaled_sums is not None and plain_sums is not None:
        scaled, plain = (part.view(rows.samples, -1, width).sum(1) for part in (scaled_sums, plain_sums))
        found |= _norm_gradients(scaled, plain, inputs, needs)
    source_grads = [None if entry is not None else grad for grad, entry in zip(targets, collected, strict=True)]
    return [*source_grads, *found.values()]


def backward_tiling(width: int, heads: int, element_size: int, num_blocks: int) -> tuple[tiles.Tiling, bool]:
    """The tiling of `gradient_kernel`, and whether it holds all sources in registers between its walks."""
    attempts = [(LOW_VALUES, False)]
    if num_blocks <= tiles.UNROLLED:
        sources = tiles.bucket(max(1, num_blocks)) + 1
        attempts.insert(0, (min(HELD_REGISTERS // (BACKWARD_ROWS + sources), BACKWARD_VALUES), True))
    for values, hold in attempts:
        tiling = tiles.tiling(width, heads, element_size, values)
        padding = heads * tiling.tiles * tiling.tile / width
        if tiling.values <= values and tiling.load_bytes == 16 and padding < 1.34:
            return tiling, hold
    return tiles.tiling(width, heads, element_size, BACKWARD_VALUES), False


def group_steps(rows: Rows, tiling: tiles.Tiling) -> int:
    """How many row tiles a program of `gradient_kernel` walks over."""
    row_tiles = rows.samples * -(-rows.tokens // tiling.rows)
    return max(1, min(GROUP_TOKENS // tiling.rows, row_tiles // MIN_PROGRAMS))


def gradient_targets(
    sources: Sequence[Tensor],
    needs_grad: Sequence[bool],
    collected: Sequence[SourceGradient | None],
) -> tuple[list[Tensor | None], bool]:
    """Where the gradient of each source goes, and whether the blocks' gradients are added to what is there."""
    accumulate = any(entry is not None and entry.has_begun() for entry in collected[:-1])
    targets: list[Tensor | None] = []
    for index, (source, gradient) in enumerate(zip(sources, collected, strict=True)):
        if not needs_grad[index]:
            targets.append(None)
        elif gradient is not None:
            is_written = not accumulate and index < len(sources) - 1
            targets.append(gradient.accumulator(source, torch.empty_like if is_written else torch.zeros_like))
        elif accumulate and index < len(sources) - 1:  # one kernel adds to all blocks or to none
            targets.append(torch.zeros_like(source, memory_format=torch.contiguous_format))
        else:
            targets.append(torch.empty_like(source, memory_format=torch.contiguous_format))
    return targets, accumulate


def _norm_gradients(scaled: Tensor, plain: Tensor, inputs: Inputs, needs: dict[str, bool]) -> dict[str, Tensor | None]:
    """Gradients of the norm's parameters from sum(dy x) and sum(dy) over each sample (samples, D)."""
    weight, bias, scale, shift = inputs.norm_parameters
    found: dict[str, Tensor | None] = {}
    modulation = 1.0 if scale is None else 1 + scale.float()
    if needs["norm_weight"] and weight is not None:
        found["norm_weight"] = (scaled * modulation).sum(0).to(weight.dtype)
    if needs["norm_bias"] and bias is not None:
        found["norm_bias"] = (plain * modulation).sum(0).to(bias.dtype)
    if needs["norm_scale"] and scale is not None:
        scaled = scaled if weight is None else scaled * weight.float()
        found["norm_scale"] = (scaled if bias is None else scaled + plain * bias.float()).to(scale.dtype)
    if needs["norm_shift"] and shift is not None:
        found["norm_shift"] = plain.to(shift.dtype)
    return found


def _hidden_type(sources: Sequence[Tensor], inputs: Inputs) -> tl.dtype:
    """Triton's name of the dtype of h; `sources` ends with the sum, if there is one."""
    dtype = promoted_dtype(sources if inputs.mixed is None else [*sources, inputs.mixed])
    return getattr(tl, str(dtype).removeprefix("torch."))


def constants(rows: Rows, tiling: tiles.Tiling, heads: int) -> dict[str, Any]:
    """The constants that all kernels take."""
    return {
        "D": rows.width,
        "HEADS": heads,
        "TILE": tiling.tile,
        "TILES": tiling.tiles,
        "ROWS": tiling.rows,
        "num_warps": tiling.warps,
        **_all_registers(),
    }


def _all_registers() -> dict[str, int]:
    """An option of all kernels: else NVIDIA's assembler may spill a few bytes rather than give a thread all its 255.

    A fifth to a third fewer programs run at a time, still with more loads under way than the memory needs to be busy.
    """
    nvidia = not dispatch.INTERPRETING and triton.runtime.driver.active.get_current_target().backend == "cuda"
    return {"maxnreg": 255} if nvidia else {}


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
