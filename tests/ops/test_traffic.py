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
SAMPLES, TOKENS, WIDTH, SIZE = 2, 7, 48, 2
ROW_BYTES = SAMPLES * TOKENS * WIDTH * SIZE  # of one source

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


@pytest.fixture(scope="module", params=[5, 13], ids=["unrolled", "looped"])
def recorded(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    """How many sources, and a read of them with its LayerNorm, and its backward."""
    numbers = map(str, (request.param, SAMPLES, TOKENS, WIDTH))
    command = [sys.executable, "-c", RECORD, *numbers]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return request.param, json.loads(run.stdout)


@pytest.fixture
def launches(recorded) -> list[dict[str, Any]]:
    """The two kernels that read sources."""
    return [launch for launch in recorded[1] if launch["kernel"] != "write_kernel"]


@pytest.fixture
def sources_bytes(recorded) -> int:
    return recorded[0] * ROW_BYTES


def total(launch: dict[str, Any], names: tuple[str, ...], field: str) -> int:
    return sum(launch["arguments"].get(name, {}).get(field, 0) for name in names)


def test_forward_reads_every_source_once_and_writes_the_result_once(launches, sources_bytes):
    forward, _ = launches
    assert total(forward, ("blocks", "last"), "loaded") == sources_bytes
    assert total(forward, ("blocks", "last"), "first_loaded") == sources_bytes
    assert total(forward, ("out", "blocks", "last"), "stored") == ROW_BYTES


def test_backward_writes_every_gradient_once_and_finds_no_source_in_memory_twice(launches, sources_bytes):
    _, backward = launches
    gradients, sources = ("block_grads", "last_grad"), ("blocks", "last")
    assert total(backward, gradients, "stored") == sources_bytes
    assert total(backward, gradients, "loaded") == 0
    assert total(backward, sources, "first_loaded") == sources_bytes
    assert total(backward, sources, "loaded") <= 2 * sources_bytes
    assert total(backward, ("grad_out",), "loaded") == ROW_BYTES


def test_one_launch_per_direction_and_no_atomics(launches):
    assert [launch["kernel"] for launch in launches] == ["read_kernel", "gradient_kernel"]
    assert [launch["atomics"] for launch in launches] == [0, 0]
    for path in (ROOT / "attnres_vision/ops/triton").glob("*.py"):
        assert "tl.atomic" not in path.read_text(), path


def test_a_table_of_sources_is_written_once_per_launch_and_small(recorded):
    """Five numbers per source."""
    sources, launches = recorded
    tables = [launch for launch in launches if launch["kernel"] == "write_kernel"]
    assert len(tables) == (2 if sources > 9 else 0)
    assert all(table["arguments"]["entries"]["stored"] <= 2 * sources * 5 * 8 for table in tables)


def test_forward_moves_nothing_beyond_the_minimum_but_statistics_and_parameters(recorded, launches, sources_bytes):
    """12 bytes per source and token, the moments of the norm, what all tokens share, and the table's entries."""
    forward, _ = launches
    moved = {name: entry["first_loaded"] + entry["first_stored"] for name, entry in forward["arguments"].items()}
    assert moved.pop("entries", 0) <= recorded[0] * 5 * 8
    statistics = SAMPLES * TOKENS * 4 * (3 * recorded[0] + 2)
    parameters = WIDTH * (4 + 2 * SIZE)
    assert sum(moved.values()) == sources_bytes + ROW_BYTES + statistics + parameters
