"""Configs: mistakes are errors that name the field; every file in configs/ is valid and builds its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.training.conftest import ROOT
from training import compare
from training.config.image import ImageConfig
from training.config.io import config_hash, dump_config, from_fields, load_config, merge, to_fields
from training.tasks.image import build_model

TABLES = sorted((ROOT / "configs" / "image").glob("*.yaml"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("smoke", [False, True], ids=["whole", "smoke"])
def test_every_table_parses_and_builds_on_meta(path: Path, smoke: bool, tmp_path: Path) -> None:
    config, _ = compare.load(["--config", str(path), *(["--smoke"] if smoke else [])])
    runs = compare.plan(config, tmp_path)
    assert len(runs) == len(config.variants) * len(config.seeds) * len(config.learning_rates or [0])
    for run in {run.variant: run for run in runs}.values():
        with torch.device("meta"):
            model = build_model(run.config)
        channels = run.config.model.kwargs.get("in_chans", 3)
        size = run.config.data.input_size
        assert model(torch.empty(2, channels, size, size, device="meta")).shape == (2, run.config.data.num_classes)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_header_of_a_table_says_command_cost_and_expected_result(path: Path) -> None:
    header = path.read_text().split("\nname:")[0]
    for word in ("Command", "Cost", "Expected result"):
        assert word in header


def test_accelerate_configs_are_known_to_accelerate() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    paths = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
    assert paths
    for path in paths:
        assert load_config_from_file(str(path)).num_processes >= 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--optim.lrr", "1"], "--optim.lrr"),
        (["--optim.lr", "-1"], "optim.lr must be above 0, got -1.0"),
        (["--model.residual", "plain"], "residual"),
        (["--model.attnres.num_blocks", "4"], "model.attnres must be empty when model.residual is 'standard'"),
        (["--model.residual", "attnres", "--model.attnres", '{"num_blokcs": 4}'], "did you mean 'num_blocks'"),
        (["--schedule.steps", "3", "--schedule.epochs", "1"], "schedule.steps and schedule.epochs"),
        (["--data.batch_size", "63", "--grad_accumulation", "2"], "data.batch_size must be a multiple"),
        (["--schedule.min_lr", "-1"], "schedule.min_lr must be at least 0, got -1.0"),
        (["--seed", "-1"], "seed must be at least 0, got -1"),
        (["--data.name", "digits"], "data.num_classes must be 10 for data.name 'digits', got 1000"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_mistakes_on_the_command_line_are_errors(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        load_config(ImageConfig, argv)
    assert stopped.value.code != 0
    assert message in capsys.readouterr().err


def test_unknown_key_in_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("optim: {learning_rate: 1.0}\n")
    with pytest.raises(SystemExit):
        load_config(ImageConfig, ["--config", str(path)])
    assert "learning_rate" in capsys.readouterr().err


def test_unknown_key_in_a_variant_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text("variants: {standard: {}, typo: {model: {residul: attnres}}}\n")
    with pytest.raises(SystemExit, match=r"variant 'typo'.*residul"):
        compare.main(["--config", str(path), "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_dumped_config_is_the_same_config(digits: Any, tmp_path: Path) -> None:
    config = digits({"model": {"residual": "attnres", "attnres": {"num_blocks": 2}}, "optim": {"lr": 1e-4}})
    dump_config(config, tmp_path / "config.yaml")
    assert load_config(ImageConfig, ["--config", str(tmp_path / "config.yaml")]) == config


def test_the_hash_tells_what_is_computed_not_where(digits: Any) -> None:
    config = digits()
    elsewhere = from_fields(ImageConfig, merge(to_fields(config), {"output_dir": "x", "checkpoint_interval": 3}))
    other = from_fields(ImageConfig, merge(to_fields(config), {"optim": {"lr": 1.0}}))
    assert config_hash(elsewhere) == config_hash(config) != config_hash(other)


def test_one_table_serves_the_training_script_and_the_comparison(tmp_path: Path) -> None:
    table = ROOT / "configs" / "image" / "digits.yaml"
    argv = ["--config", str(table), "--variant", "block", "--optim.lr", "0.5"]
    config = load_config(ImageConfig, argv)
    variant = yaml.safe_load(table.read_text())["variants"]["block"]
    assert config.model.attnres == variant["model"]["attnres"]
    assert config.optim.lr == 0.5
    with pytest.raises(SystemExit, match="standard, control"):
        load_config(ImageConfig, ["--config", str(table), "--variant", "none"])
