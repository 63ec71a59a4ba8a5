"""Fine-tuning writes what it trains: checkpoints refer to the base by its hashes and continue on nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import safetensors.torch
import torch

from tests.dit.tiny import MODELS
from tests.training.test_video import SMALL, folder, losses  # noqa: F401
from training.config.io import from_fields, merge
from training.config.video import VideoConfig
from training.tasks import video

NAME = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A stock checkpoint as the hub's cache holds one."""
    path = tmp_path / "models--tiny" / "snapshots" / "0123abcd" / "transformer"
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {**MODELS["wan"][1], "in_channels": 3, "out_channels": 3}
    diffusers.WanTransformer3DModel(**kwargs).save_pretrained(path)
    return path


def config(base: Path, videos: Path, out: Path, train: str = "depth+lora", **changes: Any) -> VideoConfig:
    fields = {
        **{"grad_accumulation": 2, "ema_decay": 0.9, "mixed_precision": "bf16", "output_dir": str(out)},
        "model": {
            **{"name": "WanTransformer3DModel", "pretrained": str(base), "train": train, "frozen_dtype": "bf16"},
            **{"residual": "attnres", "attnres": {"block_size": 2, "query": "token", "rank": 2}},
        },
        **{"data": {"root": str(videos)}, "schedule": {"steps": 4}, "checkpoint_interval": 2, "eval_interval": 2},
    }
    fields = merge({key: value for key, value in SMALL.items() if key != "model"}, fields)
    return from_fields(VideoConfig, merge(fields, changes))


def test_checkpoints_hold_what_trains_and_continue_to_the_same_losses(
    base: Path,
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    pytest.importorskip("peft")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    video.train(config(base, folder, whole))
    written = whole / "checkpoints" / "step_00000002"
    own = safetensors.torch.load_file(written / "trained.safetensors")
    assert own and all("lora_" in name or ".depth" in name for name in own)
    average = torch.load(written / "custom_checkpoint_1.pkl", weights_only=False)["shadow_params"]
    assert sorted(value.shape for value in average) == sorted(value.shape for value in own.values())
    moments = torch.load(written / "optimizer.bin", weights_only=False)["state"]
    assert len(moments) == len(own)
    frozen = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    assert not list(written.glob("model*"))  # accelerate's file of all weights
    known = json.loads((written / "manifest.json").read_text())["base"]
    assert (known["path"], known["revision"]) == (str(base.resolve()), "0123abcd")
    assert known["sha256"][NAME] == hashlib.sha256((base / NAME).read_bytes()).hexdigest() and frozen

    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step_00000004")
    video.train(config(base, folder, cut))
    assert losses(cut) == losses(whole)
    for name in ("attnres.safetensors", "lora/pytorch_lora_weights.safetensors"):
        one, other = (safetensors.torch.load_file(out / name) for out in (cut, whole))  # their headers have no order
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    # moved, the same base serves; changed, it does not
    moved = shutil.copytree(base, tmp_path / "moved")
    shutil.rmtree(cut / "checkpoints" / "step_00000004")
    resume = {"resume": str(cut / "checkpoints" / "step_00000002"), "output_dir": str(tmp_path / "elsewhere")}
    video.train(config(moved, folder, cut, **resume))
    assert [row for row in losses(tmp_path / "elsewhere")] == [row for row in losses(whole) if row["step"] > 2]
    state = safetensors.torch.load_file(base / NAME)
    first = next(iter(state))
    safetensors.torch.save_file({**state, first: state[first] + 1}, base / NAME, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"revision 0123abcd\), which differs in {NAME}: continue with the same"):
        video.train(config(base, folder, cut))


def test_a_model_that_trains_as_a_whole_is_in_its_checkpoint(
    base: Path,
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    video.train(config(base, folder, tmp_path / "run", "full", schedule={"steps": 1}, ema_decay=None))
    written = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert (written / "model.safetensors").exists() and not (written / "trained.safetensors").exists()
    assert json.loads((written / "manifest.json").read_text())["base"] is None
