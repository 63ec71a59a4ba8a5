"""The comparison: what it writes, what it repeats, and whether the report's numbers are those of the metrics."""

from __future__ import annotations

import gc
import json
import re
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.training.conftest import DIGITS, run
from training import compare
from training.report import summary
from training.report.panels import conclusions
from training.report.results import spread as spread_of
from training.tasks import image

VARIANTS = {
    "standard": {},
    "block": {"model": {"residual": "attnres", "attnres": {"num_blocks": 2}}},
}


def table(tmp_path: Path, **fields: Any) -> Path:
    base = {**DIGITS, "schedule": {"steps": 8}, "eval_interval": 2}
    path = tmp_path / "table.yaml"
    content = {"name": "tiny", "base": base, "variants": VARIANTS, "seeds": [0, 1], "jobs": 2, "speed_rounds": 1}
    path.write_text(yaml.safe_dump({**content, **fields}, sort_keys=False))
    return path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[compare.Run]:
    """Train in this process instead of starting one per run; the runs that trained."""
    trained: list[compare.Run] = []

    def one(item: compare.Run) -> tuple[float, str | None]:
        trained.append(item)
        try:
            image.train(item.config)
        except Exception as error:
            return 0.0, str(error)
        return 0.0, None

    monkeypatch.setattr(compare, "_run_process", one)
    return trained


def test_comparison_writes_everything_and_repeats_nothing(tmp_path: Path, in_process: list[compare.Run]) -> None:
    argv = ["--config", str(table(tmp_path)), "--output_dir", str(tmp_path / "out"), "--jobs", "1"]
    assert compare.main(argv) == 0
    out = tmp_path / "out"
    assert len(in_process) == 4
    page = (out / "report.html").read_text()
    pictures = sorted(path.name for path in (out / "plots").glob("*.png"))
    assert pictures == ["depth.png", "difference.png", "loss.png", "weights_block.png"]
    assert page.count("data:image/png;base64,") == 4
    assert not re.search(r'(src|href)="(?!data:)', page)  # one file, nothing beside it
    for name in pictures:
        assert f"(plots/{name})" in (out / "report.md").read_text()
    found = json.loads((out / "summary.json").read_text())
    assert list(found["variants"]) == ["standard", "block"]
    assert found["config_differences"]["model.residual"] == {"standard": "standard", "block": "attnres"}
    assert "seed" not in found["config_differences"]

    assert compare.main(argv) == 0
    assert len(in_process) == 4  # all complete

    gone = in_process[3]
    (gone.folder / "result.json").unlink()
    shutil.rmtree(gone.folder / "checkpoints")
    before = (in_process[0].folder / "result.json").stat().st_mtime_ns
    assert compare.main(argv) == 0
    assert [item.label for item in in_process[4:]] == [gone.label]
    assert (in_process[0].folder / "result.json").stat().st_mtime_ns == before
    again = json.loads((out / "summary.json").read_text())
    assert again["variants"]["block"]["runs"] == found["variants"]["block"]["runs"]

    changed = [*argv, "--base.optim.lr", "1e-3"]
    assert compare.main(changed) == 0
    assert len(in_process) == 5 + 4  # another config, other runs
    assert in_process[0].folder.exists()


def test_the_report_says_what_the_metrics_say(tmp_path: Path, in_process: list[compare.Run]) -> None:
    """Every number recomputed here from metrics.jsonl, without the report's code."""
    path = table(tmp_path, learning_rates=[1e-3, 1e-2])
    assert compare.main(["--config", str(path), "--output_dir", str(tmp_path / "out"), "--jobs", "1"]) == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    lines: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for item in in_process:
        text = (item.folder / "metrics.jsonl").read_text()
        lines[item.variant, item.config.optim.lr, item.seed] = [json.loads(line) for line in text.splitlines()]
    last = {key: [line for line in of_run if line["kind"] == "eval"][-1] for key, of_run in lines.items()}
    results = {
        (item.variant, item.config.optim.lr, item.seed): json.loads((item.folder / "result.json").read_text())
        for item in in_process
    }
    final = {key: [line for line in of_run if line["kind"] == "train"][-1]["loss"] for key, of_run in lines.items()}

    best = {}
    for name in VARIANTS:
        means = {rate: (last[name, rate, 0]["loss"] + last[name, rate, 1]["loss"]) / 2 for rate in (1e-3, 1e-2)}
        best[name] = min(means, key=lambda rate: means[rate])
        entry = found["variants"][name]
        assert entry["best_learning_rate"] == best[name]
        assert entry["val_loss"]["mean"] == pytest.approx(means[best[name]])
        assert entry["val_loss"]["sd"] == pytest.approx(
            abs(last[name, best[name], 0]["loss"] - last[name, best[name], 1]["loss"]) / 2**0.5
        )
        # 5 % of 8 steps are less than one: the last step's loss
        assert entry["train_loss"]["values"] == pytest.approx([final[name, best[name], seed] for seed in (0, 1)])
        for key in ("test_loss", "test_top1"):
            assert entry[key]["values"] == [results[name, best[name], seed][key] for seed in (0, 1)]
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"Chosen on validation: standard: lr {best['standard']:g}; block: lr {best['block']:g}. Reported on" in text
    block = found["variants"]["block"]
    pairs = [
        results["block", best["block"], seed]["test_loss"] - results["standard", best["standard"], seed]["test_loss"]
        for seed in (0, 1)
    ]
    assert block["difference"]["test_loss"]["values"] == pytest.approx(pairs)
    assert block["difference"]["test_loss"]["same_sign"] == (pairs[0] * pairs[1] > 0)

    def curve(name: str) -> dict[int, float]:
        of_seeds = [
            {line["step"]: line["loss"] for line in lines[name, best[name], seed] if line["kind"] == "eval"}
            for seed in (0, 1)
        ]
        return {step: (of_seeds[0][step] + of_seeds[1][step]) / 2 for step in of_seeds[0]}

    target, standard = curve("block")[8], curve("standard")
    multiplier = block["compute_multiplier"]["eval"]
    reached = [step for step, loss in standard.items() if loss <= target]
    assert multiplier["reached"] == bool(reached)
    if not reached:
        assert multiplier["value"] == 1.0
    elif reached[0] == 2:
        assert multiplier["value"] == 2 / 8
    else:
        after = reached[0]
        share = (standard[after - 2] - target) / (standard[after - 2] - standard[after])
        assert multiplier["value"] == pytest.approx((after - 2 + 2 * share) / 8)

    text = (tmp_path / "out" / "report.md").read_text()
    mean, sd = statistics.fmean(pairs), statistics.stdev(pairs)
    assert f"{mean:+.4f} ± {sd:.4f}" in text
    assert ", ".join(f"{pair:+.4f}" for pair in pairs) in text


def test_a_failing_run_is_reported_and_the_others_still_run(tmp_path: Path) -> None:
    """In real processes, as a user starts it."""
    variants = {**VARIANTS, "broken": {"optim": {"lr": 1e30, "clip_grad": None}}}
    path = table(tmp_path, variants=variants, seeds=[0], base={**DIGITS, "schedule": {"steps": 3}})
    done = run("-m", "training.compare", "--config", path, "--output_dir", tmp_path / "out")
    assert done.returncode == 1
    assert "FAILED: broken, lr 1e+30, seed 0" in done.stderr
    assert "the training loss is" in done.stderr
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(found["variants"]) == ["standard", "block"]
    assert "broken, lr 1e+30, seed 0" in found["failures"]
    assert "Failed runs" in (tmp_path / "out" / "report.md").read_text()


def test_a_damaged_result_is_made_again(tmp_path: Path, in_process: list[compare.Run]) -> None:
    path = table(tmp_path, seeds=[0], speed_rounds=0)
    argv = ["--config", str(path), "--output_dir", str(tmp_path / "out"), "--jobs", "1"]
    assert compare.main(argv) == 0
    before = json.loads((tmp_path / "out" / "summary.json").read_text())["variants"]["block"]["val_loss"]
    result = next((tmp_path / "out" / "runs" / "block").glob("*/result.json"))
    result.write_text(result.read_text()[:100])
    assert compare.main(argv) == 0
    assert [item.variant for item in in_process] == ["standard", "block", "block"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["variants"]["block"]["val_loss"] == before


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path, in_process: list[compare.Run]) -> None:
    argv = ["--config", str(table(tmp_path, seeds=[0], speed_rounds=0)), "--output_dir", str(tmp_path / "out")]
    assert compare.main([*argv, "--jobs", "1"]) == 0
    other = run("-m", "training.compare", *argv)
    assert other.returncode == 1 and "another process is training into" in other.stderr


def test_nothing_else_begins_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def interrupted(item: compare.Run) -> tuple[float, str | None]:
        begun.append(item.label)
        time.sleep(0.3)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "_run_process", interrupted)
    argv = ["--config", str(table(tmp_path)), "--output_dir", str(tmp_path / "out"), "--jobs", "1"]
    with pytest.raises(KeyboardInterrupt):
        compare.main(argv)
    assert len(begun) <= 2  # of four; the worker may have taken the second one already


def test_smoke_changes_the_table_and_the_command_line_still_wins(tmp_path: Path) -> None:
    path = table(tmp_path, smoke={"seeds": [5], "base": {"schedule": {"steps": 2}}})
    config, folder = compare.load(["--config", str(path), "--smoke", "--base.optim.lr", "0.5"])
    assert (config.seeds, config.base.schedule.steps, config.base.optim.lr) == ([5], 2, 0.5)
    assert folder == Path("runs/table-smoke")
    config, folder = compare.load(["--config", str(path), "--smoke", "--base.schedule.steps", "3"])
    assert config.base.schedule.steps == 3
    assert compare.load(["--config", str(path)])[1] == Path("runs/table")


def test_standard_that_never_reaches_the_loss_is_a_lower_bound() -> None:
    steps = np.array([10.0, 20.0, 30.0])
    assert summary.first_crossing(steps, np.array([3.0, 2.0, 1.0]), 0.9) is None
    assert summary.first_crossing(steps, np.array([3.0, 2.0, 1.0]), 1.5) == 25.0
    assert summary.first_crossing(steps, np.array([1.0, 2.0, 0.5]), 1.0) == 10.0


@pytest.mark.parametrize(
    ("values", "phrases"),
    [
        ([-0.1], ["one seed", "no conclusion"]),
        ([-0.1, -0.2, -0.15], ["lower with every one of the 3 seeds", "mean -0.1500", "in 25 % of such comparisons"]),
        ([0.1, 0.2, 0.15], ["higher with every one of the 3 seeds"]),
        ([-0.1, 0.2, -0.15], ["lower with 2 of 3 seeds", "do not tell it from standard"]),
    ],
    ids=["one seed", "lower", "higher", "mixed"],
)
def test_conclusions_say_no_more_than_the_seeds(values: list[float], phrases: list[str]) -> None:
    difference = {
        **spread_of(values),
        "seeds": list(range(len(values))),
        "same_sign": len({value > 0 for value in values}) == 1,
    }
    found = {
        "baseline": "standard",
        "config_differences": {},
        "variants": {"standard": {}, "block": {"difference": {"test_loss": difference}}},
    }
    sentence = conclusions.conclusions(found)[0]
    assert sentence.startswith("block against standard, test loss:")
    for phrase in phrases:
        assert phrase in sentence


def test_runs_in_one_process_leave_no_model_behind(tmp_path: Path) -> None:
    """Under a launcher all runs share a process: the second model of 13 B parameters must not meet the first."""

    def models() -> int:
        return sum(type(thing).__name__ == "VisionTransformer" for thing in gc.get_objects())

    gc.collect()
    before = models()
    base = {**DIGITS, "schedule": {"steps": 1}, "mixed_precision": "bf16"}
    config, folder = compare.load(
        ["--config", str(table(tmp_path, seeds=[0], base=base)), "--output_dir", str(tmp_path)]
    )
    compare.run_in_this_process(compare.plan(config, folder))
    assert models() == before


def test_comparison_under_a_launcher_with_two_processes(tmp_path: Path) -> None:
    path = table(tmp_path, seeds=[0], base={**DIGITS, "schedule": {"steps": 2}})
    done = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2),
        *("-m", "training.compare", "--config", path, "--output_dir", tmp_path / "out"),
        ACCELERATE_USE_CPU="true",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(file.read_text()) for file in (tmp_path / "out").rglob("result.json")]
    assert [result["processes"] for result in results] == [2, 2]
    assert (tmp_path / "out" / "report.html").exists()
