"""What offloading needs a GPU for: streams, and layers that are computed elsewhere than where they are kept."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("needs diffusers", allow_module_level=True)
from tests.dit.suite.hosts import default_model, every_class
from tests.dit.tiny import inputs_for, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@torch.no_grad()
def on_gpu(model: Any, name: str) -> torch.Tensor:
    inputs = {
        key: value.to(CUDA) if isinstance(value, torch.Tensor) else value
        for key, value in inputs_for(name, torch.float32).items()
    }
    result: torch.Tensor = model(**inputs)[0]
    return result.cpu()


def expected(name: str) -> torch.Tensor:
    return on_gpu(default_model(name).to(CUDA), name)


@every_class
@pytest.mark.parametrize("record", [False, True], ids=["", "record_stream"])
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload_with_streams(name: str, kind: str, record: bool) -> None:
    """Readers come with their module: a group is loaded by the hook of a leaf or block, before our hooks run."""
    model = default_model(name)
    model.enable_group_offload(
        onload_device=CUDA, offload_device=CPU, offload_type=kind, num_blocks_per_group=1, use_stream=True,
        record_stream=record,
    )  # fmt: skip
    wanted = expected(name)
    for _ in range(3):  # the first pass finds out the order that the later ones prefetch in
        assert relative_error(on_gpu(model, name), wanted) < 1e-5


@every_class
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload(name: str, kind: str) -> None:
    model = default_model(name)
    model.enable_group_offload(onload_device=CUDA, offload_device=CPU, offload_type=kind, num_blocks_per_group=1)
    assert relative_error(on_gpu(model, name), expected(name)) < 1e-5


@every_class
@pytest.mark.parametrize("way", ["sequential", "model"])
def test_accelerate_offload(name: str, way: str) -> None:
    from accelerate import cpu_offload, cpu_offload_with_hook

    model = default_model(name)
    if way == "sequential":
        cpu_offload(model, execution_device=CUDA)
    else:
        model, _ = cpu_offload_with_hook(model, execution_device=CUDA)
    for _ in range(2):
        assert relative_error(on_gpu(model, name), expected(name)) < 1e-5


@every_class
def test_a_device_map_over_gpu_and_cpu(name: str) -> None:
    """The stream's sources go along to the device of the next block."""
    from accelerate import dispatch_model

    from tests.dit.suite.test_offload import device_map

    model = default_model(name)
    dispatch_model(model, device_map(model, "cuda"), main_device="cuda")
    assert relative_error(on_gpu(model, name), expected(name)) < 1e-5


@every_class
def test_layerwise_casting(name: str) -> None:
    model, plain = default_model(name, torch.bfloat16).to(CUDA), default_model(name, torch.bfloat16).to(CUDA)
    used = torch.cuda.memory_allocated
    before = used()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    assert used() <= before
    inputs = {
        key: value.to(CUDA) if isinstance(value, torch.Tensor) else value
        for key, value in inputs_for(name, torch.bfloat16).items()
    }
    with torch.no_grad():
        found, rough = model(**inputs)[0], plain(**inputs)[0]
    assert torch.isfinite(found).all() and found.shape == rough.shape
