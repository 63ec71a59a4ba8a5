"""The video script: it learns, resumes exactly, is the same with two processes, and trains every model class."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from accelerate import PartialState
from PIL import Image

import dit
from tests.dit.tiny import MODELS
from tests.training.conftest import ROOT, clean_env, run
from tests.training.videos import write_video
from training import compare
from training.config.io import dump_config, from_fields, merge
from training.config.video import VideoConfig
from training.loop.run import make_accelerator, read_metrics
from training.tasks import video

# fmt: off
SMALL: dict[str, Any] = {
    "model": {"name": "HunyuanVideoTransformer3DModel", "zero_init": True, "kwargs": {
        "in_channels": 3, "out_channels": 3, "num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 1,
        "num_single_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0, "patch_size": 4, "patch_size_t": 1,
        "guidance_embeds": False, "text_embed_dim": 8, "pooled_projection_dim": 8, "rope_axes_dim": [8, 8, 8],
    }},
    "text": {"width": 8, "length": 5, "pooled_width": 8},
    "data": {"name": "folder", "num_frames": 2, "size": [8, 8], "batch_size": 4, "eval_batch_size": 4, "val_clips": 3},
    "optim": {"lr": 3e-3, "betas": [0.9, 0.99]},
    "schedule": {"steps": 6},
    "evaluation": {"sigmas": 4, "buckets": 2},
    "sampling": {"count": 0},
    "log_interval": 4, "profile": False, "cpu": True,
}
BLOCK = {"model": {"residual": "attnres", "attnres": {"num_blocks": 2, "query": "condition", "rank": 4}}}
EVERYTHING = merge(BLOCK, {
    "objective": {"text_dropout": 0.5, "shift": 3.0}, "schedule": {"steps": 30}, "grad_accumulation": 2,
    "ema_decay": 0.99, "eval_interval": 10, "checkpoint_interval": 7, "data": {"hflip": 0.5},
})
# fmt: on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two videos: 13 training clips of two frames an epoch each, about."""
    root = tmp_path_factory.mktemp("videos")
    for number, name in enumerate(("ant.mp4", "bee.mp4")):
        write_video(root / name, 30 + number)
    return root


@pytest.fixture
def small(folder: Path, tmp_path: Path) -> Any:
    """Makes a config of a tiny video transformer, with changes put over it."""

    def make(
        changes: dict[str, Any] | None = None, name: str = "run", model: dict[str, Any] | None = None
    ) -> VideoConfig:
        fields = merge(SMALL, {"data": {"root": str(folder)}, "output_dir": str(tmp_path / name)})
        fields = {**fields, "model": model or fields["model"]}
        return from_fields(VideoConfig, merge(fields, changes or {}))

    return make


def losses(folder: Path) -> list[dict[str, Any]]:
    """Everything in the metrics that must not depend on interruptions."""
    return [{key: value for key, value in record.items() if key != "seconds"} for record in read_metrics(folder)]


def test_the_loss_falls_well_below_that_of_the_untrained_model(small: Any, tmp_path: Path) -> None:
    changes = {
        **{"schedule": {"steps": 120}, "ema_decay": 0.9, "profile": True, "data": {"batch_size": 8}, **BLOCK},
        "sampling": {"count": 3, "steps": 4, "guidance": 2.0, "frechet": 4},
    }
    config = small(changes)
    result = video.train(config)
    assert result["val_loss"] < 0.6 * result["val_loss_untrained"]
    assert result["val_loss_raw"] != result["val_loss"]
    assert [(bucket["low"], bucket["high"]) for bucket in result["test_buckets"]] == [(0.0, 0.5), (0.5, 1.0)]
    assert sum(bucket["loss"] for bucket in result["test_buckets"]) / 2 == pytest.approx(result["test_loss"])
    assert result["samples"]["captions"] == ["ant", "bee", "ant"]
    for name in (result["samples"]["sheet"], result["samples"]["gif"], *result["samples"]["mp4"]):
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert result["frechet"]["generated"] == 4
    sigmas = [entry["sigma"] for entry in result["depth_weights_by_timestep"]]
    assert sigmas == pytest.approx([0.125, 0.375, 0.625, 0.875])
    assert result["depth_weights"] and result["gflops"] > 0
    loaded = dit.models.AttnResHunyuanVideoTransformer3DModel.from_pretrained(tmp_path / "run" / "transformer")
    task = video.VideoTask(config)
    task.make_loader(make_accelerator(config))
    assert task.score(loaded, "val")["loss"] == pytest.approx(
        result["val_loss"], rel=1e-5
    )  # what is saved is the average


def test_a_killed_run_continues_bit_for_bit(small: Any, tmp_path: Path) -> None:
    """Killed in mid-epoch, with accumulation, caption dropout, mirroring and a moving average."""
    video.train(small(EVERYTHING, "whole"))
    dump_config(small(EVERYTHING, "cut"), tmp_path / "cut.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "training.video", "--config", str(tmp_path / "cut.yaml"), "--log_interval", "1"],
        **{"cwd": ROOT, "env": clean_env(), "stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL},
    )
    metrics = tmp_path / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("train") >= 9):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 9 <= losses(tmp_path / "cut")[-1]["step"] < 30
    video.train(small(EVERYTHING, "cut"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    saved = [(tmp_path / n / "transformer/diffusion_pytorch_model.safetensors").read_bytes() for n in ("cut", "whole")]
    assert saved[0] == saved[1]


def test_two_processes_equal_one_at_the_same_global_batch(small: Any, tmp_path: Path) -> None:
    sampling = {"count": 5, "steps": 2, "frechet": 7}  # shares of four clips, and of what is left
    changes = merge(EVERYTHING, {"schedule": {"steps": 8}, "eval_interval": 4, "sampling": sampling})
    dump_config(small(changes, "two"), tmp_path / "two.yaml")
    done = run(
        *("-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_machines", 1),
        *("--num_processes", 2, "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("training/video.py", "--config", tmp_path / "two.yaml"),
        ACCELERATE_USE_CPU="true",
    )
    assert done.returncode == 0, done.stderr[-6000:]
    video.train(small(changes, "one"))
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 10
    for mine, theirs in zip(one, two, strict=True):
        assert mine.pop("kind") == theirs.pop("kind")
        assert mine == pytest.approx(theirs, rel=1e-5)
    found = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert [result["processes"] for result in found] == [1, 2]
    assert found[0]["samples"] == found[1]["samples"]
    for name in found[0]["samples"]["strips"]:
        strips = [np.asarray(Image.open(tmp_path / run / name)).astype(int) for run in ("one", "two")]
        assert np.abs(strips[0] - strips[1]).max() <= 1  # what rounds to the next of 256 values
    assert found[0]["frechet"]["value"] == pytest.approx(found[1]["frechet"]["value"], rel=1e-3)
    for result in found:  # the test set has four clips
        assert [result["frechet"][side] for side in ("real", "generated")] == [4, 7]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_processes_share_out_the_samples_and_all_get_all(count: int, small: Any) -> None:
    """Three processes, as threads: every clip is made once but for what fills up the last share, equally many each."""
    barrier, given = threading.Barrier(3), {}
    made: list[list[list[int]]] = [[], [], []]

    class Process:
        num_processes, device = 3, torch.device("cpu")

        def __init__(self, rank: int) -> None:
            self.process_index = rank

        split_between_processes = PartialState.split_between_processes

        def gather(self, tensor: torch.Tensor) -> torch.Tensor:
            given[self.process_index] = tensor
            barrier.wait(30)
            whole = torch.cat([given[rank] for rank in range(3)])
            barrier.wait(30)
            return whole

    def share(rank: int) -> torch.Tensor:
        task: Any = video.VideoTask(small({"data": {"eval_batch_size": 6}}))
        task.accelerator = Process(rank)

        def make(indices: list[int]) -> torch.Tensor:
            made[rank].append(indices)
            return torch.tensor(indices, dtype=torch.float32)[:, None].expand(-1, 2)

        return torch.cat(list(task.share_out(count, make)))

    with ThreadPoolExecutor(3) as pool:
        for clips in pool.map(share, range(3)):
            assert clips[:, 0].tolist() == list(range(count))
    sizes = [[len(indices) for indices in calls] for calls in made]
    assert sizes[0] == sizes[1] == sizes[2] == {1: [1], 3: [1], 9: [2, 1]}[count]


# fmt: off
CLASSES: dict[str, dict[str, Any]] = {
    "hunyuan-video": {"patch_size": 2},
    "hunyuan-video-1.5": {},
    "cogvideox": {"use_rotary_positional_embeddings": True, "attention_head_dim": 16},
    "mochi": {},
    "wan": {},
    "ltx": {},
}
# fmt: on


def tiny_model(name: str) -> dict[str, Any]:
    """The tiny model of a class, for clips of three channels."""
    cls, kwargs, _ = MODELS[name]
    channels = {key: 3 for key in ("in_channels", "out_channels") if name != "mochi" or key == "in_channels"}
    kwargs = {key: list(value) if isinstance(value, tuple) else value for key, value in kwargs.items()}
    return {"name": cls, "kwargs": {**kwargs, **channels, **CLASSES[name]}}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("train", ["full", "depth+lora"])
def test_every_model_class_trains(name: str, train: str, small: Any, tmp_path: Path) -> None:
    if train != "full":
        pytest.importorskip("peft")
    lora = {"train": train, "frozen_dtype": "bf16"} if train != "full" else {}
    changes = {
        **{"schedule": {"steps": 2}, "ema_decay": 0.9, "mixed_precision": "bf16" if lora else "no"},
        **{"objective": {"kind": "v" if name == "cogvideox" else "flow"}, "sampling": {"count": 1, "steps": 2}},
        **{"model": {**BLOCK["model"], **lora, "grad_checkpointing": True}, "data": {"num_frames": 4}},
    }
    result = video.train(small(changes, model=tiny_model(name)))
    assert all(torch.isfinite(torch.tensor([result["val_loss"], result["train_loss"]])))
    assert result["depth_weights"] == []  # profile is off
    need = result["memory_need"]
    assert (need["gradients"] > 0.9 * need["parameters"]) == (train == "full")
    if train != "full":
        depth = safetensors.torch.load_file(tmp_path / "run" / "attnres.safetensors")
        assert depth and all(".depth" in key for key in depth)
        assert list((tmp_path / "run" / "lora").iterdir())
        assert not (tmp_path / "run" / "transformer").exists()


def test_a_comparison_takes_a_video_table(
    small: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(item: compare.Run) -> tuple[float, str | None]:
        assert compare.task_module(item.task) is video
        video.train(item.config)
        return 0.0, None

    monkeypatch.setattr(compare, "_run_process", in_this_process)
    base = merge(SMALL, {"data": {"root": str(folder)}, "profile": True, "sampling": {"count": 2, "steps": 2}})
    table = {"task": "video", "base": base, "variants": {"standard": {}, "block": BLOCK}, "speed_rounds": 1}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(table))
    assert compare.main(["--config", str(tmp_path / "table.yaml"), "--output_dir", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["unit"] == "clips" and len(summary["variants"]["block"]["buckets"]) == 2
    assert summary["variants"]["block"]["side_by_side"]["clips_per_second"] > 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/gif;base64," in page and "top-1" not in page


def test_an_unknown_task_of_a_table_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text("task: audio\n")
    with pytest.raises(SystemExit, match="task must be 'image' or 'video', got 'audio'"):
        compare.main(["--config", str(tmp_path / "table.yaml")])


@pytest.mark.parametrize("sampling", [{"frechet": 2, "extractor": "no/such.pt"}], ids=["extractor"])
def test_what_the_end_needs_is_checked_before_the_first_step(
    sampling: dict[str, Any], small: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"there is no file no/such\.pt"):
        video.train(small({"sampling": {"count": 0, **sampling}}))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
