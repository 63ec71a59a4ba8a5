"""What a read costs in memory traffic, counted in Triton's interpreter: the kernels' promise to their users.

In a process of its own, since TRITON_INTERPRET=1 must be set before the kernels are imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnres_vision.ops import dispatch

pytestmark = pytest.mark.skipif(not dispatch.HAS_TRITON, reason="needs Triton")

ROOT = Path(__file__).parents[2]
SOURCES, SAMPLES, TOKENS, WIDTH, SIZE = 5, 2, 7, 48, 2

RECORD = """
import dataclasses, json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, "benchmarks")
import torch
from access import Recorder
from attnres_vision import ops

n, samples, tokens, width = map(int, sys.argv[1:5])
sources = [torch.randn(samples, tokens, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(n)]
query = torch.randn(width, requires_grad=True)
norm = torch.nn.LayerNorm(width, dtype=torch.bfloat16)
with ops.backend("triton"), Recorder().recording() as recorder:
    out = ops.depth_attention(sources, query, norm=norm)
    torch.autograd.grad(out, [*sources, query, *norm.parameters()], torch.randn_like(out))
print(json.dumps([dataclasses.asdict(launch) for launch in recorder.launches]))
"""


@pytest.fixture(scope="module")
def launches() -> list[dict[str, Any]]:
    """A read of five sources with its LayerNorm, and its backward."""
    numbers = map(str, (SOURCES, SAMPLES, TOKENS, WIDTH))
    command = [sys.executable, "-c", RECORD, *numbers]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def total(launch: dict[str, Any], names: tuple[str, ...], field: str) -> int:
    return sum(launch["arguments"].get(name, {}).get(field, 0) for name in names)


def test_forward_reads_every_source_once_and_writes_the_result_once(launches):
    forward, _ = launches
    row_bytes = SAMPLES * TOKENS * WIDTH * SIZE
    assert total(forward, ("blocks", "last"), "loaded") == SOURCES * row_bytes
    assert total(forward, ("blocks", "last"), "first_loaded") == SOURCES * row_bytes
    assert total(forward, ("out",), "stored") == row_bytes
    assert total(forward, ("out", "blocks", "last"), "stored") == row_bytes


def test_backward_writes_every_gradient_once_and_finds_no_source_in_memory_twice(launches):
    _, backward = launches
    row_bytes = SAMPLES * TOKENS * WIDTH * SIZE
    gradients, sources = ("block_grads", "last_grad"), ("blocks", "last")
    assert total(backward, gradients, "stored") == SOURCES * row_bytes
    assert total(backward, gradients, "loaded") == 0
    assert total(backward, sources, "first_loaded") == SOURCES * row_bytes
    assert total(backward, sources, "loaded") <= 2 * SOURCES * row_bytes
    assert total(backward, ("grad_out",), "loaded") == row_bytes


def test_one_launch_per_direction_and_no_atomics(launches):
    assert [launch["kernel"] for launch in launches] == ["read_kernel", "gradient_kernel"]
    assert [launch["atomics"] for launch in launches] == [0, 0]
    for path in (ROOT / "attnres_vision/ops/triton").glob("*.py"):
        assert "tl.atomic" not in path.read_text(), path


def test_forward_moves_nothing_beyond_the_minimum_but_statistics_and_parameters(launches):
    """12 bytes per source and token, the moments of the norm, and what all tokens share."""
    forward, _ = launches
    row_bytes = SAMPLES * TOKENS * WIDTH * SIZE
    found = sum(entry["first_loaded"] + entry["first_stored"] for entry in forward["arguments"].values())
    statistics = SAMPLES * TOKENS * 4 * (3 * SOURCES + 2)
    parameters = WIDTH * (4 + 2 * SIZE)
    assert found == (SOURCES + 1) * row_bytes + statistics + parameters
