"""What diffusers' users do to a transformer with conditions: caches and offloading. Every class: tests/dit/suite."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

import attnres_vision
import dit
from tests.dit.tiny import FP32_NORMS, MODELS, inputs_for, randomise_queries, relative_error, stock_model

NAMES = ["sd35", "flux", "hunyuan-video", "cogvideox", "mochi", "qwen-image", "wan"]


def attached(name: str, dtype: torch.dtype = torch.float64, zero: bool = False) -> Any:
    config = {"block_size": 2, "query": "condition"}
    if name != "wan":
        config["condition"] = ["timestep", "other_stream"]
    model = dit.convert(stock_model(name, dtype), config)
    if not zero:
        randomise_queries(model)
    return model


# Caches --------------------------------------------------------------------------------------------------------------


def attention_caches(step: list[int]) -> dict[str, Any]:
    def now() -> int:
        return 500 - step[0]

    return {
        "pab": diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 1000),
            cross_attention_block_skip_range=2,
            cross_attention_timestep_skip_range=(-1, 1000),
            current_timestep_callback=now,
        ),
        "fastercache": diffusers.FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 499),  # the first two steps fill the cache
            unconditional_batch_skip_range=2,
            unconditional_batch_timestep_skip_range=(-1, 1000),
            attention_weight_callback=lambda _: 0.5,
            current_timestep_callback=now,
            is_guidance_distilled=True,
        ),
        "taylorseer": diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1),
    }


@torch.no_grad()
@pytest.mark.parametrize("cache", ["pab", "fastercache", "taylorseer"])
@pytest.mark.parametrize("name", ["flux", "hunyuan-video", "cogvideox", "wan", "qwen-image"])
def test_attention_caches_are_as_exact_as_with_the_stock_model(name: str, cache: str) -> None:
    """They keep the outputs of attention modules. At zero queries the cached steps equal the stock model's."""
    if cache == "taylorseer" and name in ("cogvideox", "wan"):
        pytest.skip("TaylorSeer's default patterns match none of its modules")
    outputs = []
    for model in (stock_model(name), attached(name, zero=True)):
        step = [0]
        caches = attention_caches(step)
        model.enable_cache(caches[cache])
        results = []
        with model.cache_context("cond"):
            for step[0] in range(4):
                inputs = inputs_for(name)
                inputs["timestep"] = inputs["timestep"] * (1 - 0.1 * step[0])
                results.append(model(**inputs)[0])
        exact = stock_model(name)(**inputs)[0]
        assert relative_error(results[-1], exact) > 1e-6, "the cache does nothing"
        model.disable_cache()
        outputs.append(results)
    for stock, ours in zip(*outputs, strict=True):
        assert relative_error(ours, stock) < (2e-7 if name in FP32_NORMS else 1e-11)


# Memory --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("name", NAMES)
def test_group_offload(name: str, kind: str) -> None:
    model = attached(name)
    wanted = model(**inputs_for(name))[0]
    device = torch.device("cpu")
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    model.enable_group_offload(onload_device=device, offload_device=device, offload_type=kind, **options)
    assert torch.equal(model(**inputs_for(name))[0], wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", ["sd35", "cogvideox", "wan"])
def test_cpu_offload_brings_the_depth_parameters_back(name: str) -> None:
    """accelerate's sequential offload keeps parameters on the meta device and loads them around each forward."""
    from accelerate import cpu_offload

    model = attached(name)
    wanted = model(**inputs_for(name))[0]
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert any(
        parameter.is_meta for reader in attnres_vision.readers(model).values() for parameter in reader.parameters()
    )
    assert relative_error(model(**inputs_for(name))[0], wanted) < 1e-12


# Attention -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA, xformers may be there")
def test_xformers_without_cuda_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="'xformers' needs CUDA"):
        attached("flux").set_attention_backend("xformers")


@pytest.mark.parametrize("name", MODELS)
def test_class_attributes_that_tools_read_are_the_base_class_ones(name: str) -> None:
    """Block classes keep their names, so device maps, context-parallel and tensor-parallel plans stay valid."""
    model = (
        attached(name)
        if name not in ("ltx", "wan-raw-cross-attention")
        else dit.convert(stock_model(name), {"block_size": 2})
    )
    base = getattr(diffusers, MODELS[name][0])
    for attribute in (
        "_no_split_modules",
        "_cp_plan",
        "_tp_plan",
        "_keep_in_fp32_modules",
        "_skip_layerwise_casting_patterns",
    ):
        assert getattr(model, attribute, None) == getattr(base, attribute, None)
    names = {type(module).__name__ for module in model.modules()}
    assert set(model._repeated_blocks) & names
