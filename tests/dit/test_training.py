"""Training: gradient checkpointing, compilation, LoRA, EMA, optimiser groups, precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

import attnres_vision
import dit
from tests.dit.tiny import MODELS, inputs_for, randomise_queries, relative_error, stock_model
from tests.sweeps import exhaustive

TWO_STREAMS = {"query": "condition", "condition": ["timestep", "other_stream"], "block_size": 2}
SINGLE_STREAM = ("ltx", "wan", "wan-raw-cross-attention")
ONE_STREAM = {"query": "condition", "block_size": 2}
NAMES = ["sd35", "flux", "hunyuan-video", "hunyuan-video-token-replace", "cogvideox", "mochi", "auraflow", "wan"]


def config_for(name: str, query: str) -> dict[str, Any]:
    if query != "condition":
        return {"query": query, "block_size": 2}
    return ONE_STREAM if name in SINGLE_STREAM else TWO_STREAMS


def attached(name: str, query: str = "condition", dtype: torch.dtype = torch.float64) -> Any:
    model = dit.convert(stock_model(name, dtype), config_for(name, query))
    randomise_queries(model)
    return model.train()


def gradients(model: nn.Module, batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Of one loss over several forward passes."""
    model.zero_grad()
    outputs = [model(**copy.deepcopy(batch))[0] for batch in batches]
    sum(output.pow(2).sum() for output in outputs).backward()  # type: ignore[union-attr]
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert got.keys() == wanted.keys()
    largest = max(value.abs().max().item() for value in wanted.values())
    for name, value in wanted.items():
        assert (got[name] - value).abs().max() <= tolerance * largest, name


# Gradient checkpointing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["static", "token", "condition"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_under_checkpointing_are_bit_equal(name: str, query: str) -> None:
    """Also with two forward passes before one backward pass: recomputation must not see the other pass's streams."""
    model = attached(name, query)
    batches = [inputs_for(name), inputs_for(name, seed=5)]
    wanted = gradients(model, batches)
    assert sum(".depth" in key for key in wanted) > 5
    model.enable_gradient_checkpointing()
    assert_same(gradients(model, batches), wanted)
    model.disable_gradient_checkpointing()
    assert_same(gradients(model, batches), wanted)


def test_checkpointing_that_was_on_before_the_conversion_stays_on() -> None:
    stock = stock_model("flux").train()
    stock.enable_gradient_checkpointing()
    model = dit.convert(stock, TWO_STREAMS)
    randomise_queries(model)
    batches = [inputs_for("flux"), inputs_for("flux", seed=5)]
    checkpointed = gradients(model, batches)
    model.disable_gradient_checkpointing()
    assert_same(checkpointed, gradients(model, batches))


def test_a_checkpointing_function_of_ones_own() -> None:
    calls = []

    def function(block: Any, *args: Any) -> Any:
        calls.append(type(block).__name__)
        return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False)

    model = attached("sd3")
    wanted = gradients(model, [inputs_for("sd3")])
    model.enable_gradient_checkpointing(function)
    assert_same(gradients(model, [inputs_for("sd3")]), wanted)
    assert calls == ["JointTransformerBlock"] * 3


def test_blocks_that_are_checkpointed_from_outside_say_so() -> None:
    """The streams would begin again in the recomputation, where the condition is gone: an error, not a stale one."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = attached("sd3")
    for index, block in enumerate(model.transformer_blocks):
        wrapped = checkpoint_wrapper(block)
        wrapped.context_pre_only = block.context_pre_only
        model.transformer_blocks[index] = wrapped
    output = model(**inputs_for("sd3"))[0]
    with pytest.raises(RuntimeError, match="enable_gradient_checkpointing"):
        output.sum().backward()


def test_reentrant_checkpointing_is_an_error() -> None:
    """It sees no tensor in a DepthStream, so the blocks' gradients would be lost."""
    model = attached("sd3", "static")
    model.enable_gradient_checkpointing(
        lambda block, *args: torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=True)
    )
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(**inputs_for("sd3"))


# torch.compile -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hunyuan-video", *map(exhaustive, ["sd35", "flux", "cogvideox", "wan"])])
def test_the_whole_model_compiles_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    model = attached(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = inputs_for(name)
    assert relative_error(compiled(**copy.deepcopy(inputs))[0], model(**copy.deepcopy(inputs))[0]) < 1e-12
    wanted = gradients(model, [inputs])
    assert_same(gradients(compiled, [inputs]), {f"_orig_mod.{key}": value for key, value in wanted.items()}, 1e-11)


@pytest.mark.parametrize("name", ["sd3", exhaustive("flux"), exhaustive("cogvideox")])
def test_compile_repeated_blocks(name: str) -> None:
    """Every block has another number of sources: one compilation each, so the limit has to allow for them."""
    torch._dynamo.reset()
    model = attached(name).eval()
    inputs = inputs_for(name)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        wanted = model(**copy.deepcopy(inputs))[0]
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        assert relative_error(model(**copy.deepcopy(inputs))[0], wanted) < 1e-12


# LoRA, EMA, optimisers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd35", "flux", "hunyuan-video", "cogvideox", "wan"])
def test_all_linear_lora_leaves_the_depth_parameters_alone(name: str) -> None:
    from peft import LoraConfig

    model = attached(name)
    plain = model(**inputs_for(name))[0].detach()
    names = {key for key, _ in model.named_parameters() if ".depth" in key}
    model.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
    adapted = [key for key, _ in model.named_parameters() if "lora_" in key]
    assert adapted and not any("depth" in key for key in adapted)
    assert {key for key, _ in model.named_parameters() if ".depth" in key} == names
    assert relative_error(model(**inputs_for(name))[0], plain) < 1e-12
    for key, parameter in model.named_parameters():  # the recipe of the README: LoRA and depth parameters train
        parameter.requires_grad_("lora_" in key or ".depth" in key)
    trained = gradients(model, [inputs_for(name)])
    assert all("lora_" in key or ".depth" in key for key in trained)
    assert any("lora_B" in key for key in trained) and any(".depth" in key for key in trained)


def test_only_the_depth_parameters_train() -> None:
    """From zero queries, with everything else frozen, the loss falls."""
    stock = stock_model("sd3")
    target = stock_model("sd3", seed=4)
    model = dit.convert(stock, {"block_size": 2, "query": "condition", "rank": 2})
    model.requires_grad_(False)
    for reader in attnres_vision.readers(model).values():
        reader.requires_grad_(True)
    groups = attnres_vision.depth_param_groups(model, query_lr_scale=0.5, lr=0.2)
    assert len(groups) == 1 and groups[0]["lr"] == 0.1 and groups[0]["weight_decay"] == 0.0
    optimizer = torch.optim.AdamW(groups)
    inputs = inputs_for("sd3")
    with torch.no_grad():
        wanted = target(**inputs)[0]
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (model(**inputs)[0] - wanted).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_every_depth_parameter_gets_a_gradient(name: str) -> None:
    """DDP fails over unused ones. The last block's text MLP reaches no output, so its reader has no parameters."""
    model = dit.convert(stock_model(name), ONE_STREAM if name in SINGLE_STREAM else TWO_STREAMS)
    randomise_queries(model)
    found = gradients(model, [inputs_for(name)])
    for key, _ in model.named_parameters():
        if ".depth" in key:
            assert key in found and found[key].any(), key


def test_ema() -> None:
    model = attached("sd3")
    ema = EMAModel(model.parameters(), decay=0.5, min_decay=0.5, model_cls=type(model), model_config=model.config)
    before = attnres_vision.attnres_state_dict(copy.deepcopy(model))
    ema.step(model.parameters())  # the first step copies
    randomise_queries(model, seed=8)
    ema.step(model.parameters())
    after = copy.deepcopy(attnres_vision.attnres_state_dict(model))
    ema.copy_to(model.parameters())
    for key, value in attnres_vision.attnres_state_dict(model).items():
        torch.testing.assert_close(value, (before[key] + after[key]) / 2)


# Precision -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_bf16_model_is_as_close_to_float64_as_the_stock_one(name: str) -> None:
    """Zero queries: depth attention mixes in fp32, so bf16's own error is all there is."""
    if name in ("wan", "wan-raw-cross-attention"):
        pytest.skip("Wan needs from_pretrained(torch_dtype=...) to keep its norms in fp32: test_models.py")
    exact = stock_model(name)(**inputs_for(name))[0]
    stock, inputs = stock_model(name, torch.bfloat16), inputs_for(name, torch.bfloat16)
    wanted = stock(**copy.deepcopy(inputs))[0]
    stock_error = (wanted.double() - exact).norm() / exact.norm()
    model = dit.convert(stock, {"block_size": 2})
    got = model(**copy.deepcopy(inputs))[0]
    assert got.dtype == wanted.dtype
    error = (got.double() - exact).norm() / exact.norm()
    assert error < 1.25 * stock_error + 1e-3


@pytest.mark.parametrize("name", ["sd35", "flux", "hunyuan-video", "wan", "mochi"])
def test_autocast_is_as_exact_as_with_the_stock_model(name: str) -> None:
    stock, inputs = stock_model(name, torch.float32), inputs_for(name, torch.float32)
    exact = stock(**copy.deepcopy(inputs))[0]
    model = dit.convert(copy.deepcopy(stock), config_for(name, "condition"))
    errors = []
    for each in (stock, model):
        with torch.autocast("cpu", torch.bfloat16):
            output = each(**copy.deepcopy(inputs))[0]
            output.float().pow(2).sum().backward()
        assert all(torch.isfinite(value.grad).all() for value in each.parameters() if value.grad is not None)
        errors.append((output - exact).norm() / exact.norm())
    assert errors[1] < 1.25 * errors[0] + 1e-3
