"""Time, bandwidth and memory on a GPU; on a CPU the same functions run with a plain clock, to check the scripts."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of `run` on the device.

    On a GPU a pause is queued first, so that the host is ahead and gaps between launches do not count.
    """
    run()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(50_000_000)  # cycles: some 25 ms
    for mark in marks[:-1]:
        mark.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(marks))


def copy_bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes per second of a copy, read and written: what the kernels' percentages refer to."""
    source = torch.empty(megabytes * 2**20 // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * milliseconds(lambda: target.copy_(source), device, 20))


def describe(device: torch.device) -> str:
    """The device and the versions of what ran on it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton's interpreter"
    return f"{name}, torch {torch.__version__}"
