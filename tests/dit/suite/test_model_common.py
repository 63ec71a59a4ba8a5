"""What diffusers tests of every model, of every class in `dit.models`: default `attnres` arguments, random queries.

Offloading, LoRA, attention processors and caches are in the other files of this folder.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

import attnres_vision
import dit
from attnres_vision.attach.plan import reader_places
from tests.dit.suite.hosts import NAMES, default_model, every_class, output
from tests.dit.tiny import FP32_NORMS, MODELS, inputs_for, randomise_queries, relative_error, stock_model
from tests.sweeps import exhaustive


def class_of(name: str) -> Any:
    return getattr(dit.models, f"AttnRes{MODELS[name][0]}")


def backward(model: nn.Module, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the gradients of all parameters."""
    model.zero_grad()
    inputs = inputs_for(name, torch.float32)
    if name == "chroma":  # diffusers checkpoints its single-stream blocks without their mask: test below
        del inputs["attention_mask"]
    result = model(**inputs)[0]
    result.square().mean().backward()
    found = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    return result.detach(), found


def kept_in_fp32(model: Any, key: str) -> bool:
    return any(part in (model._keep_in_fp32_modules or ()) for part in key.split("."))


def assert_has(model: nn.Module, wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    """All parameters, bit for bit, in `dtype` but for those that the class keeps in fp32."""
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        assert value.dtype == (torch.float32 if kept_in_fp32(model, key) else dtype), key
        assert torch.equal(value, wanted[key].to(value.dtype)), key


def test_every_class_has_a_config_here() -> None:
    assert {f"AttnRes{MODELS[name][0]}" for name in NAMES} == set(dit.models.__all__)


# Construction and forward --------------------------------------------------------------------------------------------


@every_class
def test_no_argument_is_needed_and_the_config_says_what_is_used(name: str) -> None:
    model = class_of(name)(**MODELS[name][1])
    sublayers = 1 + max(place.index for place in reader_places(model))
    assert sublayers < 10  # of several configs fewer than the default's 8 blocks
    expected = attnres_vision.AttnResConfig(num_blocks=min(8, sublayers))
    assert model.attnres_config == expected
    assert model.config["attnres"] == expected.to_dict()
    assert class_of(name).from_config(model.config).attnres_config == expected
    written_before = {**expected.to_dict(), "num_blocks": sublayers}  # explicit, and in range
    assert class_of(name)(**MODELS[name][1], attnres=written_before).attnres_config.num_blocks == sublayers
    with pytest.raises(ValueError, match=f"num_blocks must be between 1 and {sublayers}"):
        class_of(name)(**MODELS[name][1], attnres={"num_blocks": sublayers + 1})


@every_class
def test_the_forward_pass_is_deterministic(name: str) -> None:
    model = default_model(name)
    first = output(model, name)
    assert torch.isfinite(first).all() and torch.equal(output(model, name), first)
    assert torch.equal(output(copy.deepcopy(model), name), first)
    with torch.no_grad():
        assert torch.equal(model(**{**inputs_for(name, torch.float32), "return_dict": True}).sample, first)
        assert relative_error(stock_model(name, torch.float32)(**inputs_for(name, torch.float32))[0], first) > 1e-3


# Saving and loading --------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float32, {}),
    "sharded": (torch.float32, {"max_shard_size": "10KB"}),
    "variant": (torch.float16, {"variant": "fp16"}),
    "sharded-bf16": (torch.bfloat16, {"max_shard_size": "10KB"}),
}


@pytest.mark.parametrize("way", WAYS)
@every_class
def test_save_pretrained_and_from_pretrained(name: str, way: str, tmp_path: Path) -> None:
    dtype, options = WAYS[way]
    model = default_model(name).to(dtype)
    model.save_pretrained(tmp_path, **options)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["_class_name"] == class_of(name).__name__
    assert written["attnres"] == model.attnres_config.to_dict() and written["attnres"]["num_blocks"]
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == way.startswith("sharded")
    options = {key: value for key, value in options.items() if key == "variant"}
    if options:
        assert [path.name for path in tmp_path.glob("*.safetensors")] == ["diffusion_pytorch_model.fp16.safetensors"]
        with pytest.raises(OSError, match="no file named diffusion_pytorch_model"):
            class_of(name).from_pretrained(tmp_path)
    loaded = class_of(name).from_pretrained(tmp_path, torch_dtype=dtype, **options)
    assert type(loaded) is class_of(name) and not loaded.training
    assert loaded.attnres_config == model.attnres_config
    assert_has(loaded, dict(model.named_parameters()), dtype)
    if dtype == torch.float32:
        assert torch.equal(output(loaded, name), output(model, name))


def test_a_saved_default_loaded_with_fewer_layers_is_a_number_out_of_range(tmp_path: Path) -> None:
    """The saved model had those blocks; `attnres={}` chooses anew."""
    default_model("sd3").save_pretrained(tmp_path)
    fewer = {"num_layers": 1, "low_cpu_mem_usage": False}
    with pytest.raises(ValueError, match=r"num_blocks must be between 1 and 2 for this model \(2 sublayers\), got 6"):
        class_of("sd3").from_pretrained(tmp_path, **fewer)
    assert class_of("sd3").from_config(tmp_path, num_layers=1, attnres={}).attnres_config.num_blocks == 2


@pytest.mark.parametrize("kept", [[], ["depth", "depth_text"]], ids=["own", "depth"])
@every_class
def test_torch_dtype_and_modules_kept_in_fp32(
    name: str, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host parameters as in the stock class; depth parameters too, and kept in fp32 where a user says so."""
    model = default_model(name)
    model.save_pretrained(tmp_path)
    own = class_of(name)._keep_in_fp32_modules or []
    monkeypatch.setattr(class_of(name), "_keep_in_fp32_modules", [*own, *kept])
    loaded = class_of(name).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_has(loaded, dict(model.named_parameters()), torch.bfloat16)
    stock = getattr(diffusers, MODELS[name][0]).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    found = {key: value.dtype for key, value in loaded.named_parameters() if ".depth" not in key}
    assert found == {key: value.dtype for key, value in stock.named_parameters()}
    if kept:
        assert all(value.dtype == torch.float32 for value in attnres_vision.attnres_state_dict(loaded).values())
    exact_stock = type(stock).from_pretrained(tmp_path)
    errors = []
    for exact, rounded in ((exact_stock, stock), (model, loaded)):
        wanted, got = output(exact, name), output(rounded, name, torch.bfloat16)
        assert got.dtype == torch.bfloat16
        errors.append(((got.float() - wanted).norm() / wanted.norm()).item())
    # Another function than the stock model's, so not the same error: of its size, or that of a few roundings of 2**-9
    assert errors[1] < 3 * errors[0] + 0.03


# Training ------------------------------------------------------------------------------------------------------------


@every_class
def test_gradient_checkpointing_changes_no_bit(name: str) -> None:
    model = default_model(name).train()
    wanted, gradients = backward(model, name)
    assert sum(".depth" in key for key in gradients) > 5
    model.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing
    got, checkpointed = backward(model, name)
    assert torch.equal(got, wanted) and checkpointed.keys() == gradients.keys()
    for key, value in gradients.items():
        assert torch.equal(checkpointed[key], value), key


def test_chroma_checkpoints_without_its_mask_as_in_diffusers() -> None:
    """A limit of the host, named in docs/diffusers.md. When this fails, diffusers has mended it: use the mask above."""
    for model in (stock_model("chroma", torch.float32), default_model("chroma")):
        wanted = output(model, "chroma")
        model.train().enable_gradient_checkpointing()
        inputs = inputs_for("chroma", torch.float32)
        assert relative_error(model(**inputs)[0], wanted) > 1e-4


@every_class
def test_a_training_step_and_its_ema(name: str, tmp_path: Path) -> None:
    model = default_model(name).train()
    ema = EMAModel(model.parameters(), decay=0.5, min_decay=0.5, model_cls=type(model), model_config=model.config)
    optimizer = torch.optim.SGD(attnres_vision.depth_param_groups(model, lr=1e-2))
    ema.step(model.parameters())  # the first step copies
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    _, gradients = backward(model, name)
    optimizer.step()
    ema.step(model.parameters())
    after = dict(model.named_parameters())
    assert all(torch.isfinite(value).all() for value in gradients.values())
    assert all(gradients[key].any() for key in attnres_vision.attnres_state_dict(model))
    assert all(not torch.equal(after[key], before[key]) for key, value in gradients.items() if value.abs().max() > 1e-4)
    for shadow, key in zip(ema.shadow_params, before, strict=True):
        torch.testing.assert_close(shadow, (before[key] + after[key]) / 2)

    ema.save_pretrained(tmp_path)
    loaded = EMAModel.from_pretrained(tmp_path, type(model))
    assert all(torch.equal(a, b) for a, b in zip(loaded.shadow_params, ema.shadow_params, strict=True))
    assert loaded.optimization_step == ema.optimization_step
    averaged = type(model).from_pretrained(tmp_path)
    assert averaged.attnres_config == model.attnres_config
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    assert torch.equal(output(averaged, name), output(model.eval(), name))
    ema.restore(model.parameters())


# Compilation ---------------------------------------------------------------------------------------------------------

COMPILED = [name if name == "flux" else exhaustive(name) for name in NAMES]  # two streams, joined in the end

LAYERS = ("num_layers", "num_single_layers", "num_mmdit_layers", "num_single_dit_layers")


@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_also_when_the_shape_changes(name: str) -> None:
    """Without a layer of each kind: the time goes into the number of blocks."""
    torch._dynamo.reset()
    config = {key: value - 1 if key in LAYERS else value for key, value in MODELS[name][1].items()}
    model = class_of(name)(**config).double().eval()
    randomise_queries(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tolerance = 1e-6 if name in FP32_NORMS else 1e-12
    for size in (4, 2):
        got = output(compiled, name, torch.float64, size=size)
        assert relative_error(got, output(model, name, torch.float64, size=size)) < tolerance
