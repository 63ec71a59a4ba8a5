"""How many bytes depth attention moves, per read and per training step, counted from what the kernels access.

    python benchmarks/traffic.py                    # CPU, Triton's interpreter; some 8 minutes
    python benchmarks/traffic.py --smoke

Kernels and torch's ops run on one and on two tokens of the real width and depth (access.py counts). What a token adds
is the traffic per token; what a program adds (its partial sums, written once and read once by their reduction) is
divided by the tokens of a program; what a launch adds (a shared query, a norm's parameters) is left out. The unit is S,
the bytes of one source: tokens * D * 2 in bf16.

*first touch*: every byte once per launch, which is what leaves the GPU's memory if whatever a kernel reads twice is
still in the L2 cache. *requested*: all loads and stores. "waiting" says how much the running programs want to find
again: above the 50 MB of an H100's L2 cache, expect the requested bytes. *minimum*: every source once and every
gradient once per read. Peers' rows are formulas from their sources (shared/field/kernels.md, section 5), not counts.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports the kernels

import argparse
import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from access import Access, Recorder
from timm.layers import LayerNorm
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from traffic_formulas import ONE_PASS, one_pass, two_phase_step

import attnres_vision
from attnres_vision import ops
from attnres_vision.ops import operator, two_phase
from attnres_vision.ops.collect import collect
from attnres_vision.ops.triton import launch

DTYPE = torch.bfloat16
PARTIAL_SUMS = ("query_grad", "query_grads", "scaled_sums", "plain_sums")
READERS = 6  # of a group
FORWARD_KERNELS = ("read_kernel", "attend_blocks_kernel")
SMS, REGISTERS = 132, 65536  # of an H100, and per SM
BANDWIDTH = 3.35e12  # bytes per second of an H100's memory, as in its data sheet
PHASES = {"one-phase": False, "two-phase": True}


@dataclasses.dataclass
class Traffic:
    """Bytes per token: loads and stores of kernels, forward and backward, and of torch's ops."""

    forward: Access = dataclasses.field(default_factory=Access)
    backward: Access = dataclasses.field(default_factory=Access)
    torch: Access = dataclasses.field(default_factory=Access)
    arguments: dict[str, Access] = dataclasses.field(default_factory=dict)
    kernels: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    launches: int = 0
    atomics: int = 0

    def first(self) -> float:
        return sum(part.first_loaded + part.first_stored for part in (self.forward, self.backward, self.torch))

    def requested(self) -> float:
        return sum(part.loaded + part.stored for part in (self.forward, self.backward, self.torch))


def count(run: Callable[[int, Recorder], None]) -> Traffic:
    """Traffic per token of `run(tokens, recorder)`."""
    one, two = _record(run, 1), _record(run, 2)
    kernels = collections.Counter(entry.kernel for entry in one.launches)
    result = Traffic(
        kernels=kernels,
        launches=len(one.launches),
        atomics=sum(entry.atomics for entry in (*one.launches, *two.launches)),
    )
    if [entry.kernel for entry in one.launches] != [entry.kernel for entry in two.launches]:
        raise RuntimeError("one and two tokens launch different kernels: their difference is not the traffic of one")
    for before, after in zip(one.launches, two.launches, strict=True):
        part = result.forward if before.kernel in FORWARD_KERNELS else result.backward
        for name, entry in after.arguments.items():
            for field in dataclasses.fields(Access):
                single = getattr(before.arguments.get(name, Access()), field.name)
                per_token = getattr(entry, field.name) - single
                if name in PARTIAL_SUMS and field.name.endswith("stored"):
                    per_program = 2 * (single - per_token) / launch.GROUP_TOKENS
                    per_token += per_program
                _add(part, field.name, per_token)
                _add(result.arguments.setdefault(f"{before.kernel}.{name}", Access()), field.name, per_token)
    for name, entry in two.ops.items():
        for field in dataclasses.fields(Access):
            _add(
                result.torch, field.name, getattr(entry, field.name) - getattr(one.ops.get(name, Access()), field.name)
            )
    return result


def _record(run: Callable[[int, Recorder], None], tokens: int) -> Recorder:
    torch.manual_seed(0)
    recorder = Recorder()
    before, launch.MIN_PROGRAMS = launch.MIN_PROGRAMS, 1  # as where there are many tokens
    try:
        with ops.backend("triton"), recorder.recording():
            run(tokens, recorder)
    finally:
        launch.MIN_PROGRAMS = before
    return recorder


def require(label: str, **facts: tuple[Any, Any]) -> None:
    """Raise where what was counted is not what its row names: pairs of what was found and what belongs there."""
    wrong = [f"{name} is {found}, not {expected}" for name, (found, expected) in facts.items() if found != expected]
    if wrong:
        raise RuntimeError(f"{label!r} is not what was counted: {'; '.join(wrong)}")


def _add(entry: Access, name: str, value: float) -> None:
    setattr(entry, name, getattr(entry, name) + value)


# One read ------------------------------------------------------------------------------------------------------------


def read(num_sources: int, width: int, norm: bool) -> Traffic:
    """One read and its backward."""

    def run(tokens: int, recorder: Recorder) -> None:
        with recorder.paused():
            sources = [torch.randn(1, tokens, width, dtype=DTYPE, requires_grad=True) for _ in range(num_sources)]
            query = torch.randn(width, dtype=DTYPE, requires_grad=True)
            weight = torch.ones(width, dtype=DTYPE, requires_grad=True)
            upstream = torch.randn(1, tokens, width, dtype=DTYPE)
            parameters = ops.Norm("layer", 1e-6, weight, weight) if norm else None
            out = operator.depth_attention(sources, query, norm=parameters, kernel="triton")
            torch.autograd.grad(out, [*sources, query], upstream)

    return count(run)


def two_reads(num_sources: int, width: int) -> Traffic:
    """Two reads of the same sources and one of each one's own: backward writes an fp32 sum, then adds to it."""

    def run(tokens: int, recorder: Recorder) -> None:
        with recorder.paused():
            sources = [torch.randn(1, tokens, width, dtype=DTYPE, requires_grad=True) for _ in range(num_sources + 1)]
            query = torch.randn(width, dtype=DTYPE, requires_grad=True)
            upstream = torch.randn(1, tokens, width, dtype=DTYPE)
            given = list(map(collect, sources[:-2]))
            outs = [operator.depth_attention([*given, own], query, kernel="triton") for own in sources[-2:]]
            torch.autograd.grad(outs, [*sources, query], [upstream, upstream])

    return count(run)


def group(num_sources: int, readers: int, width: int) -> Traffic:
    """The reads of one open block: the finished ones once for all its readers, later ones merge the partial sum."""

    def run(tokens: int, recorder: Recorder) -> None:
        with recorder.paused():
            partials = [torch.randn(1, tokens, width, dtype=DTYPE, requires_grad=True) for _ in range(readers - 1)]
            upstream = [torch.randn(1, tokens, width, dtype=DTYPE) for _ in range(readers)]
            blocks = [torch.randn(1, tokens, width, dtype=DTYPE, requires_grad=True) for _ in range(num_sources - 1)]
            queries = [torch.randn(width, dtype=DTYPE, requires_grad=True) for _ in range(readers)]
            first, later = two_phase.attend_blocks(blocks, queries, eps=1e-6, scale=1.0, form="sum", kernel="triton")
            outs = [
                operator.depth_attention([partial], query, earlier=earlier, kernel="triton")
                for partial, query, earlier in zip(partials, queries[1:], later, strict=True)
            ]
            torch.autograd.grad([first, *outs], [*blocks, *partials, *queries], upstream)

    return count(run)


def waiting_megabytes(num_sources: int, width: int) -> float:
    """What the programs that run at once on an H100 read in backward's first walk and want again in the second."""
    tiling, hold = launch.backward_tiling(width, 1, 2, num_sources - 1)
    programs = SMS * (REGISTERS // (255 * 32 * tiling.warps))
    return 0.0 if hold else programs * tiling.rows * num_sources * width * 2 / 1e6


# A training step -----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A sublayer of which nothing counts: attention or an MLP."""

    def __init__(self, recorder: Callable[[], Recorder]) -> None:
        super().__init__()
        self.recorder = recorder
        self.weight = nn.Parameter(torch.empty(1), requires_grad=False)  # tells `attach` the device and the dtype

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        return _Layer.apply(hidden, self.recorder())


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, recorder: Recorder) -> Tensor:
        ctx.recorder = recorder
        with recorder.paused():
            return torch.randn_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        with ctx.recorder.paused():
            return torch.randn_like(grad), None


def step(width: int, depth: int, affine: bool, attnres: dict[str, Any] | None) -> Traffic:
    """Forward and backward of a ViT's residual stream and norms, without its layers."""
    current: list[Recorder] = []
    with torch.device("meta"):
        norm = functools.partial(LayerNorm, eps=1e-6, affine=affine)
        model = VisionTransformer(
            img_size=16, embed_dim=width, depth=depth, num_heads=1, mlp_ratio=0.1, num_classes=0, norm_layer=norm
        )
    for block in model.blocks:
        block.attn, block.mlp = Layer(lambda: current[-1]), Layer(lambda: current[-1])
    if attnres is not None:
        attnres_vision.attach(model, attnres)
    stream = nn.ModuleList([model.blocks, model.norm]).to_empty(device="cpu").to(DTYPE)
    for parameter in stream.parameters():
        nn.init.normal_(parameter, std=0.1)

    def run(tokens: int, recorder: Recorder) -> None:
        current.append(recorder)
        with recorder.paused():
            embedding = torch.randn(1, tokens, width, dtype=DTYPE, requires_grad=True)
            upstream = torch.randn(1, tokens, width, dtype=DTYPE)
        out = model.norm(model.blocks(embedding))
        torch.autograd.grad(out, [embedding, *(p for p in stream.parameters() if p.requires_grad)], upstream)

    return count(run)


# Tables --------------------------------------------------------------------------------------------------------------


def _loads(found: Traffic, argument: str) -> bool:
    return found.arguments.get(argument, Access()).loaded > 0


def print_reads(width: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
    print(f"\nOne read, D={width}, {DTYPE}, in S (loads + stores). fwd: forward, bwd: backward.")
    columns = ("fwd first", "requested", "minimum", "bwd first", "requested", "minimum", "waiting MB")
    print(f"{'n':>3} {'':38}" + "".join(f"{column:>11}" for column in columns))
    rows = []
    for n in numbers:
        kinds: dict[str, tuple[Callable[[], Traffic], int]] = {
            "read": (functools.partial(read, n, width, norm=False), 1),
            "read + LayerNorm": (functools.partial(read, n, width, norm=True), 1),
            "one of 2 reads, fp32 gradients in place": (functools.partial(two_reads, n, width), 2),
            f"two-phase, one of {READERS} readers": (functools.partial(group, n, READERS, width), READERS),
        }
        for label, (measure, number) in kinds.items():
            found = measure()
            require(
                label,
                reads=(found.kernels["read_kernel"], number - ("two-phase" in label)),
                passes=(found.kernels["attend_blocks_kernel"], int("two-phase" in label)),
                norm=("read_kernel.norm_weight" in found.arguments, "LayerNorm" in label),
                adds_in_place=(_loads(found, "gradient_kernel.block_grads"), "in place" in label),
            )
            source = DTYPE.itemsize * width * number
            values = [
                (found.forward.first_loaded + found.forward.first_stored) / source,
                (found.forward.loaded + found.forward.stored) / source,
                n + 1,
                (found.backward.first_loaded + found.backward.first_stored) / source,
                (found.backward.loaded + found.backward.stored) / source,
                2 * n + 1,
                waiting_megabytes(n, width),
            ]
            print(f"{n:3} {label:38}" + "".join(f"{value:11.2f}" for value in values))
            rows.append({"n": n, "kind": label, "width": width, "atomics": found.atomics, "in_s": values,
                         "arguments": {k: dataclasses.asdict(v) for k, v in found.arguments.items()}})  # fmt: skip
        for name, (forward, backward) in list(ONE_PASS.items())[1:]:
            formulas = f"{forward(n):11.2f}{'':22}{backward(n):11.2f}   (formula, with autograd's sums 3n)"
            print(f"{n:3} {name:38}" + formulas)
    return rows


def print_steps(name: str, width: int, depth: int, tokens: int, affine: bool) -> list[dict[str, Any]]:
    source = DTYPE.itemsize * width
    standard = step(width, depth, affine, None)
    require("standard residual", kernels=(standard.kernels.total(), 0))
    unit = f"S = {source * tokens / 1e6:.0f} MB"
    print(f"\nTraining step of {name}: D={width}, {depth} layers, {tokens} tokens, {DTYPE}, {unit}.")
    print("The whole residual stream with its norms, forward and backward; the layers themselves not.")
    columns = (
        "kernels fwd",
        "kernels bwd",
        "torch ops",
        "requested",
        "all",
        "all, GB",
        f"ms at {BANDWIDTH / 1e12:g} TB/s",
    )
    print(f"{'in S':58}" + "".join(f"{column:>{max(13, len(column) + 2)}}" for column in columns))
    rows: list[dict[str, Any]] = []

    def in_units(total: float) -> tuple[float, float, float]:
        return total, total * source * tokens / 1e9, 1e3 * total * source * tokens / BANDWIDTH

    def show(label: str, found: Traffic) -> None:
        parts = [(p.first_loaded + p.first_stored) / source for p in (found.forward, found.backward, found.torch)]
        values = [*parts, found.requested() / source, *in_units(sum(parts))]
        print(f"{label:58}" + "".join(f"{value:13.1f}" for value in values), flush=True)
        rows.append({"model": name, "kind": label, "counted": True, "in_s": values, "atomics": found.atomics,
                     "launches": found.launches})  # fmt: skip

    show("standard residual", standard)
    for mode, num_blocks in (("Full", None), ("Block N=8", 8)):
        options: dict[str, Any] = {"mode": "full"} if num_blocks is None else {"num_blocks": num_blocks}
        for phase, is_two_phase in PHASES.items():
            found = step(width, depth, affine, options | {"two_phase": is_two_phase})
            require(
                f"{mode}, {phase}",
                two_phase=(found.kernels["attend_blocks_kernel"] > 0, is_two_phase),
                reads=(found.kernels["read_kernel"] + found.kernels["attend_blocks_kernel"], 2 * depth),
            )
            show(f"{mode}, {phase}", found)
        formulas = {f"{mode}, one-phase, {peer}": one_pass(peer, depth, num_blocks) for peer in ONE_PASS}
        if num_blocks is not None:
            formulas[f"{mode}, two-phase, minimum"] = two_phase_step(depth, num_blocks, minimum=True)
            formulas[f"{mode}, two-phase, flash-attn-res' scheme"] = two_phase_step(depth, num_blocks, minimum=False)
        for label, total in formulas.items():
            print(f"{label + ' (formula)':58}{'':52}" + "".join(f"{value:13.1f}" for value in in_units(total)))
            rows.append({"model": name, "kind": label, "counted": False, "in_s": total})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small model: does it run?")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [(1024, (9, 25)), (3072, (9, 25))]
    models = [
        ("ViT-B/16", 768, 12, 256 * 197, True),
        ("ViT-L/16", 1024, 24, 256 * 197, True),
        ("a 24-layer MMDiT (its image stream)", 3072, 24, 16384, False),
    ]
    if args.smoke:
        shapes, models = [(48, (2, 5))], [("a small ViT", 48, 8, 64, True)]
    reads = [row for width, numbers in shapes for row in print_reads(width, numbers)]
    steps = [row for model in models for row in print_steps(*model)]
    if args.output:
        args.output.write_text(json.dumps({"reads": reads, "steps": steps}, indent=2) + "\n")


if __name__ == "__main__":
    main()
