"""Do the Triton kernels fit into a GPU's registers? Compiled ahead of time, so it takes no GPU.

    python benchmarks/compile_targets.py --jobs 8                               # all widths and depths: 20 CPU minutes
    python benchmarks/compile_targets.py --options --sources 9 --targets 90     # every option: 5

The library launches its kernels on tensors without storage; what Triton would compile for these arguments is compiled
for each target, and the machine code is inspected. A kernel passes if it spills no registers and loads its sources 16
bytes at a time (8 in some passes for many queries). "warps" is how many of a multiprocessor's 64 warps the registers
(and its 32 programs) leave room for.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported: the interpreter does not compile

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnres_vision.ops.arguments import Inputs, Options, Saved
from attnres_vision.ops.collect import SourceGradient
from attnres_vision.ops.triton import launch, launch_two_phase, tiles
from attnres_vision.ops.triton.source_table import write_kernel

TARGETS = (80, 90, 100)
WIDTHS = (192, 384, 768, 1024, 1152, 1536, 1920, 3072)
SOURCES = (2, 9, 25, 57)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAMPLES, TOKENS = 16, 197  # no constants of a kernel; 197 is not a multiple of what Triton specialises integers for
KERNELS = ("read_kernel", "gradient_kernel", "attend_blocks_kernel", "mix_blocks_kernel", "blocks_gradient_kernel")
WIDE = {16: ".128", 8: ".64"}  # in the name of a machine instruction that loads so many bytes


@dataclasses.dataclass(frozen=True)
class Read:
    """One way to call depth attention.

    Attributes:
        dtype: of the sources: "bf16", "fp32", "mixed" (bf16, the first one fp32) or "last" (bf16, the last one fp32).
        query: "static" (D,), "sample" (B, D) or "token" (B, T, D).
        norm: "", "layer", "rms" (both affine) or "adaln" (LayerNorm with scale and shift per sample).
        add: the last source is a sum that the kernel makes, and has a gradient from elsewhere too.
        accumulate: the blocks' gradients are added in place to fp32 sums that an earlier reader has begun (collect.py).
        grad_weights: the weights have a gradient.
        queries: 0, or a pass over finished blocks for so many queries (two_phase.py) instead of a read.
        merge: a read that follows such a pass: the blocks' mean, and `sources` newer ones.
    """

    sources: int
    width: int
    dtype: str = "bf16"
    query: str = "static"
    heads: int = 1
    norm: str = ""
    add: bool = False
    accumulate: bool = False
    grad_weights: bool = False
    queries: int = 0
    merge: bool = False

    def __post_init__(self) -> None:
        if self.accumulate and self.sources == 1 and not self.queries:
            raise ValueError("accumulate needs a source before the last one, which has a gradient of its own; got 1")

    def __str__(self) -> str:
        flags = [name for name in ("add", "accumulate", "grad_weights", "merge") if getattr(self, name)]
        heads, queries = f"h{self.heads}" * (self.heads > 1), f"x{self.queries}" * (self.queries > 0)
        return "+".join(filter(None, [self.query + queries, heads, self.norm, *flags]))


@dataclasses.dataclass
class Launch:
    """A kernel and what Triton would compile it for."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]  # num_warps, maxnreg

    def constant(self, name: str) -> Any:
        return self.constants[(self.kernel.arg_names.index(name),)]

    def is_none(self, name: str) -> bool:
        """Whether an argument is compiled as None: the kernel is one without it."""
        place = (self.kernel.arg_names.index(name),)
        return place in self.constants and self.constants[place] is None

    def dtypes(self, name: str) -> set[str]:
        """What a pointer, or a tuple of them, points to: "bf16", "fp32"; nothing for an argument that is None."""
        kinds = self.signature[name]
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        return {kind.removeprefix("*") for kind in kinds if kind.startswith("*")}

    def compile(self, target: int) -> Any:
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, GPUTarget("cuda", target, 32), self.options)


class _NoDevice:
    """A Triton driver that only says for what there is to compile."""

    def __init__(self, target: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", target, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def launches(read: Read, target: int) -> list[Launch]:
    """The kernels that the library launches for a read, forward and backward."""
    found: list[Launch] = []

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # the names are Triton's
        chosen = json.loads(compile["specialization_data"])["options"]
        options = {name: chosen[name] for name in ("num_warps", "maxnreg")}
        arguments = compile["signature"], compile["constants"], compile["configs"][0], options
        if fn.jit_function is not write_kernel:  # which stores a few numbers
            found.append(Launch(fn.jit_function, *arguments))
        return True  # neither compile nor launch

    triton.runtime.driver.set_active(_NoDevice(target))
    triton.knobs.runtime.jit_cache_hook = record
    try:
        _call(read)
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    for launched in found:
        check_configuration(read, launched)
    for name in KERNELS[2:] if read.queries else ():  # in one pass or several; the first reader's mean is not kept
        count = sum(launched.constant("M") for launched in found if launched.kernel.__name__ == name)
        if count != read.queries - (name == "mix_blocks_kernel"):
            raise RuntimeError(f"{name} is launched for {count} queries where the row names {read.queries}")
    return found


def source_dtypes(read: Read) -> list[torch.dtype]:
    """Those that `Read.dtype` stands for."""
    found = [DTYPES.get(read.dtype, torch.bfloat16)] * read.sources
    if read.dtype not in DTYPES:
        found[{"mixed": 0, "last": -1}[read.dtype]] = torch.float32
    return found


def check_configuration(read: Read, launched: Launch) -> None:
    """Raise where a kernel is compiled for something else than what the name of its row says."""
    name, names = launched.kernel.__name__, launched.kernel.arg_names
    found: dict[str, Any] = {"D": launched.constant("D"), "HEADS": launched.constant("HEADS")}
    expected: dict[str, Any] = {"D": read.width, "HEADS": read.heads}
    blocks = read.sources if read.queries else read.sources - 1  # the others are `last`

    def compare(label: str, value: Any, wanted: Any) -> None:
        found[label], expected[label] = value, wanted

    dtypes = [NAMES[dtype] for dtype in source_dtypes(read)]
    kinds, last = set(dtypes[:blocks]), set(dtypes[-1:])
    if blocks:
        compare("dtypes of the blocks", launched.dtypes("blocks"), kinds)
        compare("MIXED", launched.constant("MIXED"), len(kinds) > 1)
    if read.queries:
        if "PER_TOKEN" in names:
            compare("PER_TOKEN", launched.constant("PER_TOKEN"), read.query == "token")
            compare("SHARED", launched.constant("SHARED"), read.query == "static")
        if name == "blocks_gradient_kernel":  # whose sums to add to are a number, not a constant
            compare("dtypes of gradients", launched.dtypes("block_grads"), {"fp32"} if read.accumulate else kinds)
    else:
        unrolled = 0 < blocks <= tiles.UNROLLED
        compare("N", launched.constant("N"), tiles.bucket(blocks) if unrolled else 0)
        compare("a table", launched.is_none("entries"), blocks <= tiles.UNROLLED)
        compare("mixed", launched.is_none("mixed"), not read.merge)
        compare("rstd", launched.is_none("rstd"), not read.norm)
        compare("mean", launched.is_none("mean"), read.norm in ("", "rms"))
        compare("norm_scale", launched.is_none("norm_scale"), read.norm != "adaln")
    if name == "read_kernel":
        compare("add", launched.is_none("add"), not read.add)
        compare("dtype of the last", launched.dtypes("last"), last)
    if name == "gradient_kernel":
        compare("PER_TOKEN", launched.constant("PER_TOKEN"), read.query == "token")
        compare("ACCUMULATE", launched.constant("ACCUMULATE"), read.accumulate)
        compare("grad_weights", launched.is_none("grad_weights"), not read.grad_weights)
        compare("last_upstream", launched.is_none("last_upstream"), not read.add)
        if blocks:
            compare("dtypes of gradients", launched.dtypes("block_grads"), {"fp32"} if read.accumulate else kinds)
    wrong = [label for label in found if found[label] != expected[label]]
    if wrong:
        listed = ", ".join(f"{label} is {found[label]} where {expected[label]} belongs" for label in wrong)
        raise RuntimeError(f"{name} is not what {read.sources} sources, {read.dtype}, {read} stands for: {listed}")


def _call(read: Read) -> None:
    """Forward and backward pass of a read on the meta device."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    shape, width = (SAMPLES, TOKENS, read.width), read.width
    dtype = DTYPES.get(read.dtype, torch.bfloat16)
    sources = [empty(*shape, dtype=source_dtype) for source_dtype in source_dtypes(read)]
    query = empty(*{"static": (width,), "sample": (SAMPLES, width), "token": shape}[read.query])
    collected = [SourceGradient() if read.accumulate else None for _ in sources]
    for source, gradient in zip(sources, collected, strict=True):
        if gradient is not None:
            gradient.accumulator(source)  # another reader has been there: this one adds to what it left
    if read.queries:
        queries = [query] * read.queries
        *means, lse, scores, inv_rms = launch_two_phase.forward(sources, queries, 1e-6, 1.0, 1.0)
        launch_two_phase.mix(sources, lse[1:], scores[1:])
        needs_grad = [True] * (len(sources) + len(queries))
        saved = lse, scores, inv_rms
        launch_two_phase.gradients(
            means, means[0], lse, sources, queries, saved, 1.0, float(len(sources)), needs_grad, collected
        )
        return
    inputs = Inputs(query, add=empty(*shape, dtype=dtype) if read.add else None)
    if read.merge:
        inputs = inputs._replace(mixed=empty(*shape, dtype=dtype), lse=empty(*shape[:-1]))
    if read.norm:
        inputs = inputs._replace(norm_weight=empty(width), norm_bias=None if read.norm == "rms" else empty(width))
    if read.norm == "adaln":
        modulation = empty(SAMPLES, width, dtype=dtype)
        inputs = inputs._replace(norm_scale=modulation, norm_shift=modulation)
    norm = {"adaln": "layer"}.get(read.norm, read.norm)
    options = Options("triton", norm, 1e-6, 1e-6, 1.0, float(read.sources), read.heads)
    out, partial, weights, *saved = launch.forward(sources, inputs, options)
    if read.add:
        sources[-1] = partial
    grads = (out, partial if read.add else None, weights if read.grad_weights else None)
    needs_grad = [True] * len(sources) + [
        value is not None for name, value in inputs._asdict().items() if name != "add"
    ]
    collected[-1] = None  # an open block's sum has this one reader
    launch.gradients(grads, sources, inputs._replace(add=None), Saved(weights, *saved), options, needs_grad, collected)


@dataclasses.dataclass
class Result:
    """What the machine code of a kernel shows."""

    kernel: str
    target: int
    n: int
    D: int
    dtype: str
    options: str
    tiles: str  # rows x columns x tiles per slice
    num_warps: int
    registers: int
    stack: int  # bytes per thread: where registers are spilled to
    shared: int
    wide_loads: int
    expected_loads: int  # as many as the sources alone need
    loads: int
    warps: int  # per multiprocessor
    seconds: float

    @property
    def passes(self) -> bool:
        return self.stack == 0 and self.wide_loads >= self.expected_loads


def inspect(read: Read, launched: Launch, target: int) -> Result:
    """Compile a kernel and look at its machine code."""
    start = time.perf_counter()
    binary = launched.compile(target).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage, code = (_cuobjdump(option, file.name) for option in ("-res-usage", "-sass"))
    registers, stack, shared = (int(_only(rf"\b{name}:(\d+)", usage)) for name in ("REG", "STACK", "SHARED"))
    rows, tile, count = (launched.constant(name) for name in ("ROWS", "TILE", "TILES"))
    values = read.heads * rows * tile * count // (32 * launched.options["num_warps"])
    # Only numbers of the widest dtype fill 16 bytes: the tiling is theirs
    pointers = [*launched.signature["blocks"], *filter(None, [launched.signature.get("last")])]
    sizes = [4 if "32" in kind else 2 for kind in pointers]
    # A pass for many queries may have tilings with 8 bytes per load: more of them spill no registers
    width = min(16, values // count * max(sizes)) if read.queries else 16
    expected = sizes.count(max(sizes)) * values * max(sizes) // width
    loads = collections.Counter(WIDE[width] in name for name in re.findall(r"\bLDG[.\w]*", code))
    return Result(
        launched.kernel.__name__, target, read.sources, read.width, read.dtype, str(read), f"{rows}x{tile}x{count}",
        launched.options["num_warps"], registers, stack, shared, loads[True], expected, loads.total(),
        resident_warps(registers, launched.options["num_warps"]), time.perf_counter() - start,
    )  # fmt: skip


def _cuobjdump(option: str, path: str) -> str:
    """NVIDIA's tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"cuobjdump has no {pattern} in its answer: {text}")
    return found.group(1)


def resident_warps(registers: int, num_warps: int) -> int:
    """Warps that a multiprocessor holds at once: of 64, in at most 32 programs, with 64 K registers.

    Registers are given to a warp in portions of 256. Shared memory, a few bytes per program here, never limits.
    """
    per_warp = -(-registers * 32 // 256) * 256
    return min(64 // num_warps, 32, 65536 // (per_warp * num_warps)) * num_warps


def reads(sources: Sequence[int], widths: Sequence[int]) -> Iterator[Read]:
    """Reads with everything on, which need the most registers of all, and passes for groups of six and of eight."""
    for n, width, dtype in itertools.product(sources, widths, DTYPES):
        yield Read(n, width, dtype, norm="adaln", add=True, accumulate=True)
    for queries, width, dtype in itertools.product((6, 8), widths, DTYPES):  # one kernel for all numbers of sources
        yield Read(max(sources), width, dtype, queries=queries, accumulate=True)


def option_reads(sources: Sequence[int], widths: Sequence[int]) -> Iterator[Read]:
    """Every single option."""
    for width, n in itertools.product(widths, (1, 8)):
        yield Read(n, width, norm="adaln", add=True, accumulate=n > 1, merge=True)
    for n, width in itertools.product(sources, widths):
        yield Read(n, width)
        yield Read(n, width, "fp32")
        yield Read(n, width, norm="layer")
        yield Read(n, width, norm="rms", accumulate=True)
        yield Read(n, width, query="sample", norm="adaln")
        yield Read(n, width, query="token", norm="adaln", add=True, accumulate=True)
        yield Read(n, width, query="token", grad_weights=True)
        yield Read(n, width, heads=4, norm="layer", grad_weights=True)
        yield Read(n, width, "mixed", norm="layer")
        yield Read(n, width, "last")
        yield Read(n, width, queries=8, accumulate=True)
        yield Read(n, width, "fp32", queries=6, accumulate=True)
        yield Read(n, width, "mixed", queries=6)
        yield Read(n, width, "fp32", query="token", queries=6)


def quick_reads() -> Iterator[Read]:
    """A sample for the tests: a base ViT's and a video model's width, held and walked over twice, with everything."""
    yield Read(9, 768)
    yield Read(9, 768, norm="adaln", add=True, accumulate=True)
    yield Read(9, 1152, "fp32", query="token", norm="layer")
    yield Read(9, 1024, queries=6, accumulate=True)
    yield Read(3, 1024, norm="adaln", add=True, accumulate=True, merge=True)
    yield Read(4, 384, "mixed", heads=3, grad_weights=True)
    yield Read(4, 384, "last", add=True)


def _inspect_read(read: Read, target: int, kernels: Sequence[str]) -> list[Result]:
    found = [launched for launched in launches(read, target) if launched.kernel.__name__ in kernels]
    return [inspect(read, launched, target) for launched in found]


def inspect_all(tasks: Sequence[tuple[Read, int, Sequence[str]]], jobs: int) -> Iterator[Result]:
    """The results of reads on targets, as they are ready."""
    if jobs == 1:
        for task in tasks:
            yield from _inspect_read(*task)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for done in concurrent.futures.as_completed([pool.submit(_inspect_read, *task) for task in tasks]):
            yield from done.result()


HEADER = f"{'kernel':22} {'sm':>3} {'n':>3} {'D':>5} {'dtype':5} {'options':40} {'tiles':>9} {'warps':>5} " + (
    f"{'regs':>4} {'spilled':>7} {'LDG.128':>7} {'of LDG':>6} {'resident':>8} {'s':>5}"
)


def line(result: Result) -> str:
    r = result
    return (
        f"{r.kernel:22} {r.target:3} {r.n:3} {r.D:5} {r.dtype:5} {r.options:40} {r.tiles:>9} {r.num_warps:5} "
        f"{r.registers:4} {r.stack:7} {r.wide_loads:7} {r.loads:6} {r.warps:5}/64 {r.seconds:5.0f}"
        + ("" if r.passes else "  FAILS")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the sample that the tests take, for --targets")
    parser.add_argument("--options", action="store_true", help="every single option, not reads with everything on")
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, choices=TARGETS, help="80 is sm_80 (A100)")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--sources", type=int, nargs="+", default=SOURCES)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS, help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    options = parser.parse_args(arguments)
    make = option_reads if options.options else reads
    chosen = list(quick_reads() if options.quick else make(options.sources, options.widths))
    results = []
    print(HEADER, flush=True)
    for result in inspect_all(
        [(read, target, options.kernels) for read in chosen for target in options.targets], options.jobs
    ):
        results.append(result)
        print(line(result), flush=True)
    failed = sum(not result.passes for result in results)
    print(f"{len(results)} kernels, {failed} of which spill registers or load their sources in narrow pieces")
    if options.output is not None:
        options.output.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
