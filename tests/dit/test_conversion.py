"""A converted stock transformer computes what it computed before, in every supported class."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import attnres_vision
import dit
from tests.dit.tiny import FP32_NORMS, MODELS, inputs_for, randomise_queries, relative_error, stock_model

SINGLE_STREAM = ("ltx", "wan", "wan-raw-cross-attention")
POOLED = ("sd3", "sd35", "flux", "flux-guidance", "hunyuan-video", "hunyuan-video-token-replace", "mochi")
CONFIGS: dict[str, dict[str, Any]] = {
    "block": {"block_size": 2},
    "odd-blocks": {"num_blocks": 2, "query": "block", "rank": 2},
    "full-token": {"mode": "full", "query": "token"},
    "timestep": {"block_size": 3, "query": "condition"},
}


def tolerance(name: str, dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return 5e-6
    return 2e-7 if name in FP32_NORMS else 1e-12


@torch.no_grad()
def assert_equal_to_stock(name: str, stock: Any, config: dict[str, Any], inputs: dict[str, Any], tol: float) -> None:
    expected = stock(**copy.deepcopy(inputs))[0]
    model = dit.convert(copy.deepcopy(stock), config)
    assert relative_error(model(**copy.deepcopy(inputs))[0], expected) <= tol
    randomise_queries(model)
    changed = relative_error(model(**copy.deepcopy(inputs))[0], expected)
    assert changed > 1e-2, "the queries do nothing"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_converted_models_equal_the_stock_ones_in_float64(name: str, config: str) -> None:
    stock, inputs = stock_model(name), inputs_for(name)
    assert_equal_to_stock(name, stock, CONFIGS[config], inputs, tolerance(name, torch.float64))


@pytest.mark.parametrize("name", MODELS)
def test_converted_models_equal_the_stock_ones_in_float32_at_another_resolution(name: str) -> None:
    condition = [
        "timestep",
        *(["pooled_text"] if name in POOLED else []),
        *(["other_stream"] if name not in SINGLE_STREAM else []),
    ]
    config = {"block_size": 2, "query": "condition", "condition": condition}
    stock, inputs = stock_model(name, torch.float32), inputs_for(name, torch.float32, batch=1, size=6)
    if name == "cogvideox":  # its position embedding has one size only
        inputs = inputs_for(name, torch.float32, batch=1)
    assert_equal_to_stock(name, stock, config, inputs, tolerance(name, torch.float32))


def controlnet(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """ControlNet residuals as the model takes them; two for three blocks, so that one is used twice."""
    torch.manual_seed(3)
    residuals = [0.5 * torch.randn(2, 16, 16, dtype=torch.float64) for _ in range(2)]
    if name.startswith("sd3"):
        return {**inputs, "block_controlnet_hidden_states": residuals}
    single = {"controlnet_single_block_samples": residuals[::-1]} if name in ("flux", "chroma") else {}
    return {**inputs, "controlnet_block_samples": residuals, **single}


@pytest.mark.parametrize("name", ["sd3", "sd35", "flux", "chroma", "qwen-image"])
def test_controlnet_residuals_join_the_open_block(name: str) -> None:
    stock, inputs = stock_model(name), inputs_for(name)
    with_residuals = controlnet(name, inputs)
    with torch.no_grad():
        assert relative_error(stock(**with_residuals)[0], stock(**inputs)[0]) > 1e-2
    for config in CONFIGS.values():
        assert_equal_to_stock(name, stock, config, with_residuals, 1e-12)
    # They shift no boundary: the number of sources a reader sees does not depend on them.
    model = dit.convert(copy.deepcopy(stock), {"block_size": 2})
    seen = []
    for depth in attnres_vision.readers(model).values():
        depth.register_forward_pre_hook(lambda _, args: seen.append(len(args[0].sources())))
    with torch.no_grad():
        model(**copy.deepcopy(inputs))
        without, seen[:] = list(seen), []
        model(**with_residuals)
    assert seen == without


@pytest.mark.parametrize("skipped", [[1], [0], [0, 1]], ids=str)
def test_skip_layers_of_sd3(skipped: list[int]) -> None:
    """Skip-layer guidance; also the first block, where the streams would begin."""
    stock, inputs = stock_model("sd3"), {**inputs_for("sd3"), "skip_layers": skipped}
    for config in (
        {"block_size": 2},
        {"block_size": 2, "query": "condition", "condition": ["timestep", "other_stream"]},
    ):
        assert_equal_to_stock("sd3", stock, config, inputs, 1e-12)


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_ip_adapter(name: str) -> None:
    """Flux adds the adapter's attention to the stream, ungated; SD3 does it inside its attention."""
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    stock, inputs = stock_model(name), inputs_for(name)
    torch.manual_seed(4)
    if name == "flux":
        processors = {
            path: FluxIPAdapterAttnProcessor(16, 16, num_tokens=(4,), dtype=torch.float64)
            if path.startswith("transformer_blocks")
            else processor
            for path, processor in stock.attn_processors.items()
        }
        kwargs: dict[str, Any] = {"ip_hidden_states": [torch.randn(2, 4, 16, dtype=torch.float64)]}
    else:
        processors = {
            path: SD3IPAdapterJointAttnProcessor2_0(16, 16, head_dim=8, timesteps_emb_dim=16).double()
            for path in stock.attn_processors
        }
        kwargs = {
            "ip_hidden_states": torch.randn(2, 4, 16, dtype=torch.float64),
            "temb": torch.randn(2, 16, dtype=torch.float64),
        }
    with torch.no_grad():
        plain = stock(**inputs)[0]
        stock.set_attn_processor(processors)
        with_adapter = {**inputs, "joint_attention_kwargs": kwargs}
        assert relative_error(stock(**copy.deepcopy(with_adapter))[0], plain) > 1e-3
    for config in CONFIGS.values():
        assert_equal_to_stock(name, stock, config, with_adapter, 1e-12)


@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_a_timestep_per_token(name: str) -> None:
    """Wan 2.2's and LTX's image-to-video models give every token its own timestep, and so a query."""
    stock, inputs = stock_model(name), inputs_for(name)
    tokens = 8 if name == "wan" else 32  # Wan patches 2 x 4 x 4 by (1, 2, 2)
    inputs["timestep"] = torch.linspace(100, 900, 2 * tokens, dtype=torch.float64).view(2, tokens)
    assert_equal_to_stock(name, stock, {"block_size": 2, "query": "condition"}, inputs, 2e-7)


def test_qwen_image_with_a_second_timestep_for_the_condition_image() -> None:
    """`zero_cond_t` doubles the batch of the time embedding; the second half belongs to the condition image."""
    stock = type(stock_model("qwen-image"))(**{**MODELS["qwen-image"][1], "zero_cond_t": True}).double().eval()
    inputs = inputs_for("qwen-image")
    inputs["img_shapes"] = [[(1, 2, 4), (1, 2, 4)]] * 2
    assert_equal_to_stock("qwen-image", stock, {"block_size": 2, "query": "condition"}, inputs, 1e-12)


@pytest.mark.parametrize(
    "name", ["flux", "hunyuan-video", "hunyuan-video-token-replace", "chroma", "flux2", "auraflow"]
)
def test_single_stream_blocks_copy_no_source(name: str) -> None:
    """The sources of a block's reader are those of the block before it, the same tensors, and one sum more."""
    model = dit.convert(stock_model(name), {"mode": "full"})
    seen: list[tuple[int, ...]] = []

    def look(module: Any, args: Any) -> None:
        seen.append(tuple(source.data_ptr() for source in args[0].sources()))

    for path, depth in attnres_vision.readers(model).items():
        if "single_transformer_blocks" in path and ".norm2" not in path:
            depth.register_forward_pre_hook(look)
    with torch.no_grad():
        model(**inputs_for(name))
    assert len(seen) == 3
    for before, after in itertools.pairwise(seen):
        assert len(after) == len(before) + 1 and after[: len(before)] == before


@torch.no_grad()
@pytest.mark.parametrize("name", ["flux", "qwen-image", "chroma", "flux2"])
def test_hosts_that_clip_their_streams_in_fp16(name: str) -> None:
    """What clipping does to the reads is in tests/stream/test_stream_parts.py; here the host's own code calls it."""
    stock, inputs = stock_model(name, torch.float16), inputs_for(name, torch.float16)
    exact, exact_inputs = stock_model(name), inputs_for(name)
    error = relative_error(stock(**inputs)[0].double(), exact(**exact_inputs)[0])
    model = dit.convert(stock, {"block_size": 2})
    bounds = set()
    for depth in attnres_vision.readers(model).values():
        depth.register_forward_pre_hook(lambda _, args: bounds.add(args[0].host_view.bounds))
    assert relative_error(model(**inputs)[0].double(), exact(**exact_inputs)[0]) < 2 * error
    assert (-65504, 65504) in bounds


def test_detach_gives_the_stock_model_back() -> None:
    stock = stock_model("cogvideox")
    keys, config = list(stock.state_dict()), dict(stock.config)
    for fields in ({"block_size": 2}, {"block_size": 2, "query": "condition", "condition": ["other_stream"]}):
        model = attnres_vision.detach(dit.convert(copy.deepcopy(stock), fields))
        assert type(model) is type(stock) and list(model.state_dict()) == keys and dict(model.config) == config
        for module in model.modules():
            assert not module._forward_pre_hooks and not module._forward_hooks
            assert not [name for name in vars(module) if name.startswith("depth_")]
        with torch.no_grad():
            assert torch.equal(model(**inputs_for("cogvideox"))[0], stock(**inputs_for("cogvideox"))[0])


@pytest.mark.parametrize("name", MODELS)
def test_only_depth_keys_are_added(name: str) -> None:
    stock = stock_model(name)
    before = set(stock.state_dict())
    model = dit.convert(stock, {"block_size": 2, "query": "condition"})
    added = set(model.state_dict()) - before
    assert before <= set(model.state_dict())
    assert added == set(attnres_vision.attnres_state_dict(model))
    assert all(".depth." in key or ".depth_text." in key for key in added)
