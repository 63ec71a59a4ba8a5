"""Whole training steps on a GPU, standard residual against Block and Full, for benchmarks/gpu.py.

The models are those of vit_overhead.py and dit_overhead.py. Variants run one after the other, so that each has the
whole memory, and the stock one again at the end: its ratio is by how much the machine changed in between.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import variants
import vit_overhead
from peak_memory import peak_bytes
from torch import nn

BLOCK, FULL = {"num_blocks": 8}, {"mode": "full"}
ONE_PHASE = BLOCK | {"two_phase": False}  # more traffic: shown, not judged
AGAIN = f"{variants.STOCK} again"
VARIANTS: dict[str, dict[str, Any] | None] = {**variants.named(None, BLOCK, FULL, ONE_PHASE), AGAIN: None}
STEP_LIMITS = {variants.label(BLOCK): 1.05, variants.label(FULL): 1.15}
MEMORY_LIMIT = 1.05


@dataclasses.dataclass
class Work:
    """A model to train: `make(attnres)` gives the model, its optimiser and a function that runs one step."""

    name: str
    make: Callable[[dict[str, Any] | None], tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]]


def vit(device: torch.device, name: str, batch: int, dtype: torch.dtype, **options: Any) -> Work:
    def make(attnres: dict[str, Any] | None) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        with device:
            trainer = vit_overhead.Trainer(name, attnres, **options)
        trainer.model.to(dtype)
        images = torch.randn(batch, 3, *trainer.model.patch_embed.img_size, device=device, dtype=dtype)
        labels = torch.randint(1000, (batch,), device=device)
        return trainer.model, trainer.optimizer, lambda: trainer.step(images, labels)

    return Work(f"{name}, batch {batch}, {str(dtype).removeprefix('torch.')}", make)


def mmdit(device: torch.device, width: int, layers: int, side: int, dtype: torch.dtype, text_tokens: int = 77) -> Work:
    """diffusers' SD3Transformer2DModel; SD3-medium at width 1536 and 24 layers."""
    import dit_overhead  # needs diffusers, and the other parts of the benchmark do not

    def build() -> tuple[nn.Module, dict[str, Any]]:
        model, inputs = dit_overhead.sd3(width, layers, side, text_tokens)
        cast = {name: value.to(dtype) if name != "timestep" else value for name, value in inputs.items()}
        return model.to(dtype), cast

    def make(attnres: dict[str, Any] | None) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        with device:
            trainer = dit_overhead.Trainer(build, attnres)
        return trainer.model, trainer.optimizer, trainer.step

    return Work(f"MMDiT (SD3), D={width}, {layers} layers, {side**2} + {text_tokens} tokens, {dtype}", make)


def measure(work: Work, device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds and peak bytes of a step for every variant."""
    rows: dict[str, dict[str, float]] = {}
    for name, attnres in VARIANTS.items():
        model, optimizer, step = work.make(attnres)
        for _ in range(min(3, rounds)):  # compiles the kernels, fills the allocator and the optimiser's state
            step()
        seconds = statistics.median(_clock(step, device) for _ in range(rounds))
        rows[name] = {"seconds": seconds, "peak_mb": _peak(model, optimizer, step, device) / 1e6}
        del model, optimizer, step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    base = rows[variants.STOCK]
    for row in rows.values():
        row |= {"step_ratio": row["seconds"] / base["seconds"], "peak_ratio": row["peak_mb"] / base["peak_mb"]}
    return rows


def _clock(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _peak(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        return peak_bytes(model, optimizer, step)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def print_table(work: Work, rows: dict[str, dict[str, float]]) -> list[str]:
    """Print the rows; returns the limits that were missed."""
    print(f"\nTraining step of {work.name}")
    print(f"{'variant':28} {'step ms':>9} {'step x':>8} {'limit':>6} {'peak MB':>9} {'peak x':>8} {'limit':>6}")
    missed = []
    for name, row in rows.items():
        limit = STEP_LIMITS.get(name)
        print(
            f"{name:28} {1e3 * row['seconds']:9.2f} {row['step_ratio']:8.3f} {limit or '':>6} {row['peak_mb']:9.0f} "
            f"{row['peak_ratio']:8.3f} {MEMORY_LIMIT if limit else '':>6}"
        )
        if limit is not None and row["step_ratio"] > limit:
            missed.append(f"{work.name}, {name}: step {row['step_ratio']:.3f}x of stock, limit {limit}x")
        if limit is not None and row["peak_ratio"] > MEMORY_LIMIT:
            missed.append(f"{work.name}, {name}: memory {row['peak_ratio']:.3f}x of stock, limit {MEMORY_LIMIT}x")
    return missed
