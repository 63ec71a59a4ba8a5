"""The training script: data, optimiser, exact resume, checkpoints, processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import ROOT, clean_env, losses, run
from training.config.image import ImageConfig
from training.config.io import dump_config, from_fields, load_config, merge, to_fields
from training.data import images
from training.loop import checkpoint
from training.loop.optim import make_optimizer, make_scheduler
from training.loop.run import check_process_count
from training.tasks import image

EVERYTHING = {
    "model": {
        "residual": "attnres",
        "attnres": {"num_blocks": 2, "query": "token", "rank": 4},
        "kwargs": {"drop_path_rate": 0.2, "proj_drop_rate": 0.1},
    },
    "data": {"mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1},
    "schedule": {"steps": 30},  # 15 updates are an epoch
    "grad_accumulation": 2,
    "ema_decay": 0.99,
    "eval_interval": 10,
    "checkpoint_interval": 7,
}


def test_imagenet_config_trains_on_an_image_folder(image_folder: Path, tmp_path: Path) -> None:
    config = load_config(
        ImageConfig,
        [
            *("--config", str(ROOT / "configs" / "image" / "imagenet_vit_s16.yaml"), "--variant", "block"),
            *("--data.root", str(image_folder), "--data.num_classes", "2", "--data.batch_size", "4"),
            *("--data.eval_batch_size", "5", "--data.workers", "1", "--data.input_size", "32"),
            *("--model.kwargs.img_size", "32", "--model.kwargs.depth", "4", "--model.kwargs.embed_dim", "48"),
            *("--schedule.epochs", "1", "--schedule.warmup", "1", "--eval_interval", "1"),
            *("--output_dir", str(tmp_path / "run"), "--cpu", "true"),
        ],
    )
    result = image.train(config)
    assert result["steps"] == 2  # 8 of the 10 images, 4 an update
    assert [record[:2] for record in losses(tmp_path / "run")] == [("train", 1), ("eval", 1), ("train", 2), ("eval", 2)]
    assert result["test_top1"] in (0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1)  # every image once
    assert (tmp_path / "run" / "weights.safetensors").exists()


@pytest.mark.parametrize("kind", ["tar", "webdataset", "hf"])
def test_other_formats_train(kind: str, image_folder: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"root": str(image_folder)}
    if kind == "tar":
        for split in ("train", "val"):
            shutil.make_archive(str(image_folder / split), "tar", image_folder, split)
            shutil.rmtree(image_folder / split)
    elif kind == "webdataset":
        wds = pytest.importorskip("webdataset")
        for split in ("train", "val", "test"):
            with wds.TarWriter(str(tmp_path / f"{split}.tar")) as writer:
                paths = sorted((image_folder / ("train" if split == "train" else "val")).rglob("*.png"))
                for index, path in enumerate(paths):
                    writer.write({"__key__": f"{index}", "png": path.read_bytes(), "cls": int("bee" in str(path))})
        fields = {"name": "wds/tiny", "root": str(tmp_path), "train_split": "train.tar", "val_split": "val.tar"}
        fields |= {"test_split": "test.tar", "train_samples": 10, "val_samples": 8, "test_samples": 8}
    else:
        pytest.importorskip("datasets")
        fields = {"name": f"hfds/{image_folder}", "root": str(tmp_path / "cache"), "val_split": "validation"}
    config = from_fields(
        ImageConfig,
        {
            "model": {"name": "vit_tiny_patch16_224", "kwargs": {"img_size": 32, "depth": 1}},
            "data": {
                **{"num_classes": 2, "input_size": 32, "batch_size": 4, "eval_batch_size": 4, "workers": 0},
                **fields,
            },
            "schedule": {"steps": 3},
            "cpu": True,
            "profile": False,
            "output_dir": str(tmp_path / "run"),
        },
    )
    result = image.train(config)
    assert result["steps"] == 3
    assert result["test_top1"] * 8 == round(result["test_top1"] * 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda root: shutil.rmtree(root), FileNotFoundError, "does not exist"),
        (lambda root: shutil.rmtree(root / "val"), FileNotFoundError, "has no folder or tar file 'val'"),
        (lambda root: [path.unlink() for path in root.rglob("*.png")], ValueError, "no images for"),
    ],
    ids=["missing", "no val", "empty"],
)
def test_missing_or_empty_data_is_an_error_with_the_path(
    change: Any, error: type[Exception], message: str, image_folder: Path
) -> None:
    change(image_folder)
    config = from_fields(ImageConfig, {"data": {"root": str(image_folder), "num_classes": 2, "batch_size": 4}})
    with pytest.raises(error, match=message) as raised:
        images.make_datasets(config.data, seed=0)
    assert str(image_folder) in str(raised.value)


def test_augmentation_is_a_function_of_seed_epoch_and_index(image_folder: Path) -> None:
    fields = {
        "root": str(image_folder),
        "num_classes": 2,
        "batch_size": 4,
        "auto_augment": "rand-m10-n2",
        "reprob": 0.5,
    }
    config = from_fields(ImageConfig, {"data": {**fields, "input_size": 32}}).data
    first, again = (images.make_datasets(config, seed=1)[0] for _ in range(2))
    pixels = first[3][0]
    torch.rand(7)
    again.set_epoch(0)
    assert torch.equal(again[3][0], pixels)
    again.set_epoch(1)
    assert not torch.equal(again[3][0], pixels)


def test_query_lr_scale_multiplies_the_learning_rate_on_top_of_layer_decay(digits: Any) -> None:
    config = digits(
        {
            "model": {"residual": "attnres", "attnres": {"num_blocks": 4}},
            "optim": {"lr": 1e-2, "query_lr_scale": 0.1, "layer_decay": 0.5, "weight_decay": 0.3},
            "schedule": {"steps": 100, "warmup": 10},
        }
    )
    model = image.build_model(config)
    optimizer = make_optimizer(model, config.optim)
    scheduler = make_scheduler(optimizer, config.schedule, config.optim, 100)
    scheduler.step_update(10)  # the peak
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    seen = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert len(rates) == len(seen)
    peak = 1e-2 * (1 + torch.cos(torch.tensor(torch.pi * 10 / 100)).item()) / 2
    # layers: embedding 0, blocks 1 and 2, head and final norm 3
    assert seen["head.weight"] == pytest.approx((peak, 0.3))
    assert seen["blocks.1.attn.qkv.weight"] == pytest.approx((peak * 0.5, 0.3))
    assert seen["blocks.1.attn.qkv.bias"] == pytest.approx((peak * 0.5, 0.0))
    depth = {name: rate for name, rate in seen.items() if ".depth." in name}
    assert depth
    for name, rate in depth.items():
        layer = 0.25 if name.startswith("blocks.0") else 0.5  # timm counts the final norm to the last block
        assert rate == pytest.approx((peak * layer * 0.1, 0.0)), name


def test_frozen_queries_stay_zero_and_compute_the_standard_residual(digits: Any) -> None:
    frozen = {"model": {"residual": "attnres", "attnres": {"num_blocks": 2}, "freeze_queries": True}}
    control = image.train(digits(frozen, "control"))
    standard = image.train(digits(folder="standard"))
    assert control["val_loss"] == pytest.approx(standard["val_loss"], rel=1e-4)
    assert control["gflops"] > standard["gflops"]
    assert standard["depth_weights"] == []
    for row in control["depth_weights"]:
        assert row["weights"] == pytest.approx([1 / len(row["weights"])] * len(row["weights"]))
    layers = [layer["sublayer"] for layer in standard["profile"]["end"]]
    assert layers == ["blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp"]
    for mine, theirs in zip(control["profile"]["start"], standard["profile"]["start"], strict=True):
        assert mine["hidden_rms"] == pytest.approx(theirs["hidden_rms"], rel=1e-4)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-3)


def test_a_killed_run_continues_bit_for_bit(digits: Any, tmp_path: Path) -> None:
    """Killed in mid-epoch, with drop path, dropout, mixup, cutmix, accumulation and a moving average."""
    image.train(digits(EVERYTHING, "whole"))
    cut = digits(EVERYTHING, "cut")
    dump_config(cut, tmp_path / "cut.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "training.image", "--config", str(tmp_path / "cut.yaml"), "--log_interval", "1"],
        cwd=ROOT,
        env=clean_env(),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    metrics = tmp_path / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("train") >= 9):
        time.sleep(0.01)
    process.kill()
    process.wait()
    killed_at = losses(tmp_path / "cut")[-1][1]
    assert 9 <= killed_at < 30
    with metrics.open("a") as file:
        file.write('{"kind": "train", "st')  # a line cut off
    assert run("-m", "training.image", "--config", tmp_path / "cut.yaml").returncode == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert (tmp_path / "cut" / "result.json").exists()
    saved = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("cut", "whole")]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_continuing_on_augmented_images_is_exact_with_any_number_of_workers(
    workers: int, image_folder: Path, tmp_path: Path
) -> None:
    fields = {
        "model": {"name": "vit_tiny_patch16_224", "kwargs": {"img_size": 32, "depth": 1, "drop_path_rate": 0.2}},
        "data": {
            **{"root": str(image_folder), "num_classes": 2, "input_size": 32, "batch_size": 2, "eval_batch_size": 8},
            **{"auto_augment": "rand-m10-n2", "mixup": 0.2, "workers": workers},
        },
        "schedule": {"steps": 7},
        "checkpoint_interval": 3,
        "keep_checkpoints": 5,
        "cpu": True,
        "profile": False,
    }
    image.train(from_fields(ImageConfig, {**fields, "output_dir": str(tmp_path / "whole")}))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000007")
    for number in (3, 6):  # in the middle of epoch 0 and of epoch 1 (4 updates each)
        if number == 3:
            shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000006")
        image.train(
            from_fields(ImageConfig, merge(fields, {"output_dir": str(tmp_path / "cut"), "data": {"workers": 0}}))
        )
        assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000007")


def test_a_half_written_checkpoint_is_not_taken_for_whole(digits: Any, tmp_path: Path) -> None:
    config = digits({"checkpoint_interval": 2, "keep_checkpoints": 3})
    image.train(config)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoint.whole_checkpoints(tmp_path / "run")] == [
        "step_00000002",
        "step_00000004",
        "step_00000006",
    ]
    (folder / "step_00000006" / "manifest.json").unlink()
    model = folder / "step_00000004" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-10])
    assert checkpoint.find(tmp_path / "run", "auto") == folder / "step_00000002"
    with pytest.raises(ValueError, match=r"model\.safetensors has"):
        checkpoint.find(tmp_path / "run", str(folder / "step_00000004"))
    before = losses(tmp_path / "run")
    image.train(config)
    assert losses(tmp_path / "run") == before


def test_only_the_newest_checkpoints_stay(digits: Any, tmp_path: Path) -> None:
    image.train(digits({"checkpoint_interval": 1, "keep_checkpoints": 2}))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step_00000005",
        "step_00000006",
    ]


def test_a_folder_with_another_config_is_not_continued(digits: Any) -> None:
    image.train(digits())
    with pytest.raises(ValueError, match=r"different: optim\.lr"):
        image.train(digits({"optim": {"lr": 1e-5}}))
    image.train(digits({"optim": {"lr": 1e-5}, "resume": "none"}))


def test_a_start_that_failed_has_no_claim_on_its_folder(digits: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.batch_size must be at most 1000"):
        image.train(digits({"data": {"batch_size": 4096}}))
    image.train(digits({"schedule": {"steps": 2}, "profile": False}))


def test_two_processes_do_not_train_into_one_folder(digits: Any, tmp_path: Path) -> None:
    config = digits({"schedule": {"steps": 2}, "profile": False})
    image.train(config)  # this process holds the folder from now on, and may train into it again
    dump_config(config, tmp_path / "asked.yaml")
    other = run("-m", "training.image", "--config", tmp_path / "asked.yaml")
    assert other.returncode != 0 and "another process is training into" in other.stderr
    image.train(config)


@pytest.mark.parametrize("line", ["garbage\n", "3\n", "{}\n", '{"kind": "train", "step": 1'])
def test_damaged_lines_of_the_metrics_are_dropped(line: str, digits: Any, tmp_path: Path) -> None:
    config = digits({"schedule": {"steps": 4}, "checkpoint_interval": 2, "profile": False})
    image.train(config)
    whole = losses(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(line)
    image.train(config)
    assert losses(tmp_path / "run")[: len(whole)] == whole


def test_bf16_evaluates_the_moving_average_and_not_the_model(digits: Any, tmp_path: Path) -> None:
    fields = {"mixed_precision": "bf16", "schedule": {"steps": 20}, "profile": False}
    averaged = image.train(digits({**fields, "ema_decay": 0.9999}, "ema"))
    plain = image.train(digits(fields, "plain"))
    assert averaged["train_loss"] == plain["train_loss"]
    assert averaged["val_loss"] != plain["val_loss"]


def test_a_tracker_that_is_not_installed_is_an_error(digits: Any) -> None:
    with pytest.raises(ValueError, match="log_with must be an installed accelerate tracker"):
        image.train(digits({"log_with": "clearml"}))


def test_tensorboard_gets_the_metrics(digits: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    image.train(digits({"log_with": "tensorboard"}))
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


def test_a_loss_that_is_not_finite_ends_the_run(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match="at step"):
        image.train(digits({"optim": {"lr": 1e30, "clip_grad": None}}))
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.exhaustive  # the default run has a video model of two processes, with the same loop
def test_two_processes_equal_one_at_the_same_global_batch(digits: Any, tmp_path: Path) -> None:
    changes = {
        "model": {"residual": "attnres", "attnres": {"num_blocks": 2}},
        "grad_accumulation": 2,
        "eval_interval": 3,
    }
    dump_config(digits(changes, "two"), tmp_path / "two.yaml")
    done = run(
        *("-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_machines", 1),
        *("--num_processes", 2, "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("training/image.py", "--config", tmp_path / "two.yaml"),
        ACCELERATE_USE_CPU="true",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    image.train(digits(changes, "one"))
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    assert [row[:2] for row in one] == [row[:2] for row in two]
    for mine, theirs in zip(one, two, strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-5)
        assert (mine[3] is None) or mine[3] == pytest.approx(theirs[3], rel=1e-4)
        assert mine[4] == theirs[4]  # the whole validation set, every image once
    assert json.loads((tmp_path / "two" / "result.json").read_text())["processes"] == 2


def test_a_launcher_that_starts_fewer_processes_is_an_error(digits: Any, tmp_path: Path) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process and says nothing."""
    dump_config(digits(), tmp_path / "run.yaml")
    done = run(
        *("-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", 2),
        *("training/image.py", "--config", tmp_path / "run.yaml"),
    )
    assert done.returncode != 0
    assert "--num_processes of accelerate launch says 2 processes, but 1 train together" in done.stderr


def test_a_wrong_process_count_is_an_error(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="num_processes in the config says 2 processes, but 1"):
        image.train(digits({"num_processes": 2}))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="WORLD_SIZE in the environment says 4"):
        check_process_count(1, None)


def test_config_in_the_run_folder_repeats_the_run(digits: Any, tmp_path: Path) -> None:
    config = digits({"schedule": {"steps": 2}})
    image.train(config)
    again = load_config(ImageConfig, ["--config", str(tmp_path / "run" / "config.yaml")])
    assert to_fields(again) == to_fields(config)
