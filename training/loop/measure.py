"""Numbers about a run: parameters, FLOPs, memory, versions."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def forward_gflops(build: Callable[[], nn.Module], forward: Callable[[nn.Module], object]) -> float | None:
    """GFLOPs (2 per multiply-add) of `forward(model)`, counted on the meta device; None where a model cannot run there.

    On the CPU the counter misses fused attention (pytorch/pytorch#195460); on meta it is exact, and depth attention
    brings a formula of its own.
    """
    with torch.device("meta"):
        model = build().float().eval()
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                forward(model)
        except (NotImplementedError, RuntimeError):  # they look at values, or ask for autocast
            return None
    return counter.get_total_flops() / 1e9


def training_memory(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: Iterable[Tensor]) -> dict[str, int]:
    """Bytes that training holds from the first update on, without activations; of a model on the meta device.

    Args:
        model: on the meta device, frozen parameters frozen.
        optimizer: over the model's parameters. One update of it is made, on meta.
        averaged: the tensors of the moving average.

    Returns:
        Bytes of `parameters` (and buffers), `gradients`, `optimizer`, `average` and of all together, `total`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
        state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
        state_bytes = _bytes(state)
    except (NotImplementedError, RuntimeError):  # an optimiser that looks at values: two moments, as Adam
        state_bytes = 2 * _bytes(trained)
    need = {
        "parameters": _bytes([*model.parameters(), *model.buffers()]),
        "gradients": _bytes(trained),
        "optimizer": state_bytes,
        "average": _bytes(averaged),
    }
    return {**need, "total": sum(need.values())}


def describe_memory(need: dict[str, int]) -> str:
    """`training_memory`'s answer, on a line."""
    parts = ", ".join(f"{name} {_size(size)}" for name, size in need.items() if name != "total" and size)
    return f"{_size(need['total'])} before activations ({parts})"


def check_memory(need: dict[str, int], device: torch.device) -> None:
    """Compare `training_memory`'s answer with the device.

    Raises:
        MemoryError: it cannot fit.
    """
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if need["total"] > there:
        raise MemoryError(
            f"training this model needs {describe_memory(need)}, and {device} has {_size(there)}: train fewer of its "
            "parameters, hold frozen ones in bf16, leave out the moving average, or take a smaller model"
        )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


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
