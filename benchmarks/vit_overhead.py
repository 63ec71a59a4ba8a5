"""What Attention Residuals cost a ViT: training step and forward pass, stock timm against variants, in one process.

    python benchmarks/vit_overhead.py                      # ViT-S/16, batch 8, fp32, 2 threads: about 4 minutes
    python benchmarks/vit_overhead.py --smoke

Steps of all variants are interleaved, so that a disturbance of the machine meets all of them; the table gives the
median of the per-round ratios to stock. Peak memory is the peak of tensor bytes alive in a step (parameters, gradients
and optimiser state included), from the profiler's allocation events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import timm
import torch
import variants
from peak_memory import peak_bytes
from torch import Tensor, nn

import attnres_vision

VARIANTS = variants.named(
    None,
    {"num_blocks": 8},
    {"num_blocks": 8, "query": "token", "rank": 32},
    {"num_blocks": 8, "query": "condition", "rank": 32},
    {"mode": "full"},
)


class Trainer:
    """One variant with its optimiser."""

    def __init__(self, model_name: str, attnres: dict | None, **model_options: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = timm.create_model(model_name, num_classes=1000, **model_options)
        if attnres is not None:
            attnres_vision.attach(self.model, attnres)
        variants.check(self.model, attnres)
        for name, parameter in self.model.named_parameters():
            if ".depth." in name:  # a trained model's queries are not zero
                nn.init.normal_(parameter, std=0.05)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, images: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def forward(self, images: Tensor, labels: Tensor) -> None:
        self.model(images)


def clock(function, *args) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and two rounds: does the script run?")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.batch_size, args.rounds = "vit_tiny_patch16_224", 1, 2

    torch.set_num_threads(args.threads)
    trainers = {name: Trainer(args.model, attnres) for name, attnres in VARIANTS.items()}
    stock = trainers[variants.STOCK].model
    size, dtype = stock.patch_embed.img_size, variants.dtype_of(stock)
    batch = torch.randn(args.batch_size, 3, *size), torch.randint(1000, (args.batch_size,))
    steps: dict[str, list[float]] = {name: [] for name in trainers}
    forwards: dict[str, list[float]] = {name: [] for name in trainers}
    for round_ in range(-2, args.rounds):  # two rounds of warm-up
        for name, trainer in trainers.items():
            seconds = clock(trainer.step, *batch), clock(trainer.forward, *batch)
            if round_ >= 0:
                steps[name].append(seconds[0])
                forwards[name].append(seconds[1])
    peaks = {
        name: peak_bytes(trainer.model, trainer.optimizer, lambda trainer=trainer: trainer.step(*batch))
        for name, trainer in trainers.items()
    }

    def ratio(times: dict[str, list[float]], name: str) -> float:
        return statistics.median(t / s for t, s in zip(times[name], times[variants.STOCK], strict=True))

    rows = {
        name: {
            "step_seconds": statistics.median(steps[name]),
            "step_ratio": ratio(steps, name),
            "forward_ratio": ratio(forwards, name),
            "peak_mb": peaks[name] / 1e6,
            "peak_ratio": peaks[name] / peaks[variants.STOCK],
        }
        for name in trainers
    }
    print(f"{args.model}, batch {args.batch_size}, {dtype}, {args.threads} threads, {args.rounds} rounds")
    print(f"{'variant':30} {'step ms':>8} {'step x':>7} {'forward x':>9} {'peak MB':>8} {'peak x':>7}")
    for name, row in rows.items():
        print(
            f"{name:30} {1000 * row['step_seconds']:8.0f} {row['step_ratio']:7.3f} {row['forward_ratio']:9.3f} "
            f"{row['peak_mb']:8.0f} {row['peak_ratio']:7.3f}"
        )
    if args.output:
        args.output.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
