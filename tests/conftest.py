"""Settings of the whole test suite: one thread (the machine is shared), and the same random numbers for every test."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
