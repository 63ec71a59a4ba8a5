"""What Attention Residuals cost an MMDiT: training step and forward pass, stock diffusers against variants.

    python benchmarks/dit_overhead.py --model sd3             # width 512, 12 layers, 1024 image tokens: about 8 minutes
    python benchmarks/dit_overhead.py --model hunyuan-video   # 4 dual- and 8 single-stream blocks
    python benchmarks/dit_overhead.py --smoke

One process. Rounds of all variants are interleaved, so that a disturbance of the machine meets all of them; the table
gives the median of the per-round ratios to stock. Peak memory is the peak of tensor bytes alive in a training step
(parameters, gradients and optimiser state included). `cat` is the number of `torch.cat` calls in one forward pass: a
join of the streams that copied the sources would make one for each source.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import variants
from peak_memory import peak_bytes
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dit

VARIANTS = variants.named(
    None,
    {"num_blocks": 8},
    {"num_blocks": 8, "query": "condition"},
    {"num_blocks": 8, "query": "token", "rank": 32},
)


def sd3(width: int, layers: int, side: int, text_tokens: int = 77) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=2 * side, patch_size=2, in_channels=4, out_channels=4, num_layers=layers, attention_head_dim=64,
        num_attention_heads=width // 64, joint_attention_dim=128, caption_projection_dim=width,
        pooled_projection_dim=128, pos_embed_max_size=2 * side,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2 * side, 2 * side),
        "encoder_hidden_states": torch.randn(1, text_tokens, 128),
        "pooled_projections": torch.randn(1, 128),
        "timestep": torch.tensor([500.0]),
    }
    return model, inputs


def hunyuan_video(width: int, layers: int, side: int) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=width // 64, attention_head_dim=64, num_layers=layers // 3,
        num_single_layers=layers - layers // 3, num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=128,
        pooled_projection_dim=128, rope_axes_dim=(16, 24, 24),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 4, side // 2, side // 2),
        "encoder_hidden_states": torch.randn(1, 77, 128),
        "encoder_attention_mask": torch.ones(1, 77, dtype=torch.long),
        "pooled_projections": torch.randn(1, 128),
        "guidance": torch.tensor([6000.0]),
        "timestep": torch.tensor([500.0]),
    }
    return model, inputs


MODELS: dict[str, Callable[[int, int, int], tuple[nn.Module, dict[str, Any]]]] = {
    "sd3": sd3,
    "hunyuan-video": hunyuan_video,
}


class Trainer:
    """One variant with its optimiser."""

    def __init__(self, make: Callable[[], tuple[nn.Module, dict[str, Any]]], attnres: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = make()
        if attnres is not None:
            dit.convert(self.model, attnres)
        variants.check(self.model, attnres)
        for name, parameter in self.model.named_parameters():
            if ".depth." in name:  # a trained model's queries are not zero
                nn.init.normal_(parameter, std=0.05)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def describe(self) -> str:
        """Width, depth, tokens of both streams and dtype, of the model and inputs that there are."""
        blocks = [module for name in ("transformer_blocks", "single_transformer_blocks")
                  for module in getattr(self.model, name, [])]  # fmt: skip
        config, latents = self.model.config, self.inputs["hidden_states"]
        sizes = [config.patch_size] * 2 if latents.dim() == 4 else [config.patch_size_t, *[config.patch_size] * 2]
        tokens = math.prod(length // size for length, size in zip(latents.shape[2:], sizes, strict=True))
        width = config.num_attention_heads * config.attention_head_dim
        text, dtype = self.inputs["encoder_hidden_states"].shape[1], variants.dtype_of(self.model)
        return f"width {width}, {len(blocks)} layers, {tokens} + {text} tokens, {dtype}"

    def step(self) -> None:
        self.model(**self.inputs, return_dict=False)[0].pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def forward(self) -> None:
        self.model(**self.inputs, return_dict=False)

    def cats(self) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            self.forward()
        return sum(event.count for event in prof.key_averages() if event.key == "aten::cat")


def clock(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="sd3")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--side", type=int, default=32, help="side of the token grid: 32 gives 1024 image tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--smoke", action="store_true", help="tiny models and two rounds: does the script run?")
    args = parser.parse_args()
    names = [args.model]
    if args.smoke:
        names, args.width, args.layers, args.side, args.rounds = sorted(MODELS), 64, 6, 8, 2

    torch.set_num_threads(args.threads)
    report = {name: measure(name, args) for name in names}
    if args.output:
        args.output.write_text(json.dumps(report, indent=2))


def measure(model: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Time all variants of a model, print their table and return it."""
    trainers = {
        name: Trainer(lambda: MODELS[model](args.width, args.layers, args.side), attnres)
        for name, attnres in VARIANTS.items()
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {"step": [], "forward": []} for name in trainers}
    for round_ in range(-2, args.rounds):  # two rounds of warm-up
        for name, trainer in trainers.items():
            times = {"step": clock(trainer.step), "forward": clock(trainer.forward)}
            if round_ >= 0:
                for kind, value in times.items():
                    seconds[name][kind].append(value)

    def ratio(name: str, kind: str) -> float:
        pairs = zip(seconds[name][kind], seconds[variants.STOCK][kind], strict=True)
        return statistics.median(ours / stock for ours, stock in pairs)

    peaks = {name: peak_bytes(trainer.model, trainer.optimizer, trainer.step) for name, trainer in trainers.items()}
    rows = {
        name: {
            "step_seconds": statistics.median(seconds[name]["step"]),
            "step_ratio": ratio(name, "step"),
            "forward_ratio": ratio(name, "forward"),
            "peak_mb": peaks[name] / 1e6,
            "peak_ratio": peaks[name] / peaks[variants.STOCK],
            "cat": float(trainer.cats()),
        }
        for name, trainer in trainers.items()
    }
    print(f"{model}, {trainers[variants.STOCK].describe()}, {args.threads} threads")
    print(f"{'variant':26} {'step ms':>8} {'step x':>7} {'forward x':>9} {'peak MB':>8} {'peak x':>7} {'cat':>4}")
    for name, row in rows.items():
        print(
            f"{name:26} {1000 * row['step_seconds']:8.0f} {row['step_ratio']:7.3f} {row['forward_ratio']:9.3f} "
            f"{row['peak_mb']:8.0f} {row['peak_ratio']:7.3f} {row['cat']:4.0f}"
        )
    return rows


if __name__ == "__main__":
    main()
