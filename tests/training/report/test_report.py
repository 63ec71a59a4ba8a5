"""The report of a video table: what it shows, what it says, and that image tables are described as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import attnres_vision
from training.config.io import merge
from training.evaluation.diagnostics import depth_profile, depth_weights, depth_weights_by_timestep
from training.evaluation.samples import read_strip, write_samples
from training.report import metrics
from training.report.panels import conclusions
from training.report.results import Result
from training.report.results import spread as spread_of
from training.report.sweep import sweep
from training.report.write import write

ENVIRONMENT = {"device": "cpu (x)", "threads": 1, "python": "3.11", "packages": {"torch": "2"}, "git": None}
ATTNRES = {"model": {"residual": "attnres", "attnres": {"num_blocks": 2, "query": "condition"}}}
CAPTIONS = ["a street", "a cartoon"]


def weights(level: float) -> list[dict[str, Any]]:
    def row(name: str, stream: str, sources: int) -> dict[str, Any]:
        shares = np.linspace(1, 1 + level, sources)
        names = ["embedding", *(f"block {index}" for index in range(1, sources))]
        return {
            "reader": f"{name} ({stream})",
            "stream": stream,
            "sources": names,
            "weights": list(shares / shares.sum()),
        }

    blocks = [f"transformer_blocks.{index}" for index in range(4)]
    image = [row(f"{block}.norm1", "image", 2 + index // 2) for index, block in enumerate(blocks)]
    return [*image, *(row(f"{block}.norm1_context", "text", 2 + index // 2) for index, block in enumerate(blocks))]


def result(
    folder: Path,
    variant: str,
    seed: int,
    loss: float,
    changes: dict[str, Any] | None = None,
    samples: bool = True,
    **fields: Any,
) -> Result:
    """A complete run with what training/video.py writes."""
    folder = folder / variant / f"{seed}_{loss}"
    folder.mkdir(parents=True)
    base = {"model": {"residual": "standard", "attnres": {}, "freeze_queries": False}, "optim": {"lr": 1e-3}}
    config = merge(base, changes or {})
    records = [{"kind": "train", "step": step, "loss": loss + 1 / step} for step in range(1, 41)]
    records += [{"kind": "eval", "step": step, "loss": loss + 0.5 / step} for step in (10, 20, 30, 40)]
    records = [{**record, "samples": 4 * record["step"], "seconds": 0.1 * record["step"]} for record in records]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    attnres = config["model"]["residual"] == "attnres"
    clips = torch.rand(2, 3, 4, 16, 16, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    found = {
        "config": config,
        "environment": ENVIRONMENT,
        "steps": 40,
        "parameters": 2_000_000,
        "gflops": 1.5,
        "clips_per_second": 3.21,
        "peak_memory": 2**28,
        "peak_memory_before": 2**27,
        "train_loss": loss + 0.02,
        "val_loss": loss,
        "test_loss": loss,
        "test_loss_raw": loss + 0.01,
        "test_loss_untrained": 1.25,
        "test_buckets": [
            {"low": i / 4, "high": (i + 1) / 4, "loss": loss + 0.1 * i, "loss_raw": loss + 0.11 * i} for i in range(4)
        ],
        "frechet": {"value": 10 * loss, "extractor": "fixed random network", "real": 8, "generated": 8},
        "profile": {"start": [], "end": []},
        "depth_weights": weights(0.5) if attnres else [],
        "depth_weights_by_timestep": [
            {"sigma": sigma, "readers": weights(sigma)} for sigma in (0.9, 0.5, 0.1) if attnres
        ],
        "samples": write_samples(folder, clips, CAPTIONS, seed=0, real={c: clips[0] for c in CAPTIONS})
        if samples
        else None,
        **fields,
    }
    return Result(variant, seed, config["optim"]["lr"], folder, found)


def written(out: Path, results: list[Result]) -> tuple[str, str, dict[str, Any]]:
    """Markdown, HTML and summary of the report."""
    out.mkdir()
    write(out, "clips", "standard", results, {}, {})
    found = json.loads((out / "summary.json").read_text())
    return (out / "report.md").read_text(), (out / "report.html").read_text(), found


def test_a_video_table_shows_losses_samples_and_weights(tmp_path: Path) -> None:
    results = [
        result(tmp_path, name, seed, loss + 0.01 * seed, changes)
        for name, loss, changes in (("standard", 0.25, None), ("condition", 0.24, ATTNRES))
        for seed in (0, 1)
    ]
    text, page, found = written(tmp_path / "out", results)
    head = next(line for line in text.splitlines() if line.startswith("| variant"))
    row = next(line for line in text.splitlines() if line.startswith("| condition"))
    cells = dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert "top-1" not in head and "images" not in text
    assert cells["test flow loss"] == "0.2450 ± 0.0071"
    assert cells["test, without EMA"] == "0.2550 ± 0.0071"
    assert cells["test, below untrained %"] == "80.4 ± 0.6"
    assert cells["clips/s"] == "3.21"
    assert cells["Δ test flow loss"] == "-0.0100 ± 0.0000"
    assert "Test loss before training: 1.2500" in text and "fixed random network, 8 real and 8 generated clips" in text
    assert "| Δ condition | -0.0100 ± 0.0000 | -0.0100 ± 0.0000 |" in text
    assert "| standard | 0.2550 ± 0.0071 | 0.3550 ± 0.0071 |" in text
    assert found["variants"]["condition"]["buckets"][3]["difference"]["values"] == pytest.approx([-0.01, -0.01])
    pictures = {path.name for path in (tmp_path / "out" / "plots").iterdir()}
    assert pictures == {
        *("loss.png", "difference.png", "buckets.png", "samples.gif", "samples_0.png", "samples_1.png"),
        *("weights_by_noise.png", "weights_condition.png"),
    }
    assert all(f"(plots/{name})" in text for name in pictures)
    assert page.count("data:image/gif;base64,") == 1 and page.count("data:image/png;base64,") == 7
    with Image.open(tmp_path / "out" / "plots" / "samples.gif") as animation:
        assert animation.n_frames == 4
        assert animation.height > 3 * 112  # real, standard, condition


def test_samples_next_to_each_other_are_those_of_the_runs(tmp_path: Path) -> None:
    """The pixels of a variant's sheet row are the run's own: the same caption, the same place in time."""
    results = [result(tmp_path, "standard", 0, 0.25), result(tmp_path, "condition", 1, 0.24, ATTNRES)]
    written(tmp_path / "out", results)
    sheet = np.asarray(Image.open(tmp_path / "out" / "plots" / "samples_1.png"))
    for row, run in enumerate(results, start=1):  # after the real clip
        strip = read_strip(run.folder / run.result["samples"]["strips"][1], 4)
        side, gap = 16 * 6, 2
        left = sheet.shape[1] - 4 * (side + gap)
        for frame in range(4):
            top, x = 18 + row * (side + 2 * gap), left + frame * (side + gap)
            assert np.array_equal(sheet[top + 3 : top + side : 6, x + 3 : x + side : 6], strip[frame])


def test_a_run_without_metrics_or_pictures_is_in_the_tables(tmp_path: Path) -> None:
    results = [
        result(tmp_path, "standard", 0, 0.25),
        result(tmp_path, "standard", 1, 0.26),
        result(tmp_path, "lost", 0, 0.24, ATTNRES),
    ]
    (results[1].folder / "metrics.jsonl").write_text('{"kind": "ev')
    (results[2].folder / "metrics.jsonl").unlink()
    (results[2].folder / "samples" / "clip_1.png").unlink()
    text, _, found = written(tmp_path / "out", results)
    assert "| lost | 2.000 |" in text
    assert f"- {results[1].folder}" in text and f"- {results[2].folder}" in text
    assert "lost: no samples are shown" in text
    assert "compute_multiplier" not in found["variants"]["lost"]
    assert (tmp_path / "out" / "plots" / "loss.png").exists()

    for run in results:
        (run.folder / "metrics.jsonl").unlink(missing_ok=True)
    text, _, _ = written(tmp_path / "again", results)
    assert "loss.png" not in text and "| lost | 2.000 |" in text


def test_without_ema_samples_or_distance_their_columns_are_left_out(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"test_loss_raw": None, "frechet": None, "test_buckets": [], "samples": False}
    text, _, _ = written(tmp_path / "out", [result(tmp_path, "standard", 0, 0.25, **fields)])
    assert "EMA" not in text and "Fréchet" not in text and "Samples" not in text and "noise level" not in text


def test_metrics_of_an_image_table_name_the_split() -> None:
    task = metrics.of_result({"images_per_second": 5.0, "test_top1": 0.5})
    assert [metric.label for metric in task.metrics] == ["train loss", "val loss", "test loss", "test top-1 %"]
    assert [metric.delta for metric in task.metrics] == ["", "", "Δ test loss", "Δ test top-1"]
    assert task.rate == "images_per_second"


SWEEP = {"static": {}, "timestep": {"query": "condition", "condition": ["timestep"]}}


def sweep_results(folder: Path, seeds: tuple[int, ...] = (0, 1)) -> list[Result]:
    """Three learning rates of the standard residual; two kinds of query x two learning rate scales x two scales."""
    results = []
    for seed in seeds:
        for lr, loss in ((1e-3, 0.30), (2e-3, 0.25), (4e-3, 0.27)):
            name = "standard" if lr == 1e-3 else f"standard-{lr:g}"
            results.append(result(folder, name, seed, loss + 0.01 * seed, {"optim": {"lr": lr}}, samples=False))
        for kind, fields in SWEEP.items():
            for step in (0.01, 0.1):
                for scale in (0.1, 1.0):
                    changes = {
                        "optim": {"lr": 2e-3, "query_lr_scale": step},
                        # 1.0 is the default: a variant may leave it out
                        "model": {
                            "residual": "attnres",
                            "attnres": {"num_blocks": 4, **fields, **({"scale": scale} if scale != 1 else {})},
                        },
                    }
                    loss = 0.26 + 0.02 * np.log10(step * scale) + (0.03 if kind == "static" else 0)
                    name = f"{kind}-{step:g}-{scale:g}"
                    results.append(result(folder, name, seed, loss + 0.01 * seed, changes, samples=False))
    return results


def test_a_sweep_finds_its_kinds_axes_and_best_settings(tmp_path: Path) -> None:
    groups = sweep(sweep_results(tmp_path), "standard")
    assert [len(group["settings"]) for group in groups] == [3, 4, 4]
    assert groups[0]["axes"] == ["optim.lr"] and groups[0]["best"]["variant"] == "standard-0.002"
    for group in groups[1:]:
        assert sorted(group["axes"]) == ["model.attnres.scale", "optim.query_lr_scale"]
        assert group["best"]["values"] == {"optim.query_lr_scale": 0.01, "model.attnres.scale": 0.1}
    labels = [group["label"] for group in groups]
    assert labels == ["standard", "attnres, static", "attnres, condition"]
    best = 0.26 - 0.06
    assert groups[1]["difference"]["values"] == pytest.approx([best + 0.03 - 0.25] * 2)
    assert groups[2]["difference"]["values"] == pytest.approx([best - 0.25] * 2)
    assert groups[0]["edges"] == [] and sorted(groups[1]["edges"]) == sorted(groups[1]["axes"])


def test_a_kind_that_was_tried_at_another_learning_rate_is_also_compared_at_its_own(tmp_path: Path) -> None:
    results = [
        result(
            tmp_path, f"standard-{lr:g}" if lr != 1e-3 else "standard", 0, loss, {"optim": {"lr": lr}}, samples=False
        )
        for lr, loss in ((1e-3, 0.5), (2e-3, 0.4), (4e-3, 0.3))
    ]
    block = merge(ATTNRES, {"optim": {"lr": 1e-3}})
    results.append(result(tmp_path, "block", 0, 0.45, block, samples=False))
    text, _, found = written(tmp_path / "out", results)
    entry = found["sweep"][1]
    assert entry["difference"]["mean"] == pytest.approx(0.15)
    assert entry["difference_same_lr"]["mean"] == pytest.approx(-0.05)
    assert "better beyond: standard (lr 0.004)." in text
    assert "at its own learning rate, 0.001: -0.0500." in text


def test_the_report_of_a_sweep_compares_best_with_best_and_says_how_it_was_picked(tmp_path: Path) -> None:
    results = sweep_results(tmp_path)
    text, _, found = written(tmp_path / "out", results)
    assert len(found["variants"]) == 11
    pictures = {path.name for path in (tmp_path / "out" / "plots").iterdir()}
    assert "sweep.png" in pictures
    assert [name for name in pictures if name.startswith("weights_")] != []
    assert "weights_static-0.1-1.png" not in pictures  # plots of the best of each kind only
    assert "lower with every one of the 2 seeds" in text
    assert "Reported on test, which no choice has seen" in text
    assert "not given equal numbers of settings" in text  # 3 learning rates against 4 settings
    assert "scale 0.1, query_lr_scale 0.01" in text
    assert "Chosen on validation: standard: lr 0.002; attnres, static: " in text
    assert found["baseline"] == "standard-0.002"  # what all are compared with: the best of the standard residual


def test_a_table_without_repeated_kinds_is_no_sweep(tmp_path: Path) -> None:
    results = [
        result(tmp_path, "standard", 0, 0.25, samples=False),
        result(tmp_path, "static", 0, 0.24, {"model": {"residual": "attnres", "attnres": {"num_blocks": 4}}}),
        result(
            tmp_path, "token", 0, 0.24, {"model": {"residual": "attnres", "attnres": {"query": "token", "rank": 4}}}
        ),
    ]
    assert sweep(results, "standard") == []


def test_fewer_settings_than_another_kind_are_named() -> None:
    best = {"values": {"optim.lr": 1e-3}, "variant": "a", "lr": 1e-3}
    spread = spread_of([0.1, 0.2])
    setting = {**best, "val_loss": spread}
    groups = [
        {"label": "standard", "settings": [setting] * 3, "best": setting, "edges": [], "difference": None},
        {
            "label": "attnres",
            "settings": [setting] * 9,
            "best": setting,
            "edges": [],
            "difference_same_lr": None,
            "difference": {**spread_of([-0.1, 0.1]), "same_sign": False},
        },
    ]
    found = {"baseline": "standard", "config_differences": {}, "variants": {}, "sweep": groups}
    text = " ".join(conclusions.conclusions(found))
    assert "lower with 1 of 2 seeds: not told apart" in text
    assert "(standard: 3; attnres: 9)" in text


def test_depth_weights_by_timestep_are_depth_weights_at_each_noise_level() -> None:
    import dit

    torch.manual_seed(0)
    model = dit.models.AttnResHunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        text_embed_dim=8,
        pooled_projection_dim=8,
        guidance_embeds=False,
        rope_axes_dim=(2, 2, 4),
        attnres={"num_blocks": 2},
    )
    for name, parameter in model.named_parameters():
        if ".depth." in name:
            torch.nn.init.normal_(parameter)
    noise, clip = torch.randn(2, 4, 2, 4, 4), torch.randn(2, 4, 2, 4, 4)

    def forward(sigma: float) -> Any:
        return model(
            hidden_states=(1 - sigma) * clip + sigma * noise,
            timestep=torch.full((2,), 1000 * sigma),
            encoder_hidden_states=torch.ones(2, 3, 8),
            encoder_attention_mask=torch.ones(2, 3),
            pooled_projections=torch.ones(2, 8),
        )

    found = depth_weights_by_timestep(model, forward, [0.1, 0.9])
    assert [level["sigma"] for level in found] == [0.1, 0.9]
    assert found[1]["readers"] == depth_weights(model, lambda: forward(0.9))
    assert found[0]["readers"] != found[1]["readers"]
    assert {row["stream"] for row in found[0]["readers"]} == {"image", "text", "joint"}
    assert all(sum(row["weights"]) == pytest.approx(1, abs=1e-5) for row in found[0]["readers"])
    with pytest.warns(UserWarning, match="depth queries are not zero"):
        plain = attnres_vision.detach(model)
    assert depth_weights_by_timestep(plain, forward, [0.5]) == []


def test_a_model_without_blocks_of_timm_names_has_no_profile_and_costs_no_forward_pass() -> None:
    def forward() -> torch.Tensor:
        raise AssertionError("a forward pass with gradients that nobody looks at")

    assert depth_profile(torch.nn.Sequential(torch.nn.Linear(2, 2)), forward) == []
