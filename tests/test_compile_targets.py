"""The Triton kernels fit into a GPU's registers and load 16 bytes at a time: a sample, compiled without a GPU.

`python benchmarks/compile_targets.py` compiles everything; it explains what is looked at. It runs in a process of its
own, where Triton compiles: in this one Triton may be set to interpret (conftest.py).
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm

import attnres_vision
from attnres_vision.ops import dispatch

pytestmark = pytest.mark.skipif(not dispatch.HAS_TRITON, reason="needs Triton")

ROOT = Path(__file__).parents[1]

# Nothing is compiled: what the library would launch, for every option, against what the row says
LABELS = """
import dataclasses, itertools
import compile_targets

reads = list(itertools.chain(
    compile_targets.reads((2, 10), (192,)), compile_targets.option_reads((3, 10), (192,)), compile_targets.quick_reads()
))
for read in reads:
    for launched in compile_targets.launches(read, 90):
        for wrong in ({"width": 8}, {"accumulate": not read.accumulate}, {"norm": "rms" if read.norm != "rms" else ""}):
            try:
                compile_targets.check_configuration(dataclasses.replace(read, **wrong), launched)
            except (RuntimeError, ValueError):
                continue
            by_all = "width" in wrong
            by_backward = "accumulate" in wrong and launched.kernel.__name__.endswith("gradient_kernel")
            by_norm = "norm" in wrong and launched.kernel.__name__ in ("read_kernel", "gradient_kernel")
            as_wide = read.dtype == "fp32" and read.queries  # sums have the dtype that gradients have anyway
            assert not by_all and not by_norm and (not by_backward or as_wide), (read, launched.kernel, wrong)
print(len(reads))
"""


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


def test_a_row_is_named_after_what_is_compiled():
    """And a wrong name raises: `accumulate` once stood in rows of kernels that did not add in place."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    run = subprocess.run([sys.executable, "-c", LABELS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 40


def test_a_variant_is_named_after_its_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    variants = importlib.import_module("variants")
    given = [None, {"mode": "full"}, {"num_blocks": 3, "query": "token", "rank": 2, "two_phase": False}]
    names = ["stock", "full static", "block N=3 token rank 2, one-phase"]
    assert list(variants.named(*given)) == names
    for options, other in itertools.product(given, given):
        model = timm.create_model("test_vit", img_size=32, num_classes=0)
        if options is not None:
            attnres_vision.attach(model, options)
        if options is other:
            variants.check(model, options)
        else:
            with pytest.raises(RuntimeError, match="the row is named"):
                variants.check(model, other)
