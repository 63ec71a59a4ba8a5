"""Stock pipelines run, save and load AttnRes transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch

import attnres_vision
import dit
from tests.dit.pipelines import PIPELINES, generate, make
from tests.dit.tiny import randomise_queries, relative_error

CONFIG = {"block_size": 2, "query": "condition", "rank": 2}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_makes_the_same_images_and_saves_and_loads(name: str, tmp_path: Path) -> None:
    pipe, arguments = make(name)
    expected = generate(pipe, arguments)
    assert torch.isfinite(expected).all() and expected.std() > 0
    pipe.transformer = dit.convert(pipe.transformer, CONFIG)
    assert relative_error(generate(pipe, arguments), expected) < 1e-4
    randomise_queries(pipe.transformer, scale=1.0)
    changed = generate(pipe, arguments)
    assert relative_error(changed, expected) > 1e-3, "the queries do nothing"

    pipe.save_pretrained(tmp_path)
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.transformer) is type(pipe.transformer)
    assert loaded.transformer.attnres_config == pipe.transformer.attnres_config
    assert relative_error(generate(loaded, arguments), changed) < 1e-4


def test_a_pipeline_loads_with_a_transformer_that_is_given(tmp_path: Path) -> None:
    """The way for a repository that holds the stock transformer."""
    pipe, arguments = make("sd3")
    expected = generate(pipe, arguments)
    pipe.save_pretrained(tmp_path)
    transformer = dit.models.AttnResSD3Transformer2DModel.from_pretrained(
        tmp_path, subfolder="transformer", attnres=CONFIG
    )
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path, transformer=transformer)
    loaded.set_progress_bar_config(disable=True)
    assert relative_error(generate(loaded, arguments), expected) < 1e-4


def test_loading_needs_the_import(tmp_path: Path) -> None:
    """diffusers loads classes of modules that are imported; it does not import them itself."""
    pipe, _ = make("sd3")
    pipe.transformer = dit.convert(pipe.transformer, CONFIG)
    pipe.save_pretrained(tmp_path)
    code = (
        "import sys, diffusers\n"
        "try:\n    diffusers.DiffusionPipeline.from_pretrained(sys.argv[1])\n"
        "except ValueError as error:\n    print('without the import:', 'dit.models' in str(error))\n"
        "import dit\n"
        "print(type(diffusers.DiffusionPipeline.from_pretrained(sys.argv[1]).transformer).__name__)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["without the import: True", "AttnResSD3Transformer2DModel"]


def test_a_stock_class_says_that_it_leaves_the_queries_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot know AttnRes: diffusers' own warning names the keys that it does not use."""
    pipe, _ = make("sd3")
    transformer = dit.convert(pipe.transformer, CONFIG)
    transformer.save_pretrained(tmp_path)
    diffusers.utils.logging.set_verbosity_warning()
    diffusers.SD3Transformer2DModel.from_pretrained(tmp_path)
    assert "were not used" in caplog.text and "norm1.depth.query" in caplog.text


def test_lora_weights_of_a_pipeline(tmp_path: Path) -> None:
    """load_lora_weights, fuse_lora and unload_lora_weights leave the depth parameters alone."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe, arguments = make("sd3")
    pipe.transformer = dit.convert(pipe.transformer, CONFIG)
    randomise_queries(pipe.transformer, scale=1.0)
    plain = generate(pipe, arguments)
    depth = {key: value.clone() for key, value in attnres_vision.attnres_state_dict(pipe.transformer).items()}
    pipe.transformer.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k", "proj"]))
    torch.manual_seed(1)
    for key, parameter in pipe.transformer.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.5)
    with_lora = generate(pipe, arguments)
    assert relative_error(with_lora, plain) > 1e-3
    diffusers.StableDiffusion3Pipeline.save_lora_weights(
        tmp_path, transformer_lora_layers=get_peft_model_state_dict(pipe.transformer)
    )
    pipe.transformer.delete_adapters("default")
    pipe.load_lora_weights(tmp_path)
    assert relative_error(generate(pipe, arguments), with_lora) < 1e-5
    pipe.fuse_lora(components=["transformer"])
    assert relative_error(generate(pipe, arguments), with_lora) < 1e-4
    pipe.unfuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    assert relative_error(generate(pipe, arguments), plain) < 1e-4
    after = attnres_vision.attnres_state_dict(pipe.transformer)
    assert after.keys() == depth.keys() and all(torch.equal(after[key], depth[key]) for key in depth)
