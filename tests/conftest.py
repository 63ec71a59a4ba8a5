"""Settings of the whole test suite: one thread (the machine is shared), and the same random numbers for every test."""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter then, which has to be chosen before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def triton_device() -> str:
    """Where the Triton kernels are tested: on the GPU if there is one, else on CPU tensors by the interpreter."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"
