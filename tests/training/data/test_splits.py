"""Everything is chosen on validation and reported on test: disjoint parts, and choices that the test cannot move."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Subset

from tests.training.conftest import losses
from tests.training.report.test_report import ATTNRES, result, written
from training.config.clips import VideoDataConfig
from training.config.image import ImageConfig, ImageDataConfig
from training.config.io import from_fields, merge
from training.data import images
from training.data.files import sides
from training.report import summary
from training.report.results import Result
from training.report.sweep import sweep
from training.tasks import image

# (val loss, test loss) by learning rate: the one that is better on val is the worse one on test, for either variant
RATES = {
    "standard": {1e-3: (0.30, 0.60), 2e-3: (0.40, 0.20)},
    "block": {1e-3: (0.50, 0.10), 2e-3: (0.25, 0.50)},
}


def grid(folder: Path, test_of: Any = lambda test: test) -> list[Result]:
    runs = []
    for variant, rates in RATES.items():
        for lr, (val, test) in rates.items():
            for seed in (0, 1):
                changes = merge(ATTNRES if variant == "block" else {}, {"optim": {"lr": lr}})
                fields = {"test_loss": test_of(test + 0.01 * seed), "test_buckets": []}
                runs.append(result(folder, variant, seed, val + 0.01 * seed, changes, samples=False, **fields))
    return runs


def test_a_report_picks_the_learning_rate_on_validation_and_reports_its_test_loss(tmp_path: Path) -> None:
    text, _, found = written(tmp_path / "out", grid(tmp_path))
    standard, block = found["variants"]["standard"], found["variants"]["block"]
    assert (standard["best_learning_rate"], block["best_learning_rate"]) == (1e-3, 2e-3)
    assert standard["test_loss"]["values"] == pytest.approx([0.60, 0.61])
    assert block["test_loss"]["values"] == pytest.approx([0.50, 0.51])
    assert block["difference"]["test_loss"]["values"] == pytest.approx([-0.10, -0.10])
    head = next(line for line in text.splitlines() if line.startswith("| variant"))
    assert [name for name in head.strip("| ").split(" | ") if "loss" in name] == [
        *("train loss", "val flow loss", "test flow loss", "Δ test flow loss"),
    ]
    assert "Chosen on validation: standard: lr 0.001; block: lr 0.002. Reported on test" in text
    assert "| standard | 0.001 | 0.3050 ± 0.0071 | 0.4050 ± 0.0071 | 0.6050 ± 0.0071 |" in text


def test_a_sweep_is_chosen_on_validation_and_reported_on_test(tmp_path: Path) -> None:
    def runs(folder: Path, sign: int) -> list[Result]:
        found = []
        for kind, changes in (("standard", {}), ("block", ATTNRES)):
            for number, lr in enumerate((1e-3, 2e-3, 4e-3)):
                name = kind if lr == 1e-3 else f"{kind}-{lr:g}"
                val, test = 0.5 + 0.1 * number, 0.5 - sign * 0.1 * number
                fields = merge(changes, {"optim": {"lr": lr}})
                found.append(result(folder, name, 0, val, fields, samples=False, test_loss=test, test_buckets=[]))
        return found

    chosen = {}
    for sign in (1, -1):  # test losses that rank the settings the other way round, and as validation does
        groups = sweep(runs(tmp_path / str(sign), sign), "standard")
        chosen[sign] = [group["best"] for group in groups]
        assert [group["best"]["variant"] for group in groups] == ["standard", "block"]
        assert groups[1]["test_loss"]["values"] == [0.5]
        assert groups[1]["difference"]["values"] == [0.0]
    assert chosen[1] == chosen[-1]
    text, _, found = written(tmp_path / "out", runs(tmp_path / "again", 1))
    assert "Chosen on validation: standard: lr 0.001; attnres" in text
    rows = [line for line in text.splitlines() if line.startswith(("| kind", "| standard | 3"))]
    assert len({line.count("|") for line in rows}) == 1, "every column has a header"
    assert found["baseline"] == "standard"


def test_the_test_set_moves_no_choice(tmp_path: Path) -> None:
    """Any test losses whatever: the chosen runs and everything that is said about validation stay."""
    summaries = []
    for number, test_of in enumerate((lambda test: test, lambda test: -test, lambda test: 0.0)):
        results = grid(tmp_path / str(number), test_of)
        found = summary.summarise(results, "standard", {}, {})
        entries = found["variants"].values()
        summaries.append([(e["best_learning_rate"], e["learning_rates"], e["val_loss"]) for e in entries])
    assert summaries[0] == summaries[1] == summaries[2]


def hashes(dataset: Any) -> list[str]:
    found = [dataset[index][0] for index in range(len(dataset))]
    return [hashlib.sha256(np.ascontiguousarray(item).tobytes()).hexdigest() for item in found]


def test_the_parts_of_the_digits_are_disjoint_stratified_and_fixed() -> None:
    config = ImageDataConfig(name="digits", num_classes=10, input_size=8, batch_size=64)
    sets = images.make_datasets(config, seed=0)
    assert [len(part) for part in sets] == [1000, 450, 347]
    found = [hashes(part) for part in sets]
    assert len(set().union(*found)) == 1797
    assert [hashes(part) for part in images.make_datasets(config, seed=1)] == found
    for part in (sets.train.dataset, sets.val, sets.test):
        counts = np.bincount(part.labels.numpy())
        assert abs(counts / len(part) - 0.1).max() < 0.005


def folder_config(root: Path, **changes: Any) -> ImageDataConfig:
    fields = {"root": str(root), "num_classes": 2, "input_size": 32, "batch_size": 4, "eval_batch_size": 4}
    return ImageDataConfig(**{**fields, "augment": "none", "hflip": 0.0, "workers": 0, **changes})


def test_validation_images_are_held_out_of_the_training_folder(image_folder: Path) -> None:
    """By index and by content, of every class, whatever the seed; what is reported is the folder `val`."""
    config = folder_config(image_folder)
    sets = images.make_datasets(config, seed=0)
    train, val = sets.train.dataset, sets.val
    assert isinstance(train, Subset) and isinstance(val, Subset)
    assert sorted([*train.indices, *val.indices]) == list(range(10))
    assert sorted(val[index][1] for index in range(len(val))) == [0, 1]
    assert len(set(hashes(train)) | set(hashes(val)) | set(hashes(sets.test))) == 18
    assert images.make_datasets(config, seed=7).val.indices == val.indices
    more = images.make_datasets(folder_config(image_folder, val_size=2), seed=0)
    assert len(more.val) == 4 and set(more.val.indices) >= set(val.indices)
    # validation images are never augmented
    augmented = images.make_datasets(
        folder_config(image_folder, augment="inception", auto_augment="rand-m10-n2"), seed=0
    )
    assert hashes(augmented.val) == hashes(augmented.val) == hashes(val)


def test_held_out_images_of_uneven_classes() -> None:
    labels = [0] * 200 + [1] * 3 + [2]
    held_out = images.held_out_images(labels, 0.02)
    assert [sum(labels[index] == label for index in held_out) for label in (0, 1, 2)] == [4, 1, 0]
    assert [sum(labels[i] == 1 for i in images.held_out_images(labels, 50.0))] == [2]  # one image of a class is left


def test_a_test_folder_is_what_is_reported(image_folder: Path) -> None:
    flat = image_folder / "test"
    flat.mkdir()  # as ImageNet's: images without classes
    shutil.copy(next(image_folder.rglob("*.png")), flat)
    assert isinstance(images.make_datasets(folder_config(image_folder), 0).val, Subset)
    shutil.rmtree(flat)
    shutil.copytree(image_folder / "val", flat)
    sets = images.make_datasets(folder_config(image_folder), 0)
    assert [len(part) for part in sets] == [10, 8, 8]
    assert not isinstance(sets.val, Subset)
    (flat / "cat").mkdir()
    shutil.copy(next((flat / "ant").iterdir()), flat / "cat")
    with pytest.raises(ValueError, match=r"'train' and 'test' must have the same classes, got 2 and 3, 'cat' in one"):
        images.make_datasets(folder_config(image_folder), 0)


def test_streams_need_three_splits_that_share_no_shard(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.test_split must be given for streams"):
        ImageDataConfig(name="wds/tiny", root=str(tmp_path))
    with pytest.raises(ValueError, match=r"data.train_split, val_split and test_split must be different"):
        ImageDataConfig(name="hfids/tiny", train_split="a", val_split="b", test_split="a")
    pytest.importorskip("webdataset")
    splits = {"train_split": "train-{00..09}.tar", "val_split": "train-{09..10}.tar", "test_split": "val-00.tar"}
    with pytest.raises(ValueError, match=r"data.train_split and data.val_split must share no shard, both have"):
        images.make_datasets(ImageDataConfig(name="wds/tiny", root=str(tmp_path), **splits), 0)


def test_other_test_images_change_the_test_loss_and_nothing_else(image_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(image_folder / "val", image_folder / "test")
    found = {}
    for name in ("one", "other"):
        fields = {
            "model": {"name": "vit_tiny_patch16_224", "kwargs": {"img_size": 32, "depth": 1, "embed_dim": 24}},
            "data": {"root": str(image_folder), "num_classes": 2, "input_size": 32, "batch_size": 4, "workers": 0},
            **{"schedule": {"steps": 2}, "ema_decay": 0.9, "eval_interval": 1, "cpu": True, "profile": False},
            "output_dir": str(tmp_path / name),
        }
        image.train(from_fields(ImageConfig, fields))
        found[name] = json.loads((tmp_path / name / "result.json").read_text())
        for path in (image_folder / "test").rglob("*.png"):
            Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    one, other = found["one"], found["other"]
    assert one["test_loss"] != other["test_loss"]
    assert [one[name] for name in ("val_loss", "val_top1")] == [other[name] for name in ("val_loss", "val_top1")]
    assert losses(tmp_path / "one") == losses(tmp_path / "other")
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in found]
    assert weights[0] == weights[1]


UCF = [
    f"{name}/v_{name}_g{group:02}_c{clip:02}.avi"
    for name in ("Archery", "Bowling", "HighJump")
    for group in range(1, 26)
    for clip in range(1, 4)
]
GROUPS = "v_.*_g[0-9]+"


def group_of(name: str) -> str:
    return name.rpartition("_c")[0]


@pytest.mark.parametrize("listed", [True, False])
def test_no_group_of_ucf101_is_in_two_parts(listed: bool, tmp_path: Path) -> None:
    tested = [name for name in UCF if int(name[-10:-8]) <= 7]
    (tmp_path / "testlist01.txt").write_text("\n".join(tested))
    config = VideoDataConfig(
        **{"root": str(tmp_path), "val_split": "file", "groups": GROUPS, "val_fraction": 0.1, "test_fraction": 0.2},
        test_list="testlist01.txt" if listed else None,
    )
    side = sides(UCF, config)
    of_group = {part: {group_of(name) for name in UCF if side[name] == part} for part in ("train", "val", "test")}
    assert sum(map(len, of_group.values())) == 75  # every group is in one part
    assert len(of_group["val"]) == round(0.1 * 75)
    assert len(of_group["test"]) == (21 if listed else 15)
    if listed:
        assert {name for name in UCF if side[name] == "test"} == set(tested)
        # other test files leave what is chosen on as it is: the rest gives validation
        assert of_group["val"].isdisjoint({group_of(name) for name in tested})


def test_lists_that_split_a_recording_are_errors(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"root": str(tmp_path), "val_split": "file", "groups": GROUPS}
    (tmp_path / "part.txt").write_text(UCF[0])
    (tmp_path / "group.txt").write_text("\n".join(UCF[:3]))
    with pytest.raises(ValueError, match=r"data.test_list must hold whole groups, 'Archery/v_Archery_g01_c02.avi' of"):
        sides(UCF, VideoDataConfig(**fields, test_list="part.txt"))
    with pytest.raises(ValueError, match=r"share no group, both have 'v_Archery_g01'"):
        sides(UCF, VideoDataConfig(**fields, val_list="group.txt", test_list="group.txt"))
    with pytest.raises(ValueError, match=r"data.groups must match the name of every file, got .* the file 'a.mp4'"):
        sides([*UCF, "a.mp4"], VideoDataConfig(**fields))
    with pytest.raises(ValueError, match=r"data.groups must be a regular expression"):
        VideoDataConfig(**{**fields, "groups": "("})
