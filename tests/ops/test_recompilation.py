"""Triton compiles a kernel anew for each kind of arguments: numbers of samples and tokens must make no difference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: the interpreter, which the other tests run in, does not compile. Tensors have real addresses,
# whose alignment counts, and nothing is launched.
SCRIPT = """
import torch, triton
from compile_targets import _NoDevice
from attnres_vision.ops.arguments import Inputs, Options
from attnres_vision.ops.triton import launch, launch_two_phase

kernels = set()

def record(*, fn, compile, **_):
    kernels.add((fn.name, str([compile[name] for name in ("signature", "constants", "configs")])))
    return True

triton.runtime.driver.set_active(_NoDevice(90))
triton.knobs.runtime.jit_cache_hook = record
for shape in ((1, 1), (1, 197), (2, 197), (3, 197), (4, 197), (16, 196), (1, 1024)):
    blocks, queries = [torch.empty(*shape, 768) for _ in range(3)], [torch.empty(768) for _ in range(6)]
    *means, lse, _, _ = launch_two_phase.forward(blocks, queries, 1e-6, 1.0, 3.0)
    for mean, query, sums in zip(means, queries, lse.unbind(0), strict=True):
        options = Options("triton", "", 0.0, 1e-6, 1.0, 4.0, 1)
        launch.forward(blocks[:1], Inputs(query, mixed=mean, lse=sums), options)
    launch.forward(blocks, Inputs(queries[0]), options)
    for number in (12, 13, 16):
        launch.forward((blocks * 6)[:number], Inputs(queries[0]), options)
print(len(kernels))
"""


def test_one_kernel_for_all_numbers_of_samples_and_tokens():
    """A read, a pass over blocks and a merge; statistics of several readers begin at any address.

    And a read of many sources, whatever their number, and what writes a table of up to 4 and of up to 16.
    """
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) == 6
