"""Two processes: context parallelism and DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest

import dit
from tests.dit.tiny import stock_model

ROOT = Path(__file__).parents[2]


def run_two_processes(kind: str, names: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = subprocess.run(
        [*command, str(Path(__file__).with_name("run_parallel.py")), kind, *names],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert [line for line in run.stdout.splitlines() if line] == [f"{name}: two processes equal one" for name in names]


def test_context_parallel_plans_stay_valid() -> None:
    """Flux splits the model's inputs, Wan those of the first block, Qwen-Image also a mask at every block."""
    run_two_processes("context-parallel", ["flux", "wan", "qwen-image"])


@pytest.mark.exhaustive  # tests/training has a video model of two processes in the default run
def test_ddp_gradients_equal_those_of_one_process() -> None:
    run_two_processes("ddp", ["sd35", "flux", "hunyuan-video", "cogvideox", "auraflow"])


def test_the_mean_of_the_other_stream_cannot_be_split() -> None:
    config = {"block_size": 2, "query": "condition", "condition": ["other_stream"]}
    model = dit.convert(stock_model("flux"), config)
    with pytest.raises(ValueError, match="'other_stream' cannot be used with context parallelism"):
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
