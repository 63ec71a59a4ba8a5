"""Numbers about a run: parameters, FLOPs, memory, versions."""

from __future__ import annotations

import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def forward_gflops(build: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> float:
    """GFLOPs (2 per multiply-add) of one forward pass, counted on the meta device.

    On the CPU the counter misses fused attention (pytorch/pytorch#195460); on meta it is exact, and depth attention
    brings a formula of its own.
    """
    with torch.device("meta"):
        model = build().eval()
        inputs = [torch.empty(shape) for shape in shapes]
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*inputs)
    return counter.get_total_flops() / 1e9


def peak_memory(device: torch.device) -> int:
    """Largest memory so far in bytes: allocated on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and git commit: what it takes to run the same thing again."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    packages = {}
    for package in ("torch", "timm", "accelerate", "diffusers", "attnres-vision"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": packages,
        "git": git_commit(),
    }


def git_commit() -> str | None:
    """The commit of this checkout, `+changes` if files differ from it; None outside a git checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def training_speed(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each training step, the variants taken in turns.

    In turns, because a shared machine changes its speed within minutes: what slows one variant then slows the others,
    and the ratios stay true where the absolute numbers do not.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            _wait()
            started = time.perf_counter()
            step()
            _wait()
            if turn >= 2:  # the first two allocate, tune and fill caches
                times[name].append(time.perf_counter() - started)
    return {name: {"seconds_per_step": statistics.median(taken)} for name, taken in times.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
