"""The Triton kernels fit into a GPU's registers and load 16 bytes at a time: a sample, compiled without a GPU.

`python benchmarks/compile_targets.py` compiles everything; it explains what is looked at. It runs in a process of its
own, where Triton compiles: in this one Triton may be set to interpret (conftest.py).
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

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("compiled") / "results.json"
    command = [sys.executable, "benchmarks/compile_targets.py", "--quick", "--targets", "90", "--output", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(run.stdout)
    assert path.exists(), run.stderr
    return json.loads(path.read_text())


def test_every_kernel_is_in_the_sample(results):
    two_phase = {"attend_blocks_kernel", "mix_blocks_kernel", "blocks_gradient_kernel"}
    assert {result["kernel"] for result in results} == {"read_kernel", "gradient_kernel"} | two_phase


def test_no_kernel_spills_registers(results):
    assert [result for result in results if result["stack"] > 0 or result["registers"] > 255] == []


def test_sources_are_loaded_sixteen_bytes_at_a_time(results):
    assert all(result["expected_loads"] > 0 for result in results)
    assert [result for result in results if result["wide_loads"] < result["expected_loads"]] == []
