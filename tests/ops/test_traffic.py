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
import torch

from attnres_vision.ops import dispatch
from tests.sweeps import exhaustive

# What is counted does not depend on the machine; the interpreter of Triton 3.6 fails with some versions of NumPy
pytestmark = pytest.mark.skipif(
    not dispatch.HAS_TRITON or torch.cuda.is_available(), reason="needs Triton, and is for machines without a GPU"
)

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


@pytest.fixture(scope="module", params=[pytest.param(5, id="unrolled"), exhaustive(13, id="looped")])
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


GROUP = """
import dataclasses, json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, "benchmarks")
import torch
from access import Recorder
from attnres_vision.ops import operator, two_phase
from attnres_vision.ops.collect import collect

n, samples, tokens, width, readers = map(int, sys.argv[1:6])
options = {"eps": 1e-6, "scale": 1.0, "form": "sum", "kernel": "triton"}
rows = lambda: torch.randn(samples, tokens, width, dtype=torch.bfloat16, requires_grad=True)
blocks, partials = [rows() for _ in range(n)], [rows() for _ in range(readers - 1)]
queries = [torch.randn(width, requires_grad=True) for _ in range(readers)]
with Recorder().recording() as recorder:
    first, later = two_phase.attend_blocks([collect(block) for block in blocks], queries, **options)
    reads = [first] + [
        operator.depth_attention([partial], query, earlier=earlier, **options)
        for partial, query, earlier in zip(partials, queries[1:], later)
    ]
    torch.autograd.grad(reads, [*blocks, *partials, *queries], [torch.randn_like(read) for read in reads])
print(json.dumps([dataclasses.asdict(launch) for launch in recorder.launches if launch.kernel != "write_kernel"]))
"""
READERS = 6


@pytest.fixture(scope="module", params=[pytest.param(5, id="unrolled"), exhaustive(13, id="looped")])
def group(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """How many blocks, and the launches of six readers of them, by kernel."""
    command = [sys.executable, "-c", GROUP, *map(str, (request.param, SAMPLES, TOKENS, WIDTH, READERS))]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    launches: dict[str, list[dict[str, Any]]] = {}
    for launch in json.loads(run.stdout):
        launches.setdefault(launch["kernel"], []).append(launch)
    return request.param, launches


def test_a_group_reads_its_blocks_three_times_in_all(group):
    """Forward, for the means that backward wants again, and for the gradients: one pass and one walk each."""
    blocks, launches = group
    for kernel in ("attend_blocks_kernel", "mix_blocks_kernel", "blocks_gradient_kernel"):
        (launch,) = launches[kernel]
        assert total(launch, ("blocks",), "loaded") == blocks * ROW_BYTES, kernel
        assert launch["atomics"] == 0
    assert total(launches["attend_blocks_kernel"][0], ("mixed",), "stored") == READERS * ROW_BYTES
    assert total(launches["mix_blocks_kernel"][0], ("mixed",), "stored") == (READERS - 1) * ROW_BYTES


def test_a_group_writes_every_gradient_once(group):
    """In fp32, and nothing is added to what is not there yet."""
    blocks, launches = group
    (launch,) = launches["blocks_gradient_kernel"]
    assert total(launch, ("block_grads",), "stored") == 2 * blocks * ROW_BYTES
    assert total(launch, ("block_grads",), "loaded") == 0
    assert total(launch, ("grads", "opening"), "loaded") == (READERS + 1) * ROW_BYTES


def test_a_later_reader_moves_its_mean_once_each_way(group):
    _, launches = group
    assert len(launches["read_kernel"]) == len(launches["gradient_kernel"]) == READERS - 1
    for forward, backward in zip(launches["read_kernel"], launches["gradient_kernel"], strict=True):
        assert total(forward, ("mixed", "last", "out"), "loaded") == 2 * ROW_BYTES
        assert total(backward, ("mixed", "last", "grad_out"), "loaded") == 3 * ROW_BYTES
        assert total(backward, ("mixed_grad", "last_grad"), "stored") == 2 * ROW_BYTES
