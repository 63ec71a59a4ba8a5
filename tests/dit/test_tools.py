"""What diffusers' users do to a transformer: caches, offloading, casting, attention backends, fused projections."""

from __future__ import annotations

import copy
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

RESIDUAL_CACHES: dict[str, Any] = {
    "first-block": diffusers.FirstBlockCacheConfig(threshold=0.1),
    **(
        {"mag": diffusers.MagCacheConfig(num_inference_steps=4, mag_ratios=[1.0] * 4)}
        if hasattr(diffusers, "MagCacheConfig")
        else {}
    ),
    **({"sea": diffusers.SeaCacheConfig()} if hasattr(diffusers, "SeaCacheConfig") else {}),
}


@pytest.mark.parametrize("cache", RESIDUAL_CACHES)
@pytest.mark.parametrize("name", ["flux", "hunyuan-video", "cogvideox", "qwen-image", "wan"])
def test_a_residual_cache_is_an_error_that_names_the_others(name: str, cache: str) -> None:
    model = attached(name)
    with pytest.raises(ValueError, match="residual cache reuses the difference") as error:
        model.enable_cache(RESIDUAL_CACHES[cache])
    assert "PyramidAttentionBroadcastConfig" in str(error.value) and not model.is_cache_enabled


def test_a_residual_cache_that_is_applied_by_hand_is_an_error() -> None:
    model = attached("flux")
    diffusers.apply_first_block_cache(model, RESIDUAL_CACHES["first-block"])
    with (
        pytest.raises(TypeError, match="PyramidAttentionBroadcastConfig"),
        torch.no_grad(),
        model.cache_context("cond"),
    ):
        model(**inputs_for("flux"))


def attention_caches(step: list[int]) -> dict[str, Any]:
    def now() -> int:
        return 500 - step[0]

    caches = {
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
    }
    if hasattr(diffusers, "TaylorSeerCacheConfig"):
        caches["taylorseer"] = diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1)
    return caches


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
        if cache not in caches:
            pytest.skip(f"diffusers {diffusers.__version__} has no such cache")
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


@pytest.mark.parametrize("name", NAMES)
def test_layerwise_casting_leaves_the_depth_parameters_in_their_dtype(name: str) -> None:
    """fp8 storage of what diffusers stores in fp8 in the stock model, and nothing else."""
    stock = stock_model(name, torch.float32)
    model = attached(name, torch.float32, zero=True)
    for each in (stock, model):
        each.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert all(value.dtype == torch.float32 for value in attnres_vision.attnres_state_dict(model).values())
    assert any(value.dtype == torch.float8_e4m3fn for value in model.state_dict().values())
    with torch.no_grad():
        inputs = inputs_for(name, torch.float32)
        assert relative_error(model(**copy.deepcopy(inputs))[0], stock(**inputs)[0]) < 1e-5


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


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_attention_backends(name: str) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    model = attached(name)
    wanted = model(**inputs_for(name))[0]
    with attention_backend("native"):  # set_attention_backend would change a process-wide setting
        assert relative_error(model(**inputs_for(name))[0], wanted) < 1e-12
    model.set_attention_backend("native")
    try:
        assert relative_error(model(**inputs_for(name))[0], wanted) < 1e-12
    finally:
        model.reset_attention_backend()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA, xformers may be there")
def test_xformers_without_cuda_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="'xformers' needs CUDA"):
        attached("flux").set_attention_backend("xformers")


@torch.no_grad()
@pytest.mark.parametrize("name", ["sd3", "flux", "hunyuan-video", "cogvideox", "qwen-image", "wan"])
def test_fused_projections(name: str) -> None:
    model = attached(name)
    wanted = model(**inputs_for(name))[0]
    model.fuse_qkv_projections()
    assert relative_error(model(**inputs_for(name))[0], wanted) < 1e-12
    model.unfuse_qkv_projections()
    assert relative_error(model(**inputs_for(name))[0], wanted) < 1e-12


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
