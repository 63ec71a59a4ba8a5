"""How fast is one depth-attention read, forward and backward? Side by side in one process.

    python benchmarks/depth_attention.py --threads 2 --output depth_attention.json

compares the snippet that papers and repositories use (stack, rms_norm, einsum), the library's reference, its eager
operator, its compiled loop, and that loop in a compiled model, where the time of making the sources is included and
their gradients are not written out. Rounds are interleaved, so that other load on the machine hits all of them alike;
the ratio is the median over rounds of snippet / implementation. "reads" is the forward pass's time in units of "once":
reading all sources once, by the faster of `torch.sum` of each and a compiled loop over tokens that adds them all up.
All start with sources that are not in the cache. "saved" is what autograd keeps beyond the sources.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor

from attnres_vision.ops import decomposed, operator, reference

Read = Callable[[Sequence[Tensor], Tensor], Tensor]


def snippet(sources: Sequence[Tensor], query: Tensor) -> Tensor:
    """Depth attention as the paper's pseudo-code has it (arXiv 2603.15031), times n: the sum form."""
    values = torch.stack(list(sources))
    keys = F.rms_norm(values, values.shape[-1:], eps=1e-6)
    weights = torch.einsum("d,n...d->n...", query, keys).softmax(0)
    return len(sources) * torch.einsum("n...,n...d->...d", weights, values)


def inside_a_model(bases: list[Tensor], scales: list[Tensor], query: Tensor) -> Tensor:
    """Layers as small as they can be (a product per channel) and a read of their outputs, compiled as one graph."""
    return decomposed.depth_attention([base * scale for base, scale in zip(bases, scales, strict=True)], query)


def token_sums(sources: Sequence[Tensor]) -> Tensor:
    """One pass over all sources that writes a number per token: the least a read could take."""
    total = sources[0].float()
    for source in sources[1:]:
        total = total + source
    return total.sum(-1)


def source_sums(sources: Sequence[Tensor]) -> list[Tensor]:
    return [source.sum() for source in sources]


def implementations() -> dict[str, Read]:
    """Name to function; the first is what the others are compared with."""
    return {
        "snippet": snippet,
        "reference": reference.depth_attention,
        "eager": operator.depth_attention,
        "compiled": torch.compile(decomposed.depth_attention, fullgraph=True, dynamic=False),
    }


def empty_caches() -> None:
    """What a model does between two reads of a source: touch more memory than the caches hold."""
    torch.zeros(32 * 2**20)


def measure(read: Read, sources: list[Tensor], query: Tensor, upstream: Tensor) -> tuple[float, float]:
    """Milliseconds of one training forward and of its backward."""
    empty_caches()
    start = time.perf_counter()
    out = read(sources, query)
    middle = time.perf_counter()
    torch.autograd.grad(out, [*sources, query], upstream)
    return 1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)


def read_once(passes: Sequence[Callable[..., object]], sources: list[Tensor]) -> float:
    """Milliseconds of the fastest pass over the sources, the best of three calls of each."""
    found = []
    with torch.no_grad():
        for function in (*passes, *passes, *passes):
            empty_caches()
            start = time.perf_counter()
            function(sources)
            found.append(1e3 * (time.perf_counter() - start))
    return min(found)


def saved_megabytes(read: Read, sources: list[Tensor], query: Tensor) -> float:
    """What autograd saves besides the sources and the query, each storage counted once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*sources, query)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = read(sources, query)  # kept until the end: freed storages would be counted twice
    del out
    return sum(saved.values()) / 1e6


def compare(num_sources: int, batch: int, tokens: int, width: int, rounds: int) -> list[dict[str, float | str | int]]:
    """One row per implementation."""
    torch.manual_seed(0)
    sources = [torch.randn(batch, tokens, width, requires_grad=True) for _ in range(num_sources)]
    query = (0.05 * torch.randn(width)).requires_grad_()
    upstream = torch.randn(batch, tokens, width)
    reads: dict[str, Callable[..., Tensor]] = dict(implementations())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in reads}
    # In a compiled model the gradients of the sources stay in the graph: here they end in the channels' scales.
    bases = [source.detach() for source in sources]
    scales = [torch.ones(width, requires_grad=True) for _ in sources]
    compiled_model = torch.compile(inside_a_model, fullgraph=True, dynamic=False)
    model = "compiled, in a model"
    times[model] = []
    reads[model] = lambda scales, query: compiled_model(bases, scales, query)
    for name, read in reads.items():
        measure(read, scales if name == model else sources, query, upstream)
    passes = (source_sums, torch.compile(token_sums, fullgraph=True, dynamic=False))
    read_once(passes, sources)
    once: list[float] = []
    for _ in range(rounds):
        once.append(read_once(passes, sources))
        for name, read in reads.items():
            given = scales if name == model else sources
            times[name].append(min((measure(read, given, query, upstream) for _ in range(3)), key=sum))
    totals = {name: [sum(pair) for pair in pairs] for name, pairs in times.items()}
    baseline = totals[next(iter(reads))]
    return [
        {
            "implementation": name,
            "n": len(sources),
            "dtype": str(sources[0].dtype).removeprefix("torch."),
            "forward_ms": statistics.median(forward for forward, _ in times[name]),
            "once_ms": statistics.median(once),
            "reads": statistics.median(forward / least for (forward, _), least in zip(times[name], once, strict=True)),
            "backward_ms": statistics.median(backward for _, backward in times[name]),
            "total_ms": statistics.median(totals[name]),
            "best_ms": min(totals[name]),
            "speedup": statistics.median(base / own for base, own in zip(baseline, totals[name], strict=True)),
            "saved_mb": saved_megabytes(read, sources, query) if name != model else float("nan"),
        }
        for name, read in reads.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[9, 25], help="numbers of sources n")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds; each takes the best of three calls")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: does it run?")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch._inductor.config.compile_threads = 1  # its worker processes would start up beside the first measurements
    if args.smoke:
        args.sources, args.batch, args.tokens, args.width, args.rounds = [2, 3], 2, 8, 32, 1
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")  # which `compare` draws its sources in
    shape = (
        f"{args.batch} x {args.tokens} tokens, D={args.width}, {dtype}, {args.threads} threads, torch "
        f"{torch.__version__}"
    )
    print(shape)
    print(
        f"{'n':>3} {'':20} {'forward ms':>11} {'once ms':>8} {'reads':>6} {'backward ms':>12} {'total ms':>9} "
        f"{'best ms':>8} {'speed-up':>9} {'saved MB':>9}"
    )
    rows = []
    for num_sources in args.sources:
        for row in compare(num_sources, args.batch, args.tokens, args.width, args.rounds):
            rows.append(row)
            print(
                f"{row['n']:>3} {row['implementation']:20} {row['forward_ms']:11.2f} {row['once_ms']:8.2f} "
                f"{row['reads']:6.1f} {row['backward_ms']:12.2f} {row['total_ms']:9.2f} {row['best_ms']:8.2f} "
                f"{row['speedup']:8.1f}x {row['saved_mb']:9.2f}"
            )
    if args.output:
        args.output.write_text(json.dumps({"shape": shape, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
