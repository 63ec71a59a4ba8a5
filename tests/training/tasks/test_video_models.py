"""Predictions and samples are those of the classes' own pipelines in diffusers; objectives are diffusers' own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from tests.dit.tiny import MODELS, stock_model
from tests.training.video_pipelines import PIPELINES
from training.config.base import OptimConfig
from training.config.video import ObjectiveConfig, VideoModelConfig
from training.data import encoders
from training.evaluation import samples
from training.loop.optim import make_optimizer
from training.tasks import video_models
from training.tasks.objective import LEVELS, make_objective, squared_error
from training.tasks.video_models import build_model, predict

CAPTION, OTHER = "a photo of the sea", "two dogs at night"
CALL: dict[str, dict[str, Any]] = {
    "hunyuan-video": {"guidance_scale": 6.0, "true_cfg_scale": 4.0},
    "hunyuan-video-1.5": {},
    "mochi": {"guidance_scale": 4.0},
    "wan": {"guidance_scale": 4.0},
    "ltx": {"guidance_scale": 4.0},
    "cogvideox": {"guidance_scale": 4.0},
}


def pipeline_of(name: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    made, options, frames, side = PIPELINES[name]
    pipe = made()
    pipe.set_progress_bar_config(disable=True)
    return pipe, {**options, "num_frames": frames, "height": side, "width": side}


def latents_of(pipe: Any, arguments: dict[str, Any], noise: Tensor, **call: Any) -> Tensor:
    """What the pipeline makes of the noise, (B, C, F, H, W)."""
    if isinstance(pipe, diffusers.CogVideoXPipeline):
        noise = noise.transpose(1, 2)
    if isinstance(pipe, diffusers.LTXPipeline):
        noise = pipe._pack_latents(noise)
    call = {**arguments, **call, "num_inference_steps": 3, "output_type": "latent"}
    output = pipe(prompt=CAPTION, negative_prompt=OTHER, latents=noise, **call).frames
    if isinstance(pipe, diffusers.CogVideoXPipeline):
        return output.transpose(1, 2)
    return output


@pytest.mark.parametrize("name", CALL)
def test_predictions_are_those_of_the_pipeline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled with guidance, over the noise levels that the pipeline chose: any mistake in an argument would show."""
    pipe, arguments = pipeline_of(name)
    if name == "mochi":
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    if name == "ltx":  # the tiny VAE reduces less than LTX's
        monkeypatch.setattr(video_models, "_VAE_STEPS", pipe.vae_temporal_compression_ratio)
        monkeypatch.setattr(video_models, "_VAE_STRIDE", pipe.vae_spatial_compression_ratio)
    options = {key: value for key, value in arguments.items() if key not in ("num_frames", "height", "width")}
    with torch.no_grad():
        text, other = (encoders.embed_caption(pipe, caption, options) for caption in (CAPTION, OTHER))
    text = {key: value[None] for key, value in text.items()}
    scale = 2.0 if name == "hunyuan-video-1.5" else 4.0
    config = VideoModelConfig(name=MODELS[name][0], guidance=6.0)

    def model(noisy: Tensor, timestep: Tensor, text: Any) -> Tensor:
        return predict(pipe.transformer, config, noisy, timestep, text)

    guided = samples.guided(model, text, other, scale)
    noise = torch.randn(1, *latent_shape(pipe, name, arguments), generator=torch.Generator().manual_seed(1))
    expected = latents_of(pipe, arguments, noise, **CALL[name])
    with torch.no_grad():
        if name == "cogvideox":
            pipe.scheduler.set_timesteps(3)
            sample: Any = noise
            for timestep in pipe.scheduler.timesteps:
                prediction = guided(sample, timestep.expand(1))
                sample = pipe.scheduler.step(prediction, timestep, sample, return_dict=False)[0]
        else:
            sigmas = 1 - pipe.scheduler.sigmas if name == "mochi" else pipe.scheduler.sigmas
            sample = noise
            for sigma, following in itertools.pairwise(sigmas):
                sample = sample + (following - sigma) * guided(sample, (sigma * LEVELS).expand(1))
    if name == "ltx":
        sample = pipe._pack_latents(sample)
    assert expected.shape == sample.shape
    assert (sample - expected).abs().max() < 1e-4 * expected.abs().max()


def latent_shape(pipe: Any, name: str, arguments: dict[str, Any]) -> tuple[int, ...]:
    with torch.no_grad():
        clip = torch.zeros(1, 3, arguments["num_frames"], arguments["height"], arguments["width"])
        return tuple(pipe.vae.encode(clip).latent_dist.mode().shape[1:])


def test_sampling_is_that_of_the_hunyuan_pipeline_with_the_same_shift() -> None:
    pipe, arguments = pipeline_of("hunyuan-video")
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    noise = torch.randn(1, *latent_shape(pipe, "hunyuan-video", arguments), generator=torch.Generator().manual_seed(1))
    expected = latents_of(pipe, arguments, noise, guidance_scale=1.0)
    text = encoders.embed_caption(pipe, CAPTION, {key: arguments[key] for key in PIPELINES["hunyuan-video"][1]})
    text = {key: value[None] for key, value in text.items()}
    config = VideoModelConfig(guidance=1.0)
    with torch.no_grad():
        sample = make_objective(ObjectiveConfig(shift=7.0)).sample(
            lambda noisy, timestep: predict(pipe.transformer, config, noisy, timestep, text), noise, 3
        )
    assert (sample - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("kind", ["flow", "v"])
def test_a_perfect_prediction_samples_the_clip(kind: str, shift: float) -> None:
    objective = make_objective(ObjectiveConfig(kind=kind, shift=shift))
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(2, 3, 2, 4, 4, generator=generator) for _ in range(2))

    def perfect(noisy: Tensor, timestep: Tensor) -> Tensor:
        level = objective.levels(objective.sigmas[timestep.long()] if kind == "v" else timestep / LEVELS)
        sigma = (timestep / LEVELS if kind == "flow" else objective.sigma(level)).view(-1, 1, 1, 1, 1)
        if kind == "flow":
            return (noisy - clean) / sigma
        return ((1 - sigma**2).sqrt() * noisy - clean) / sigma

    assert torch.allclose(objective.sample(perfect, noise, 10), clean, atol=1e-3)
    assert torch.equal(objective.add_noise(clean, noise, objective.levels(torch.ones(2)))[0], noise[0])


def test_flow_levels_are_those_of_the_stock_scheduler_shifted_once() -> None:
    objective = make_objective(ObjectiveConfig(shift=3.0))
    stock = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    level = torch.tensor([0, 400, 999])
    assert torch.equal(objective.timestep(level), stock.timesteps[level])
    half = objective.levels(torch.tensor([0.5]))
    assert objective.sigma(half).item() == pytest.approx(0.5, abs=2e-3)
    clean, noise = torch.zeros(1, 1, 1, 2, 2), torch.ones(1, 1, 1, 2, 2)
    assert objective.add_noise(clean, noise, half).mean().item() == pytest.approx(objective.sigma(half).item())
    assert torch.equal(objective.target(clean, noise, half), noise)


def test_velocity_error_is_cogvideox_weighted_error_of_the_clip() -> None:
    """diffusers' training script compares clips, weighted by 1 / (1 - alphas_cumprod)."""
    objective = make_objective(ObjectiveConfig(kind="v", shift=3.0))
    generator = torch.Generator().manual_seed(0)
    clean, noise, output = (torch.randn(3, 2, 2, 2, 2, generator=generator) for _ in range(3))
    level = torch.tensor([10, 500, 950])
    noisy = objective.add_noise(clean, noise, level)
    theirs = objective.scheduler.get_velocity(output, noisy, level)
    weights = 1 / (1 - objective.scheduler.alphas_cumprod[level])
    expected = weights * (theirs - clean).square().flatten(1).mean(1)
    assert torch.allclose(squared_error(output, objective.target(clean, noise, level)), expected.float(), rtol=1e-4)


@pytest.mark.parametrize("timesteps", ["logit_normal", "uniform", "mode"])
def test_training_levels_follow_the_distribution_and_the_generator(timesteps: str) -> None:
    objective = make_objective(ObjectiveConfig(timesteps=timesteps))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([objective.draw(generator) for _ in range(2000)])
    assert drawn.min() >= 0 and drawn.max() < LEVELS
    middle = ((drawn > 250) & (drawn < 750)).float().mean().item()
    expected = {"logit_normal": 0.73, "uniform": 0.5, "mode": 0.7}[timesteps]
    assert middle == pytest.approx(expected, abs=0.06)
    again = torch.Generator().manual_seed(0)
    assert torch.equal(drawn[:9], torch.cat([objective.draw(again) for _ in range(9)]))


def tiny(train: str, **changes: Any) -> VideoModelConfig:
    cls, kwargs, _ = MODELS["hunyuan-video"]
    attnres = {"num_blocks": 2, "query": "condition", "rank": 2}
    return VideoModelConfig(name=cls, kwargs=kwargs, residual="attnres", attnres=attnres, train=train, **changes)


@pytest.mark.parametrize("train", ["depth", "lora", "depth+lora", "full"])
def test_only_what_is_asked_for_is_trained(train: str) -> None:
    if "lora" in train:
        pytest.importorskip("peft")
    torch.manual_seed(0)
    model: Any = build_model(tiny(train))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.1))
    for _ in range(2):  # B of an adapter, W of a condition start at zero: the other factor moves in the second step
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    depth = {name for name in before if ".depth" in name}
    lora = {name for name in before if "lora_" in name}
    assert depth and bool(lora) == ("lora" in train)
    expected = {"depth": depth, "lora": lora, "depth+lora": depth | lora, "full": set(before)}[train]
    assert changed == expected


@pytest.mark.parametrize("name", CALL)
def test_every_trained_parameter_has_a_gradient(name: str) -> None:
    """DDP waits for all of them."""
    cls, kwargs, _ = MODELS[name]
    torch.manual_seed(0)
    config = VideoModelConfig(name=cls, kwargs=kwargs, residual="attnres", attnres={"num_blocks": 2})
    model: Any = build_model(config)
    text = {"text": torch.randn(2, 5, 8), "text_mask": torch.ones(2, 5), "pooled": torch.randn(2, 8)}
    predict(model, config, torch.randn(2, 4, 2, 4, 4), torch.tensor([300.0, 800.0]), text).square().mean().backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert [name for name, parameter in trained.items() if parameter.grad is None] == []


def test_zero_init_starts_blocks_as_the_identity() -> None:
    torch.manual_seed(0)
    model: Any = build_model(tiny("full", zero_init=True))
    condition = torch.randn(1, 16)
    for block in model.transformer_blocks:
        assert not block.norm1.linear(condition).any() and not block.norm1_context.linear(condition).any()
    assert not model.proj_out.weight.any()


def test_a_lora_target_that_fits_nothing_is_an_error() -> None:
    pytest.importorskip("peft")
    config = tiny("lora")
    config.lora.targets = ["no_such_layer"]
    with pytest.raises(ValueError, match=r"model\.lora\.targets must name layers"):
        video_models.build_model(config)


def test_the_standard_residual_is_the_stock_model() -> None:
    cls, kwargs, _ = MODELS["wan"]
    assert type(build_model(VideoModelConfig(name=cls, kwargs=kwargs))) is type(stock_model("wan"))


@pytest.mark.parametrize("query", [{}, {"query": "condition"}, {"query": "token", "rank": 2}], ids=str)
def test_adapters_start_the_same_in_all_variants(query: dict[str, Any]) -> None:
    """The queries' own random numbers must not move those of the adapters, which are drawn after them."""
    pytest.importorskip("peft")
    tiny, adapters = {"name": MODELS["wan"][0], "kwargs": dict(MODELS["wan"][1])}, []
    attnres = {"train": "depth+lora", "residual": "attnres", "attnres": {"block_size": 2, **query}}
    for residual in ({"train": "lora"}, attnres):
        torch.manual_seed(0)
        model = build_model(VideoModelConfig(**tiny, **residual))
        adapters.append({name: p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name})
    assert adapters[0]
    torch.testing.assert_close(adapters[1], adapters[0], rtol=0, atol=0)


def test_a_checkpoint_with_queries_is_not_taken_for_a_stock_one(tmp_path: Path) -> None:
    name, kwargs, _ = MODELS["wan"]
    config = VideoModelConfig(name=name, kwargs=dict(kwargs), residual="attnres", attnres={"block_size": 2})
    build_model(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pretrained must be a stock checkpoint, got an AttnRes one"):
        build_model(VideoModelConfig(name=name, pretrained=str(tmp_path)))
