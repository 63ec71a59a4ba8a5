"""What the training tests share: tiny configs, a tiny ImageFolder, processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from PIL import Image

from training.config.image import ImageConfig
from training.config.io import from_fields, merge
from training.loop.run import read_metrics

ROOT = Path(__file__).parents[2]
DIGITS: dict[str, Any] = {
    "model": {
        "name": "vit_tiny_patch16_224",
        "kwargs": {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2},
    },
    "data": {
        "name": "digits",
        "num_classes": 10,
        "input_size": 8,
        "batch_size": 64,
        "eval_batch_size": 450,
        "workers": 0,
    },
    "optim": {"lr": 3e-3},
    "schedule": {"steps": 6},
    "log_interval": 4,
    "cpu": True,
}


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """One thread, and no accelerate state of an earlier test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def digits(tmp_path: Path) -> Callable[..., ImageConfig]:
    """Makes a config of a two-layer ViT on digits, with changes put over it."""

    def make(changes: dict[str, Any] | None = None, folder: str = "run") -> ImageConfig:
        return from_fields(ImageConfig, merge({**DIGITS, "output_dir": str(tmp_path / folder)}, changes or {}))

    return make


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes of 40x48 colour images, four of each in `val`, five in `train`: one is held out for validation."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("ant", "bee"):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for index in range(5 if split == "train" else 4):
                pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "images"


def run(*command: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the venv's Python from the repository, with one thread."""
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=clean_env(**environment), capture_output=True, text=True
    )


def clean_env(**environment: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "WORLD", "RANK"))}
    return {**kept, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", **environment}


def losses(folder: Path) -> list[tuple[Any, ...]]:
    """Everything in the metrics that must not depend on interruptions."""
    return [
        (record["kind"], record["step"], record["loss"], record.get("grad_norm"), record.get("top1"))
        for record in read_metrics(folder)
    ]
