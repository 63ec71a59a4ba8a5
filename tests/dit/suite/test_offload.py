"""Offloading and casting, over every class: what diffusers' own model tests do, and accelerate's dispatch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import attnres_vision
from tests.dit.suite.hosts import (
    assert_depth_is,
    default_model,
    depth_values,
    every_class,
    every_class_exhaustively,
    output,
)
from tests.dit.tiny import inputs_for, relative_error, stock_model

CPU = torch.device("cpu")
EXHAUSTIVE = pytest.mark.exhaustive


# accelerate ----------------------------------------------------------------------------------------------------------


def device_map(model: Any, device: str) -> dict[str, str]:
    """Every other child of the model on `device`, blocks one by one: as `infer_auto_device_map` cuts them."""
    places: dict[str, str] = {}
    for name, child in model.named_children():
        paths = [f"{name}.{index}" for index in range(len(child))] if isinstance(child, torch.nn.ModuleList) else [name]
        for path in paths:
            places[path] = device if len(places) % 2 else "cpu"
    for name, _ in [*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)]:
        places[name] = "cpu"
    return places


@every_class
@pytest.mark.parametrize("way", ["sequential", *(pytest.param(w, marks=EXHAUSTIVE) for w in ("model", "disk"))])
def test_accelerate_offload(name: str, way: str, tmp_path: Path) -> None:
    """Parameters are on the meta device between the forward passes, and those of the readers come back too."""
    from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload

    model = default_model(name)
    wanted = output(model, name)
    if way == "sequential":
        cpu_offload(model, execution_device=CPU)
    elif way == "model":
        model, hook = cpu_offload_with_hook(model, execution_device=CPU)
    else:
        disk_offload(model, tmp_path, execution_device=CPU)
    if way != "model":
        assert all(p.is_meta for reader in attnres_vision.readers(model).values() for p in reader.parameters())
    for _ in range(2):
        assert torch.equal(output(model, name), wanted)
    if way == "model":
        hook.offload()
        assert torch.equal(output(model, name), wanted)


@every_class_exhaustively()
def test_a_device_map_with_disk(name: str, tmp_path: Path) -> None:
    """`dispatch_model`, with blocks on the CPU between blocks on the disk: what `device_map="auto"` becomes."""
    from accelerate import dispatch_model

    model = default_model(name)
    wanted = output(model, name)
    dispatch_model(model, device_map(model, "disk"), main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert any(parameter.is_meta for key, parameter in model.named_parameters() if ".depth" in key)
    assert torch.equal(output(model, name), wanted)


@every_class
@pytest.mark.parametrize("checkpoint", [pytest.param("own", marks=EXHAUSTIVE), "stock"])
def test_from_pretrained_with_a_device_map(name: str, checkpoint: str, tmp_path: Path) -> None:
    """diffusers' disk offload: the checkpoint's parameters go to the offload folder, readers' included."""
    own = checkpoint == "own"
    model = default_model(name, zero=not own)
    wanted = output(model, name)
    (model if own else stock_model(name, torch.float32)).save_pretrained(tmp_path / "model")
    places = device_map(model, "disk")
    options: dict[str, Any] = {} if own else {"attnres": model.config.attnres}
    loaded = type(model).from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "offload"), **options
    )
    assert relative_error(output(loaded, name), wanted) < 1e-5
    assert relative_error(output(loaded, name), wanted) < 1e-5


# Group offload -------------------------------------------------------------------------------------------------------


@every_class
@pytest.mark.parametrize(
    "kind", ["block_level", "leaf_level", *(pytest.param(k, marks=EXHAUSTIVE) for k in ("block_level of 2", "disk"))]
)
def test_group_offload(name: str, kind: str, tmp_path: Path) -> None:
    model = default_model(name)
    wanted = output(model, name)
    options: dict[str, Any] = {"offload_type": kind.split(" ")[0], "num_blocks_per_group": 1}
    if kind == "block_level of 2":
        options["num_blocks_per_group"] = 2
    elif kind == "disk":
        options = {"offload_type": "leaf_level", "offload_to_disk_path": str(tmp_path)}
    model.enable_group_offload(onload_device=CPU, offload_device=CPU, **options)
    for _ in range(2):
        assert torch.equal(output(model, name), wanted)


def test_group_offload_streams_need_an_accelerator() -> None:
    """diffusers' own error; docs/diffusers.md and tests/gpu have the case with CUDA."""
    with pytest.raises(ValueError, match="use_stream=False"):
        default_model("flux").enable_group_offload(onload_device=CPU, use_stream=True, offload_type="leaf_level")


# Casting -------------------------------------------------------------------------------------------------------------


@every_class
def test_layerwise_casting(name: str) -> None:
    """fp8 storage of what diffusers stores in fp8 in the stock model; depth parameters keep their dtype and values."""
    stock, zero, model = stock_model(name, torch.float32), default_model(name, zero=True), default_model(name)
    before = depth_values(model)
    plain = output(model, name)
    for each in (stock, zero, model):
        each.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert_depth_is(model, before)
    stored = {key for key, value in model.state_dict().items() if value.dtype == torch.float8_e4m3fn}
    assert stored == {key for key, value in stock.state_dict().items() if value.dtype == torch.float8_e4m3fn}
    inputs = inputs_for(name, torch.float32)
    with torch.no_grad():
        assert relative_error(zero(**copy.deepcopy(inputs))[0], stock(**inputs)[0]) < 1e-5
    # And with queries: the numbers are those of the same rounded weights without casting
    rounded = default_model(name)
    with torch.no_grad():
        for key, parameter in rounded.named_parameters():
            if key in stored:
                parameter.copy_(parameter.to(torch.float8_e4m3fn).to(torch.float32))
    if stored:
        assert not torch.equal(output(model, name), plain)
    assert relative_error(output(model, name), output(rounded, name)) < 1e-6


@every_class_exhaustively()
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16], ids=str)
def test_layerwise_casting_to_half_precision(name: str, compute: torch.dtype) -> None:
    """A model in half precision, as diffusers' memory test has it: finite, and as close to fp32 as the stock model."""
    model = default_model(name, compute)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=compute)
    found = output(model, name, compute)
    assert found.dtype == compute and torch.isfinite(found).all()
