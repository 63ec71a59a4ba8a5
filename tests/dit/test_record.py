"""record_depth_weights on MMDiTs: per stream, per timestep, and what the conditions do to the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import attnres_vision
import dit
from attnres_vision import record_depth_weights
from tests.dit.pipelines import generate, make
from tests.dit.tiny import inputs_for, randomise_queries, stock_model


def attached(name: str, **config: Any) -> Any:
    model = dit.convert(stock_model(name), {"block_size": 2, **config})
    randomise_queries(model)
    return model


@torch.no_grad()
def test_names_show_the_stream() -> None:
    model = attached("flux")
    with record_depth_weights(model) as record:
        model(**inputs_for("flux"))
    assert list(record.mean()) == [
        name for name, reader in attnres_vision.readers(model).items() if reader.query is not None
    ]
    assert list(record.mean(stream="text")) == [
        "transformer_blocks.0.norm2_context (text)",
        "transformer_blocks.1.norm1_context (text)",
        "transformer_blocks.1.norm2_context (text)",
    ]
    assert list(record.mean(stream="joint")) == [
        f"single_transformer_blocks.{index}.norm (joint)" for index in range(3)
    ]
    assert list(record.mean(stream="image"))[-1] == "norm_out (image)"
    assert record.source_names()["transformer_blocks.1.norm2 (image)"] == ["embedding", "block 1", "block 2 (open)"]
    for weights in record.mean().values():
        assert torch.allclose(weights.sum(), torch.ones((), dtype=weights.dtype)) and weights.std() > 1e-3


@torch.no_grad()
def test_a_module_that_reads_both_streams_has_two_records() -> None:
    model = attached("cogvideox")
    with record_depth_weights(model) as record:
        model(**inputs_for("cogvideox"))
    image, text = (record.mean()[f"transformer_blocks.1.norm1 ({stream})"] for stream in ("image", "text"))
    assert image.shape == text.shape == (2,) and not torch.allclose(image, text, atol=1e-3)


@torch.no_grad()
def test_weights_per_timestep() -> None:
    model = attached("sd3", query="condition")
    inputs = inputs_for("sd3")
    with record_depth_weights(model, per_token=True) as record:
        for steps in ([900.0, 500.0], [500.0, 100.0]):
            model(**{**inputs, "timestep": torch.tensor(steps, dtype=torch.float64)})
    assert record.timesteps.tolist() == [900.0, 500.0, 500.0, 100.0]
    name = "transformer_blocks.1.norm2 (image)"
    by_step = record.by_timestep()[name]
    assert list(by_step) == [900.0, 500.0, 100.0]
    first, second = record.per_token[name]  # (n, B, T, heads)
    assert torch.allclose(by_step[900.0], first[:, 0].mean((1, 2)))
    assert torch.allclose(by_step[500.0], (first[:, 1].mean((1, 2)) + second[:, 0].mean((1, 2))) / 2)
    assert not torch.allclose(by_step[900.0], by_step[100.0], atol=1e-3)


def test_weights_per_denoising_step_of_a_pipeline() -> None:
    """Classifier-free guidance makes two samples of every step."""
    pipe, arguments = make("sd3")
    pipe.transformer = dit.convert(pipe.transformer, {"block_size": 2, "query": "condition"})
    randomise_queries(pipe.transformer)
    with record_depth_weights(pipe.transformer) as record:
        generate(pipe, {**arguments, "num_inference_steps": 3})
    steps = pipe.scheduler.timesteps.tolist()
    assert len(steps) == 3 and record.timesteps.tolist() == [step for step in steps for _ in range(2)]
    assert all(list(weights) == steps for weights in record.by_timestep().values())


@torch.no_grad()
def test_models_without_a_timestep_say_so() -> None:
    import timm

    model = attnres_vision.attach(timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32).eval(), block_size=2)
    with record_depth_weights(model) as record:
        model(torch.zeros(1, 3, 32, 32))
    assert record.timesteps is None
    with pytest.raises(ValueError, match="argument `timestep`"):
        record.by_timestep()


CHANGES = {
    "timestep": ("timestep", lambda value: value * 0.3),
    "pooled_text": ("pooled_projections", lambda value: value + 1),
    "other_stream": ("encoder_hidden_states", lambda value: value + 1),
}


@torch.no_grad()
@pytest.mark.parametrize("condition", CHANGES)
def test_a_condition_steers_the_image_readers_and_the_others_do_not(condition: str) -> None:
    """The second reader of the first block: its sources do not depend on what has changed, where the gates are zero."""
    model = attached("sd3", query="condition", condition=[condition])
    block = model.transformer_blocks[0]
    block.norm1.linear.weight.zero_()  # the first sublayer adds the same whatever the timestep and the text are
    block.attn.to_out[0].weight.zero_()

    def weights(inputs: dict[str, Any]) -> torch.Tensor:
        with record_depth_weights(model) as record:
            model(**copy.deepcopy(inputs))
        return record.mean()["transformer_blocks.0.norm2 (image)"]

    inputs = inputs_for("sd3")
    before = weights(inputs)
    for name, (argument, change) in CHANGES.items():
        moved = (weights({**inputs, argument: change(inputs[argument])}) - before).abs().max()
        assert moved > 1e-4 if name == condition else moved < 1e-12, name
