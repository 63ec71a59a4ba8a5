"""Attention processors, backends and fused projections, every cache of diffusers, guidance hooks, and residuals that
a ControlNet or an IP-adapter adds to the stream: over every class."""

from __future__ import annotations

import contextlib
from typing import Any

import diffusers
import pytest
import torch
from diffusers import hooks
from torch import Tensor, nn

import dit
from attnres_vision.stream.stream import DepthStream
from tests.dit.suite.hosts import KINDS, NAMES, default_model, every_class, every_class_exhaustively, output
from tests.dit.tiny import MODELS, inputs_for, relative_error, stock_model


def host_has(name: str, attribute: str) -> bool:
    return hasattr(getattr(diffusers, MODELS[name][0]), attribute)


def having(attribute: str) -> Any:
    return pytest.mark.parametrize("name", [name for name in NAMES if host_has(name, attribute)])


# Attention -----------------------------------------------------------------------------------------------------------


class Silent:
    """A processor that computes what another one does and gives nothing back of it."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.processor(*args, **kwargs)
        return tuple(map(torch.zeros_like, result)) if isinstance(result, tuple) else torch.zeros_like(result)


@having("attn_processors")
def test_attention_processors(name: str) -> None:
    """The stock model's names, and a processor of one's own has the effect that it has there."""
    stock, zero, model = stock_model(name, torch.float32), default_model(name, zero=True), default_model(name)
    assert model.attn_processors.keys() == stock.attn_processors.keys()
    wanted = output(model, name)
    model.set_attn_processor(dict(model.attn_processors))
    assert torch.equal(output(model, name), wanted)
    for each in (stock, zero, model):
        for module in each.modules():
            # The signature of the processor decides what diffusers passes on, so it is asked for by the wrapper
            if hasattr(module, "processor"):
                inner = module.processor
                silent = type(f"Silent{type(inner).__name__}", (Silent,), {"__call__": _with_signature(inner)})
                module.processor = silent(inner)
    assert relative_error(output(zero, name), output(stock, name)) < 1e-5
    assert relative_error(output(model, name), wanted) > 1e-3


def _with_signature(processor: Any) -> Any:
    import functools

    @functools.wraps(type(processor).__call__)
    def call(self: Silent, *args: Any, **kwargs: Any) -> Any:
        return Silent.__call__(self, *args, **kwargs)

    return call


@every_class
@pytest.mark.parametrize("backend", [pytest.param("native", marks=pytest.mark.exhaustive), "_native_math"])
def test_attention_backends(name: str, backend: str) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    model = default_model(name)
    wanted = output(model, name)
    with attention_backend(backend):
        assert relative_error(output(model, name), wanted) < 1e-5
    model.set_attention_backend(backend)
    try:
        assert relative_error(output(model, name), wanted) < 1e-5
    finally:
        model.reset_attention_backend()
    assert torch.equal(output(model, name), wanted)


@pytest.mark.parametrize("name", ["sd3", *(n for n in NAMES if host_has(n, "fuse_qkv_projections"))])
def test_fused_projections(name: str) -> None:
    model = default_model(name)
    if name == "sd35":  # a second attention without text: diffusers' fused processor does not know it
        for each in (stock_model(name, torch.float32), model):
            each.fuse_qkv_projections()
            with pytest.raises(AttributeError, match="NoneType"):
                output(each, name)
        return
    wanted = output(model, name)
    model.fuse_qkv_projections()
    assert relative_error(output(model, name), wanted) < 1e-5
    model.unfuse_qkv_projections()
    assert relative_error(output(model, name), wanted) < 1e-5


# Caches --------------------------------------------------------------------------------------------------------------

STEPS = 4


def attention_caches(step: list[int]) -> dict[str, tuple[Any, Any]]:
    """Caches of attention outputs: the config, and the function that applies it to a model without `enable_cache`."""

    def now() -> int:
        return 500 - step[0]

    everywhere = (-1, 1000)
    found = {
        "pab": (
            hooks.PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2,
                spatial_attention_timestep_skip_range=everywhere,
                cross_attention_block_skip_range=2,
                cross_attention_timestep_skip_range=everywhere,
                current_timestep_callback=now,
            ),
            hooks.apply_pyramid_attention_broadcast,
        ),
        "fastercache": (
            hooks.FasterCacheConfig(
                spatial_attention_block_skip_range=2,
                spatial_attention_timestep_skip_range=(-1, 499),  # the first two steps fill the cache
                unconditional_batch_skip_range=2,
                unconditional_batch_timestep_skip_range=everywhere,
                attention_weight_callback=lambda _: 0.5,
                current_timestep_callback=now,
                is_guidance_distilled=True,
            ),
            hooks.apply_faster_cache,
        ),
    }
    if hasattr(hooks, "TaylorSeerCacheConfig"):
        options: dict[str, Any] = {
            "cache_interval": 2,
            "disable_cache_before_step": 1,
            "taylor_factors_dtype": torch.float32,
        }
        apply = hooks.apply_taylorseer_cache
        found["taylorseer"] = hooks.TaylorSeerCacheConfig(**options), apply
        found["taylorseer-lite"] = hooks.TaylorSeerCacheConfig(**options, use_lite_mode=True), apply
    if hasattr(hooks, "TextKVCacheConfig"):
        found["text-kv"] = hooks.TextKVCacheConfig(), hooks.apply_text_kv_cache
    return found


def residual_caches() -> dict[str, tuple[Any, Any]]:
    found = {"first-block": (hooks.FirstBlockCacheConfig(threshold=0.5), hooks.apply_first_block_cache)}
    if hasattr(hooks, "MagCacheConfig"):
        ratios = hooks.MagCacheConfig(num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS, retention_ratio=0.1)
        calibration = hooks.MagCacheConfig(num_inference_steps=STEPS, calibrate=True)
        found |= {"mag": (ratios, hooks.apply_mag_cache), "mag-calibrate": (calibration, hooks.apply_mag_cache)}
    if hasattr(hooks, "SeaCacheConfig"):

        def raw_vision(module: Any, args: Any, kwargs: Any) -> list[Tensor]:
            return [torch.zeros(4, 1, 4, 4)]

        found["sea"] = hooks.SeaCacheConfig(threshold=10.0, raw_vision_callback=raw_vision), hooks.apply_sea_cache
    return found


ATTENTION_CACHES, RESIDUAL_CACHES = list(attention_caches([0])), list(residual_caches())
# All that diffusers has; what a new version adds must be put into one of the two lists and the docs.
KNOWN = {
    "PyramidAttentionBroadcastConfig", "FasterCacheConfig", "TaylorSeerCacheConfig", "TextKVCacheConfig",
    "FirstBlockCacheConfig", "MagCacheConfig", "SeaCacheConfig",
}  # fmt: skip


def test_every_cache_of_diffusers_is_in_the_table() -> None:
    found = {name for name in vars(hooks) if name.endswith("Config") and hasattr(hooks, f"apply_{_snake(name)}")}
    guidance = {"LayerSkipConfig"}
    assert found - guidance <= KNOWN


def _snake(name: str) -> str:
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in name.removesuffix("Config")).removeprefix("_")
    return words.replace("taylor_seer", "taylorseer").replace("text_k_v", "text_kv")


@torch.no_grad()
def run(model: Any, name: str, step: list[int], moving: bool) -> list[Tensor]:
    """Some steps of a sampler, of different timesteps or all of the same inputs."""
    results = []
    for step[0] in range(STEPS):
        inputs = inputs_for(name, torch.float32)
        if moving:
            inputs["timestep"] = inputs["timestep"] * (1 - 0.1 * step[0])
        where: dict[str, Any] = {}
        context = getattr(model, "cache_context", None)
        with contextlib.nullcontext() if context is None else context("cond", **where):
            results.append(model(**inputs)[0])
    return results


# TaylorSeer finds its modules by names that these classes do not have: it does nothing, in the stock model too.
UNTOUCHED = {
    "taylorseer": ("cogvideox", "mochi", "cogview4", "ltx", "wan"),
    "text-kv": tuple(NAMES),  # for Nucleus-MoE alone
}


CASES = [
    pytest.param(name, cache, marks=pytest.mark.exhaustive)
    if cache == "text-kv" and name not in KINDS
    else (name, cache)
    for name in NAMES
    for cache in ATTENTION_CACHES
]


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_attention_caches(name: str, cache: str) -> None:
    """With queries: of equal inputs, what is cached is what would be computed. Without: the stock model's numbers."""
    if not host_has(name, "enable_cache") and cache.startswith("taylorseer"):
        pytest.skip("TaylorSeer needs cache_context, which this class does not have in diffusers either")
    step = [0]

    def cached(model: Any) -> Any:
        config, apply = attention_caches(step)[cache]
        if host_has(name, "enable_cache"):
            model.enable_cache(config)
        else:
            apply(model, config)
        return model

    model = default_model(name)
    plain = run(model, name, step, moving=False)
    for ours, wanted in zip(run(cached(model), name, step, moving=False), plain, strict=True):
        assert relative_error(ours, wanted) < 1e-5
    stock = stock_model(name, torch.float32)
    exact = run(stock, name, step, moving=True)
    theirs = run(cached(stock), name, step, moving=True)
    effect = max(relative_error(a, b) for a, b in zip(theirs, exact, strict=True))
    assert (effect > 1e-3) == (name not in UNTOUCHED.get(cache, ())), "what the cache does has changed"
    for ours, wanted in zip(run(cached(default_model(name, zero=True)), name, step, moving=True), theirs, strict=True):
        assert relative_error(ours, wanted) < 1e-5
    if host_has(name, "enable_cache"):
        model.disable_cache()
    assert torch.equal(run(model, name, step, moving=False)[0], plain[0]) or not host_has(name, "enable_cache")


@pytest.mark.parametrize("cache", RESIDUAL_CACHES)
@having("enable_cache")
def test_residual_caches_are_an_error_before_any_forward_pass(name: str, cache: str) -> None:
    model = default_model(name)
    with pytest.raises(ValueError, match="residual cache reuses the difference") as error:
        model.enable_cache(residual_caches()[cache][0])
    assert "PyramidAttentionBroadcastConfig" in str(error.value) and not model.is_cache_enabled


@pytest.mark.parametrize("cache", RESIDUAL_CACHES)
@pytest.mark.parametrize("name", ["flux", "cogvideox", "wan"])
def test_residual_caches_applied_by_hand_are_an_error(name: str, cache: str) -> None:
    """`apply_...` does not ask the model, so the first thing that it does with a stream says it."""
    model = default_model(name)
    config, apply = residual_caches()[cache]
    apply(model, config)
    # SeaCache copies the stream first
    refused = pytest.raises((TypeError, AttributeError), match=r"residual caches|reads the residual stream")
    with refused, torch.no_grad():
        for index in range(STEPS):
            context: dict[str, Any] = (
                {"step_index": index, "sigma": 1 - index / STEPS, "num_inference_steps": STEPS}
                if cache == "sea"
                else {}
            )
            with model.cache_context("cond", **context):
                model(**inputs_for(name, torch.float32))


@pytest.mark.skipif("taylorseer" not in ATTENTION_CACHES, reason="diffusers has no TaylorSeer")
@pytest.mark.parametrize("name", ["flux", "flux2", "wan"])
@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"cache_identifiers": [r"(transformer_)?blocks\.1"]}, "cannot be extrapolated"),
        ({"skip_predict_identifiers": [r"(transformer_)?blocks\.0"]}, "not all blocks behind it"),
    ],
    ids=["extrapolates", "skips"],
)
def test_taylorseer_on_blocks_is_an_error_before_any_forward_pass(name: str, patterns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        default_model(name).enable_cache(hooks.TaylorSeerCacheConfig(**patterns))


# Guidance ------------------------------------------------------------------------------------------------------------


def skip_configs() -> dict[str, Any]:
    return {
        "blocks": {},
        "attention": {"skip_ff": False},
        "attention scores": {"skip_attention": False, "skip_ff": False, "skip_attention_scores": True},
        "mlp": {"skip_attention": False},
    }


@pytest.mark.parametrize("kind", list(skip_configs()))
@every_class_exhaustively()
def test_layer_skip(name: str, kind: str) -> None:
    """Skip-layer and perturbed-attention guidance: at zero queries the stock model's numbers, or its own error."""
    outputs: list[Any] = []  # diffusers' own block metadata swaps the streams of a skipped Flux block
    fqn = "joint_transformer_blocks" if name == "auraflow" else "blocks" if name == "wan" else "transformer_blocks"
    for model in (stock_model(name, torch.float32), default_model(name, zero=True), default_model(name)):
        plain = output(model, name)
        try:
            hooks.apply_layer_skip(model, hooks.LayerSkipConfig(indices=[0], fqn=fqn, **skip_configs()[kind]))
            outputs.append(output(model, name))
        except Exception as error:
            outputs.append(error)
        else:
            assert kind != "blocks" or outputs[-1].shape != plain.shape or relative_error(outputs[-1], plain) > 1e-4
    stock, zero, found = outputs
    if isinstance(stock, Exception):
        assert type(zero) is type(found) is type(stock)
    else:
        assert zero.shape == stock.shape
        assert relative_error(zero, stock) < 1e-5 and torch.isfinite(found).all()


# Residuals that are added to the stream from outside -----------------------------------------------------------------

CONTROLS = {
    "sd35": "block_controlnet_hidden_states",
    "flux": "controlnet_block_samples",
    "chroma": "controlnet_block_samples",
    "qwen-image": "controlnet_block_samples",
}


def samples(name: str, count: int, seed: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 16, 16, generator=generator) for _ in range(count)]


@torch.no_grad()
@pytest.mark.parametrize("name", CONTROLS)
def test_controlnet_residuals(name: str) -> None:
    stock, zero, model = stock_model(name, torch.float32), default_model(name, zero=True), default_model(name)
    blocks = len(stock.transformer_blocks)
    more: dict[str, Any] = {CONTROLS[name]: samples(name, blocks)}
    if hasattr(stock, "single_transformer_blocks"):
        more["controlnet_single_block_samples"] = samples(name, len(stock.single_transformer_blocks), 8)
    wanted = output(stock, name, **more)
    assert relative_error(wanted, output(stock, name)) > 1e-2
    assert relative_error(output(zero, name, **more), wanted) < 1e-5

    # With queries, the residual of block 0 joins the open block's sum and changes no other source
    plain = output(model, name)
    seen: list[tuple[Tensor, ...]] = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        stream = kwargs.get("hidden_states", args[0] if args else None)
        assert isinstance(stream, DepthStream)
        seen.append(tuple(source.clone() for source in stream.sources()))

    handle = model.transformer_blocks[1].register_forward_pre_hook(look, with_kwargs=True, prepend=True)
    sample = samples(name, 1)[0]
    zeros = [torch.zeros_like(sample)] * (blocks - 1)
    output(model, name)
    controlled = output(model, name, **{CONTROLS[name]: [sample, *zeros]})
    handle.remove()
    before, after = seen
    assert all(torch.equal(a, b) for a, b in zip(before[:-1], after[:-1], strict=True))
    torch.testing.assert_close(after[-1] - before[-1], sample, atol=1e-5, rtol=1e-5)
    assert relative_error(controlled, plain) > 1e-3


class Projection(nn.Module):
    """`encoder_hid_proj` of an IP-adapter: one list entry per adapter."""

    def forward(self, embeddings: list[Tensor]) -> list[Tensor]:
        return embeddings


@torch.no_grad()
@pytest.mark.parametrize("name", ["flux", "sd35"])
def test_ip_adapters(name: str) -> None:
    """Their attention is one more write to the image stream (Flux) or part of the attention's output (SD3)."""
    from diffusers.models import attention_processor

    embeddings = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(9))

    def with_adapter(model: Any, scale: float = 1.0) -> Any:
        torch.manual_seed(10)
        if name == "flux":
            from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

            model.encoder_hid_proj = Projection()
            for block in model.transformer_blocks:
                block.attn.set_processor(FluxIPAdapterAttnProcessor(16, 8, num_tokens=(3,), scale=scale))
        else:
            for block in model.transformer_blocks:
                make = attention_processor.SD3IPAdapterJointAttnProcessor2_0
                block.attn.set_processor(make(16, 8, 8, timesteps_emb_dim=16, scale=scale))
        return model

    def adapted(model: Any) -> Tensor:
        if name == "flux":
            given: dict[str, Any] = {"ip_adapter_image_embeds": [embeddings]}
        else:
            given = {"ip_hidden_states": embeddings, "temb": torch.ones(2, 16)}
        return output(model, name, joint_attention_kwargs=given)

    stock, plain = with_adapter(stock_model(name, torch.float32)), output(default_model(name), name)
    assert relative_error(adapted(stock), output(stock_model(name, torch.float32), name)) > 1e-3
    assert relative_error(adapted(with_adapter(default_model(name, zero=True))), adapted(stock)) < 1e-5
    assert relative_error(adapted(with_adapter(default_model(name))), plain) > 1e-3
    assert relative_error(adapted(with_adapter(default_model(name), scale=0.0)), plain) < 1e-5


def test_image_conditioned_cross_attention_of_wan() -> None:
    """Wan's image-to-video models: image tokens go to the cross-attention, and depth reads stay what they are."""
    config = {**MODELS["wan"][1], "image_dim": 8, "added_kv_proj_dim": 24}
    torch.manual_seed(0)
    stock = diffusers.WanTransformer3DModel(**config).eval()
    images = torch.randn(2, 3, 8)
    model = dit.models.AttnResWanTransformer3DModel.from_config(  # type: ignore[attr-defined]
        stock.config
    ).eval()
    model.load_state_dict(stock.state_dict(), strict=False)
    wanted = output(stock, "wan", encoder_hidden_states_image=images)
    assert relative_error(output(model, "wan", encoder_hidden_states_image=images), wanted) < 1e-5
