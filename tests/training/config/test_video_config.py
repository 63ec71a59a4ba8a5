"""Video configs: every file is valid and builds its models, every recipe runs, mistakes name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dit.tiny import MODELS
from tests.training.conftest import ROOT
from tests.training.video_pipelines import PIPELINES, save_pipeline
from tests.training.videos import write_video
from training import compare
from training.config.encode import EncodeConfig
from training.config.io import from_fields, load_config, merge, to_fields
from training.config.video import VideoConfig
from training.data.encoding import encode
from training.loop import measure, trainer
from training.tasks import video

TABLES = sorted((ROOT / "configs" / "video").glob("*.yaml"))
WAN_1_3B = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
# recipe: the tiny pipeline that stands for its checkpoint, the arguments of a model of the checkpoint's size
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "hunyuan_finetune": ("hunyuan-video", {}),  # the class's defaults are HunyuanVideo
    "cogvideox_finetune": ("cogvideox", {}),  # and CogVideoX-2B
    "wan_finetune": ("wan", WAN_1_3B),
    "ucf101_mmdit_s": ("hunyuan-video", {}),
}


def variants_of(config: Any) -> dict[str, dict[str, Any]]:
    return {name: merge(to_fields(config.base), changes or {}) for name, changes in config.variants.items()}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_parses_and_its_header_says_command_cost_and_result(path: Path, tmp_path: Path) -> None:
    for smoke in ([], ["--smoke"]):
        config, _ = compare.load(["--config", str(path), *smoke])
        runs = compare.plan(config, tmp_path)
        assert len(runs) == len(config.variants) * len(config.seeds)
    header = path.read_text().split("\nname:")[0]
    for word in ("Command", "Cost", "Expected result"):
        assert word in header


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_builds_on_meta_and_counts_its_memory(path: Path) -> None:
    """In the real size: HunyuanVideo's 13 B parameters included."""
    config, _ = compare.load(["--config", str(path)])
    needs = {}
    for name, fields in variants_of(config).items():
        kwargs = RECIPES[path.stem][1] if path.stem in RECIPES else {}
        if fields["model"]["pretrained"] is not None:
            fields = merge(fields, {"model": {"pretrained": None, "kwargs": kwargs}})
        needs[name] = trainer.memory_need(video.VideoTask(from_fields(VideoConfig, fields)))
    smallest = min(need["total"] for need in needs.values())
    assert smallest > {"hunyuan_finetune": 24e9, "cogvideox_finetune": 27e9}.get(path.stem, 4e6)
    if path.stem == "wan_finetune":  # depth parameters alone
        assert all(need["gradients"] < 0.05 * need["parameters"] for need in needs.values())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_with_a_tiny_checkpoint(name: str, tmp_path: Path) -> None:
    """Encoded by the pipeline, trained for two steps from its checkpoint, sampled through its VAE."""
    pipeline, options, frames, side = RECIPES[name][0], *PIPELINES[RECIPES[name][0]][1:]
    folder = tmp_path / "pipeline"
    save_pipeline(pipeline, folder)
    files = [f"Archery/v_Archery_g{group:02}_c01.mp4" for group in (1, 2, 3)]
    for file in files:
        write_video(tmp_path / "videos" / file, 24)
    data = {"root": str(tmp_path / "videos"), "num_frames": frames, "size": [side, side], "clips_per_file": 2}
    paths = {"pipeline": str(folder), "output_dir": str(tmp_path / "latents")}
    encode(from_fields(EncodeConfig, {"data": data, **paths, "prompt_options": options, "cpu": True}))

    config, _ = compare.load(["--config", str(ROOT / "configs" / "video" / f"{name}.yaml")])
    if config.base.data.test_list is not None:
        (tmp_path / "latents" / config.base.data.test_list).write_text(f"{files[-1]}\n")
    changes = {
        "data": {"root": str(tmp_path / "latents"), "batch_size": 2, "eval_batch_size": 2, "workers": 0},
        "objective": {"text_dropout": 0.5},
        "sampling": {"vae": str(folder), "count": 1, "steps": 2, "frechet": 0},
        **{"schedule": {"steps": 2, "warmup": 0}, "eval_interval": 1, "cpu": True},
    }
    fields = merge(list(variants_of(config).values())[-1], changes)
    if fields["model"]["pretrained"] is not None:
        fields["model"]["pretrained"] = str(folder / "transformer")
    else:
        fields["model"]["kwargs"] = json.loads(json.dumps(MODELS[pipeline][1]))
    fields["model"]["attnres"] = merge(fields["model"]["attnres"], {"num_blocks": 2, "rank": 2})
    result = video.train(from_fields(VideoConfig, {**fields, "output_dir": str(tmp_path / "run")}))
    assert result["steps"] == 2 and torch.isfinite(torch.tensor(result["val_loss"]))
    assert (tmp_path / "run" / result["samples"]["mp4"][0]).stat().st_size > 0
    if config.base.data.test_list is not None:  # its captions, not those of training
        assert result["samples"]["captions"] == [Path(files[-1]).stem]


def test_a_run_that_cannot_fit_is_an_error_before_anything_is_made() -> None:
    need = {"parameters": 2**50, "gradients": 0, "optimizer": 0, "average": 0, "total": 2**50}
    with pytest.raises(MemoryError, match=r"needs 1048576\.0 GiB before activations \(parameters 1048576\.0 GiB\)"):
        measure.check_memory(need, torch.device("cpu"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model.name", "FluxTransformer2DModel"], "model.name must be one of HunyuanVideoTransformer3DModel"),
        (["--model.train", "depth"], "model.train must be 'full' or 'lora' without attnres, got 'depth'"),
        (["--model.pretrained", "x", "--model.zero_init", "true"], "unset with model.pretrained"),
        (["--objective.kind", "v"], "objective.kind must be 'flow' for model.name 'HunyuanVideo"),
        (["--objective.text_dropout", "2"], "objective.text_dropout must be between 0 and 1, got 2.0"),
        (["--objective.shift", "0"], "objective.shift must be above 0, got 0.0"),
        (["--evaluation.sigmas", "6"], "evaluation.sigmas must be a multiple of evaluation.buckets (4), got 6"),
        (["--sampling.vae", "x"], "sampling.vae must be null for clips in pixels, got 'x'"),
        (["--data.name", "latents", "--data.root", "x"], "sampling.vae must be a folder when data are latents"),
        (["--data.batch_size", "3", "--grad_accumulation", "2"], "data.batch_size must be a multiple"),
        (["--model.frozen_dtype", "bf16"], "model.frozen_dtype must be 'fp32' unless mixed_precision is 'bf16'"),
        (
            ["--data.val_fraction", "0.5", "--data.test_fraction", "0.5"],
            "data.val_fraction + data.test_fraction must be",
        ),
        (["--optim.layer_decay", "0.5"], "optim.layer_decay must be null"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_mistakes_on_the_command_line_are_errors(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_config(VideoConfig, argv)
    assert message in capsys.readouterr().err


def test_a_checkpoint_of_another_class_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.pretrained must be the folder of a diffusers transformer"):
        video.train(_from(tmp_path / "none", tmp_path))
    save_pipeline("wan", tmp_path / "pipeline")
    with pytest.raises(ValueError, match=r"model\.name must be the class in .*, WanTransformer3DModel"):
        video.train(_from(tmp_path / "pipeline" / "transformer", tmp_path))


def _from(folder: Path, tmp_path: Path) -> VideoConfig:
    return from_fields(
        VideoConfig, {"model": {"pretrained": str(folder)}, "output_dir": str(tmp_path / "run"), "cpu": True}
    )
