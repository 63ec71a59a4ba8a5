"""Depth attention on a GPU: is it right, how close to the memory's bandwidth, against other packages, in whole models?

    python benchmarks/gpu.py --output gpu.json          # one GPU with 80 GB; some 15 minutes
    python benchmarks/gpu.py --only check reads         # a part of it; also groups, steps
    python benchmarks/gpu.py --device cpu --smoke       # does the script run? tiny shapes, Triton's interpreter

Correctness comes first, against the fp64 reference with random queries; nothing is timed if it fails. A read's minimum
(every source once, every gradient once: (n + 1) S forward, (2n + 1) S backward, S the bytes of a source) is divided by
its time and by the bandwidth of a copy on the same device. Limits: forward 90 %, backward 80 %; a training step at most
1.05x (Block N=8) or 1.15x (Full) of the standard residual, memory 1.05x. The exit code is 1 if a limit is missed.

Other packages run in the same process where they are installed (`pip install fla-core fast-attnres flash-attn-res
liger-kernel`), on the same tensors; what one cannot run is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if "cpu" in sys.argv or "--device=cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports the kernels

import gpu_steps
import torch
from depth_attention import saved_megabytes, snippet
from gpu_peers import PEERS, flash_attn_res_group
from gpu_timing import copy_bandwidth, describe, milliseconds
from torch import Tensor

from attnres_vision import ops
from attnres_vision.ops import operator, reference, two_phase
from attnres_vision.ops.collect import collect

FORWARD_LIMIT, BACKWARD_LIMIT = 0.90, 0.80
# Of a result or gradient, relative to its largest number: a few roundings of the dtype
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
DTYPE = torch.bfloat16  # of what is timed
PARTS = ("check", "reads", "groups", "steps")
READERS = 6  # of a block of ViT-L or of a 24-layer MMDiT with N=8

Read = Callable[[Sequence[Tensor], Tensor], Callable[[], Tensor]]


# Correctness ---------------------------------------------------------------------------------------------------------


def check(device: torch.device, width: int, tokens: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Largest errors of results and gradients against the fp64 reference, for kinds of queries, norms and dtypes."""
    rows: list[dict[str, Any]] = []
    for n in numbers:
        for dtype in TOLERANCES:
            for kind, query_shape in (("static", (width,)), ("sample", (2, width)), ("token", (2, tokens, width))):
                for norm in (False, True):
                    error = _error(device, n, (2, tokens, width), query_shape, dtype, norm)
                    rows.append({"n": n, "dtype": str(dtype), "query": kind, "norm": norm, "error": error,
                                 "limit": TOLERANCES[dtype]})  # fmt: skip
    return rows


def check_groups(device: torch.device, widths: Sequence[int], numbers: Sequence[int]) -> list[dict[str, Any]]:
    """The same for two groups of readers that share a pass each, with gradients of the blocks added in place."""
    rows: list[dict[str, Any]] = []
    for width in widths:
        for n in numbers:
            for dtype in (torch.float32, torch.bfloat16):
                error = _group_error(device, n, (2, 7, width), dtype)
                rows.append({"n": n, "dtype": str(dtype), "group of readers": READERS, "width": width, "error": error,
                             "limit": TOLERANCES[dtype]})  # fmt: skip
    return rows


def _group_error(device: torch.device, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    width = shape[-1]
    given = [torch.randn(shape, device=device).to(dtype) for _ in range(n - 1 + READERS)]
    given += [width**-0.5 * torch.randn(width, device=device) for _ in range(READERS)]
    upstream = [torch.randn(shape, device=device).to(dtype) for _ in range(2 * READERS)]
    results = []
    for is_ours in (True, False):
        cast = [(value if is_ours else value.double()).detach().requires_grad_() for value in given]
        blocks, partials, queries = cast[: n - 1], cast[n - 1 : -READERS], cast[-READERS:]
        if is_ours:
            shared = [collect(block) for block in blocks]
            # The second group's backward comes first: it writes what the first one's adds to
            outs = read_group(shared, partials, queries) + read_group(shared, partials, queries[::-1])
        else:
            sources = [blocks, *([*blocks, partial] for partial in partials[1:])] * 2
            pairs = zip(sources, queries + queries[::-1], strict=True)
            outs = [reference.depth_attention(s, q, form="mean") for s, q in pairs]
        inputs = [*blocks, *partials[1:], *queries]  # the first reader finds no partial sum
        grads = torch.autograd.grad(outs, inputs, [u.to(outs[0].dtype) for u in upstream])
        results.append([*outs, *grads])
    return max(_relative(ours, exact) for ours, exact in zip(*results, strict=True))


def read_group(blocks: Sequence[Tensor], partials: Sequence[Tensor], queries: Sequence[Tensor]) -> list[Tensor]:
    """The reads of a group in two phases; the first one reads the blocks alone."""
    options: dict[str, Any] = {"eps": 1e-6, "scale": 1.0, "form": "mean", "kernel": "triton"}
    first, later = two_phase.attend_blocks(blocks, queries, **options)
    reads = zip(partials[1:], queries[1:], later, strict=True)
    return [first, *(operator.depth_attention([p], q, earlier=e, **options) for p, q, e in reads)]


def _error(
    device: torch.device, n: int, shape: tuple[int, ...], query_shape: tuple[int, ...], dtype: torch.dtype, norm: bool
) -> float:
    torch.manual_seed(0)
    width = shape[-1]
    given = [torch.randn(shape, device=device).to(dtype) for _ in range(n + 1)]  # the last is `add`
    given += [0.1 * torch.randn(query_shape, device=device), torch.randn(width, device=device)]
    given += [torch.randn(shape[0], width, device=device) for _ in range(2)]
    upstream = torch.randn(shape, device=device).to(dtype)
    results = []
    for is_ours in (True, False):
        cast = [(value if is_ours else value.double()).detach().requires_grad_() for value in given]
        *sources, add, query, weight, scale, shift = cast
        fused = ops.Norm("layer", 1e-6, weight, weight, scale, shift)
        if is_ours:
            with ops.backend("triton"):
                out, total = ops.depth_attention(sources, query, add=add, norm=fused if norm else None)
        else:
            total = sources[-1] + add
            out = reference.depth_attention([*sources[:-1], total], query)
            out = fused.apply(out) if norm else out
        inputs = cast if norm else cast[:-3]
        grads = torch.autograd.grad([out, total], inputs, [upstream.to(out.dtype), upstream.to(total.dtype)])
        results.append([out, total, *grads])
    return max(_relative(ours, exact) for ours, exact in zip(*results, strict=True))


def _relative(ours: Tensor, exact: Tensor) -> float:
    ours, exact = ours.detach().double(), exact.detach().double()
    return float((ours - exact).abs().max() / exact.abs().max())


# Reads against bandwidth and peers -----------------------------------------------------------------------------------


def ours(sources: Sequence[Tensor], query: Tensor) -> Callable[[], Tensor]:
    return lambda: operator.depth_attention(sources, query, form="mean", kernel="triton")


def torch_eager(sources: Sequence[Tensor], query: Tensor) -> Callable[[], Tensor]:
    return lambda: snippet(sources, query) / len(sources)


def compare_reads(
    device: torch.device, shape: tuple[int, int, int], n: int, bandwidth: float, repeats: int
) -> list[dict[str, Any]]:
    """One row per implementation: times, shares of the bandwidth, what autograd keeps; or why it cannot run."""
    torch.manual_seed(0)
    sources = [torch.randn(shape, device=device, dtype=DTYPE, requires_grad=True) for _ in range(n)]
    query = (0.05 * torch.randn(shape[-1], device=device, dtype=DTYPE)).requires_grad_()
    few = [source.detach()[:1, :16] for source in sources]  # a token does not depend on others
    expected = reference.depth_attention([source.double() for source in few], query.detach().double(), form="mean")
    reads: dict[str, Read] = {"ours": ours, "stack - rms_norm - einsum": torch_eager, **PEERS}
    rows = []
    for name, make in reads.items():
        row: dict[str, Any] = {"implementation": name, "n": n, "shape": list(shape)}
        try:
            row |= _time(make(sources, query), sources, query, expected, bandwidth, device, repeats)
            row["saved_mb"] = saved_megabytes(lambda s, q, make=make: make(s, q)(), sources, query)
        except Exception as error:  # a peer may raise anything
            if name == "ours":
                raise
            row["cannot_run"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        rows.append(row)
    return rows


def _time(
    run: Callable[[], Tensor],
    sources: Sequence[Tensor],
    query: Tensor,
    expected: Tensor,
    bandwidth: float,
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    out = run()
    upstream = torch.randn_like(out)
    inputs = [*sources, query]
    forward = milliseconds(run, device, repeats)
    backward = milliseconds(lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True), device, repeats)
    source_bytes, n = sources[0].nbytes, len(sources)
    return {
        "error": _relative(out.detach()[:1, :16], expected),
        "forward_ms": forward,
        "forward_share": (n + 1) * source_bytes / (1e-3 * forward) / bandwidth,
        "backward_ms": backward,
        "backward_share": (2 * n + 1) * source_bytes / (1e-3 * backward) / bandwidth,
    }


def compare_groups(device: torch.device, shape: tuple[int, int, int], n: int, repeats: int) -> list[dict[str, Any]]:
    """The reads of one open block, per read: one by one, and in two phases. Our first one finds no partial sum."""
    torch.manual_seed(0)

    def rows_of(count: int) -> list[Tensor]:
        return [torch.randn(shape, device=device, dtype=DTYPE, requires_grad=True) for _ in range(count)]

    blocks, partials = rows_of(n - 1), rows_of(READERS)
    queries = [torch.randn(shape[-1], device=device, dtype=DTYPE, requires_grad=True) for _ in partials]

    def one_phase() -> list[Tensor]:
        reads = zip(partials[1:], queries[1:], strict=True)
        return [ours(blocks, queries[0])(), *(ours([*blocks, partial], query)() for partial, query in reads)]

    makers: dict[str, Callable[[], Callable[[], list[Tensor]]]] = {
        "ours, one-phase": lambda: one_phase,
        "ours, two-phase": lambda: lambda: read_group(blocks, partials, queries),
        "flash-attn-res, two-phase": lambda: flash_attn_res_group(blocks, partials, queries),
    }
    rows = []
    for name, make in makers.items():
        row: dict[str, Any] = {"implementation": name, "n": n, "shape": list(shape)}
        try:
            run = make()
            outs = run()
            inputs, upstream = [*blocks, *partials, *queries], [torch.randn_like(out) for out in outs]
            row["forward_ms"] = milliseconds(run, device, repeats) / READERS
            options = {"retain_graph": True, "allow_unused": True}
            grads = lambda: torch.autograd.grad(outs, inputs, upstream, **options)  # noqa: E731, B023
            row["backward_ms"] = milliseconds(grads, device, repeats) / READERS
        except Exception as error:
            if name.startswith("ours"):
                raise
            row["cannot_run"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        rows.append(row)
    return rows


def print_reads(rows: list[dict[str, Any]], title: str) -> list[str]:
    """Print the rows of one shape; returns the limits that were missed."""
    print(f"\n{title}")
    columns = {
        "forward ms": 11,
        "of copy": 9,
        "backward ms": 13,
        "of copy ": 9,
        "time x": 8,
        "saved MB": 10,
        "error": 9,
    }
    print(f"{'':28}" + "".join(f"{name.strip():>{width}}" for name, width in columns.items()))
    base = rows[0]["forward_ms"] + rows[0]["backward_ms"]
    for row in rows:
        name = f"{row['implementation']:28}"
        if "cannot_run" in row:
            print(f"{name}cannot run this: {row['cannot_run'][:110]}")
            continue
        shares = [f"{row[key]:9.1%}" if key in row else f"{'':9}" for key in ("forward_share", "backward_share")]
        rest = f"{row['saved_mb']:10.1f}{row['error']:9.1e}" if "error" in row else ""
        rest += " WRONG" if not row.get("error", 0.0) <= TOLERANCES[DTYPE] else ""
        ratio = (row["forward_ms"] + row["backward_ms"]) / base
        print(f"{name}{row['forward_ms']:11.3f}{shares[0]}{row['backward_ms']:13.3f}{shares[1]}{ratio:7.2f}x{rest}")
    limits = {"forward_share": FORWARD_LIMIT, "backward_share": BACKWARD_LIMIT}
    return [
        f"{title}: {key.split('_')[0]} at {rows[0][key]:.1%} of the copy bandwidth, limit {limit:.0%}"
        for key, limit in limits.items()
        if key in rows[0] and rows[0][key] < limit
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and one repeat: does the script run?")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: everything")
    parser.add_argument("--output", type=Path, help="write everything as JSON, after each part what there is")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu" and not args.smoke:
        parser.error("a CPU can only check the script: give --smoke with --device cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --smoke checks the script")
    shapes = {"ViT-L": (256, 197, 1024), "HunyuanVideo": (1, 16384, 3072)}
    numbers, checked, megabytes, rounds = (9, 25), (384, 33, (1, 2, 9, 33)), 1024, 20
    groups_checked = ((768, 1024, 3072), (9, 13))
    works = [lambda: gpu_steps.vit(device, "vit_large_patch16_224", 64, torch.bfloat16),
             lambda: gpu_steps.mmdit(device, 1536, 24, 64, torch.bfloat16)]  # fmt: skip
    if args.smoke:
        shapes, numbers, checked, groups_checked = {"tiny": (2, 5, 64)}, (3,), (48, 5, (1, 3)), ((48,), (3, 10))
        args.repeats, megabytes, rounds = 1, 8, 1
        works = [lambda: gpu_steps.vit(device, "test_vit", 1, torch.float32, img_size=32),
                 lambda: gpu_steps.mmdit(device, 64, 4, 2, torch.float32, text_tokens=3)]  # fmt: skip

    print(describe(device))
    report: dict[str, Any] = {"device": describe(device), "missed": []}

    def save() -> None:  # a command may be cut off
        if args.output:
            args.output.write_text(json.dumps(report, indent=2) + "\n")

    if "check" in args.only:
        report["correctness"] = check(device, *checked) + check_groups(device, *groups_checked)
        save()
        _judge(report["correctness"])
    if {"reads", "groups"} & set(args.only):
        bandwidth = report["bandwidth"] = copy_bandwidth(device, megabytes)
        print(f"Copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    for name, shape in shapes.items():
        for n in numbers if "reads" in args.only else ():
            rows = compare_reads(device, shape, n, bandwidth, args.repeats)
            title = f"{name}: a read of n={n}, {shape[0]}x{shape[1]} tokens, D={shape[2]}, {DTYPE}"
            report["missed"] += print_reads(rows, title)
            report.setdefault("reads", []).extend(rows)
            save()
        if "groups" in args.only:
            rows = compare_groups(device, shape, numbers[0], args.repeats)
            print_reads(rows, f"{name}: {READERS} readers of a block, n={numbers[0]}, per read")
            report.setdefault("groups", []).extend(rows)
            save()
    for make in works if "steps" in args.only else ():
        with ops.backend("triton"):
            work = make()
            rows = report.setdefault("steps", {})[work.name] = gpu_steps.measure(work, device, rounds)
            report["missed"] += gpu_steps.print_table(work, rows)
            save()
    if args.smoke:
        print("\nThe script runs. Limits are not judged on tiny shapes.")
    elif report["missed"]:
        raise SystemExit("\nMissed:\n" + "\n".join(report["missed"]))


def _judge(rows: list[dict[str, Any]]) -> None:
    """Print the largest errors; exit if one is too large."""
    worst = {dtype: max(row["error"] for row in rows if row["dtype"] == dtype) for dtype in map(str, TOLERANCES)}
    print("Correctness, largest relative error: " + ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items()))
    wrong = [row for row in rows if not row["error"] <= row["limit"]]
    if wrong:
        raise SystemExit("Wrong results:\n" + "\n".join(map(str, wrong)))


if __name__ == "__main__":
    main()
