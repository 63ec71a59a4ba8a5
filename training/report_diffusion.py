"""What a report says about generation: samples next to each other, the loss and the depth weights per noise level.

Each function returns no blocks where the results have nothing of the kind, as those of image classification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training import generate, plots_diffusion, tables
from training.render import Block
from training.summary import Result, mean_weights

_COLUMNS = 6  # captions shown; all of them are in the runs' folders
_MAPS = 3  # noise levels with a heat map


def sample_blocks(folder: Path, chosen: Mapping[str, Sequence[Result]]) -> list[Block]:
    """One animation and a contact sheet per caption: a row per variant, of its first seed's run, and the real clip."""
    found = {variant: runs[0] for variant, runs in chosen.items() if runs[0].result.get("samples")}
    clips, notes = {}, []
    for variant, run in found.items():
        samples = run.result["samples"]
        try:
            clips[variant] = [generate.read_strip(run.folder / path, samples["frames"]) for path in samples["strips"]]
        except (KeyError, OSError) as error:
            reason = samples.get("note") or f"its pictures cannot be read ({error})"
            notes.append(f"{variant}: no samples are shown, {reason}")
    blocks = [Block("list", items=notes)] if notes else []
    if not clips:
        return blocks
    first = found[next(iter(clips))]
    samples, captions = first.result["samples"], first.result["samples"]["captions"]
    real = {
        caption: generate.read_strip(first.folder / path, samples["frames"])
        for caption, path in samples["real"].items()
        if (first.folder / path).exists()
    }
    shown = range(min(len(captions), _COLUMNS))
    rows = [(variant, [(captions[i], of_variant[i]) for i in shown]) for variant, of_variant in clips.items()]
    if all(captions[i] in real for i in shown):
        rows.insert(0, ("real", [(captions[i], real[captions[i]]) for i in shown]))
    generate.write_grid_gif(folder / "samples.gif", rows, samples["fps"])
    text = (
        f"Samples of each variant's run with seed {first.seed}, from the same noise in every row (sampling seed "
        f"{samples['seed']}); what is real is a test clip with that caption, not a target."
    )
    blocks.append(Block("plot", text, path=folder / "samples.gif"))
    for number, caption in enumerate(dict.fromkeys(captions[i] for i in shown)):
        index = captions.index(caption)
        sheet = [("real", real[caption])] if caption in real else []
        sheet += [(variant, of_variant[index]) for variant, of_variant in clips.items()]
        path = folder / f"samples_{number}.png"
        generate.write_sheet(path, sheet, caption)
        blocks.append(Block("plot", f"{caption}: a row per variant, time to the right.", path=path))
    if len(captions) > _COLUMNS:
        blocks.append(Block("text", f"The first {_COLUMNS} of {len(captions)} samples; all are in the runs' folders."))
    return blocks


def bucket_blocks(
    folder: Path, summary: Mapping[str, Any], chosen: Mapping[str, Sequence[Result]], palette: Mapping[str, str]
) -> list[Block]:
    """Table and plot of the test loss per range of noise levels."""
    found = {name: summary["variants"][name]["buckets"] for name in chosen if summary["variants"][name].get("buckets")}
    if not found:
        return []
    ranges = [f"{bucket['low']:g} to {bucket['high']:g}" for bucket in next(iter(found.values()))]
    losses = {
        name: np.array([bucket["loss"]["values"] for bucket in of_variant]).T for name, of_variant in found.items()
    }
    differences = {
        name: np.array([bucket["difference"]["values"] for bucket in of_variant]).T
        for name, of_variant in found.items()
        if all(bucket["difference"] for bucket in of_variant)
    }
    plots_diffusion.buckets(folder / "buckets.png", ranges, losses, differences, summary["baseline"], palette)
    text = (
        "Final test loss by noise level, on the same clips and noise for all. Line and band: mean and range over "
        "the seeds."
    )
    if differences:
        text += f" Right: difference to {summary['baseline']} with the same seed, a dot per seed, a bar at their mean."
    return [
        Block("table", rows=tables.bucket_table({**summary, "variants": {n: summary["variants"][n] for n in found}})),
        Block("plot", text, path=folder / "buckets.png"),
    ]


def weight_blocks(folder: Path, chosen: Mapping[str, Sequence[Result]], palette: Mapping[str, str]) -> list[Block]:
    """Depth weights against the noise level: curves of all variants per stream, and heat maps at a few levels."""
    found = {
        variant: levels
        for variant, runs in chosen.items()
        if not frozen(runs[0]) and (levels := _mean_levels(runs)) is not None
    }
    if not found:
        return []
    streams = list(dict.fromkeys(row.get("stream", "") for levels in found.values() for row in levels[0][1][0]))
    kinds = {"embedding": _embedding, "blocks between": _between, "newest source": _newest}
    panels = [
        [
            (
                f"{stream} stream: {kind}" if stream else kind,
                {
                    variant: (np.array([sigma for sigma, _ in levels]), _relative(levels, stream, pick))
                    for variant, levels in found.items()
                },
            )
            for kind, pick in kinds.items()
        ]
        for stream in streams
    ]
    plots_diffusion.weights_by_noise(folder / "weights_by_noise.png", panels, palette)
    blocks = [
        Block(
            "plot",
            "Depth weights against the noise level, on the same clips and noise: weight times the reader's number of "
            "sources, so that 1 is the standard residual; mean over the readers of a stream. The newest source is what "
            "the sublayers just before the reader wrote. Line and band: mean and range over the seeds.",
            path=folder / "weights_by_noise.png",
        )
    ]
    for variant, levels in found.items():
        picked = sorted({0, len(levels) // 2, len(levels) - 1})[:_MAPS]
        maps = {
            stream: [(levels[index][0], _of_stream(mean_weights(levels[index][1]), stream)) for index in picked]
            for stream in streams
            if _of_stream(levels[0][1][0], stream)
        }
        path = folder / f"weights_{variant}.png"
        plots_diffusion.weight_maps(path, variant, maps)
        text = (
            f"{variant}: mean weight of every source of every reader at some noise levels, times the reader's number "
            "of sources: 1 (white) is the standard residual."
        )
        blocks.append(Block("plot", text, path=path))
    return blocks


def sweep_blocks(folder: Path, groups: Sequence[dict[str, Any]]) -> list[Block]:
    """Table and plot of a sweep."""
    if not groups:
        return []
    plots_diffusion.sweep(folder / "sweep.png", groups)
    text = (
        f"Final validation loss of every setting, by which the best ones are chosen; mean and range over the seeds. "
        f"Dashed, with its band: the best of {len(groups[0]['settings'])} settings of {groups[0]['label']}. Test "
        f"losses and differences are of the chosen settings; the last column is the difference to the best of "
        f"{groups[0]['label']} with the learning rate of the kind's best setting."
    )
    shown = "Everything below and the plots above show the best setting of each kind; the first table has them all."
    return [
        Block("table", rows=tables.sweep_table(groups)),
        Block("plot", text, path=folder / "sweep.png"),
        Block("text", shown),
    ]


def frozen(run: Result) -> bool:
    """Whether the run kept its queries at zero: its weights are equal, everywhere and for ever."""
    return bool(run.result["config"]["model"].get("freeze_queries"))


Levels = list[tuple[float, list[list[dict[str, Any]]]]]  # (sigma, per seed the readers)


def _mean_levels(runs: Sequence[Result]) -> Levels | None:
    of_runs = [run.result.get("depth_weights_by_timestep") for run in runs]
    known = [levels for levels in of_runs if levels]
    if not known:
        return None
    ordered = [sorted(levels, key=lambda level: level["sigma"]) for levels in known]
    return [(levels[0]["sigma"], [level["readers"] for level in levels]) for levels in zip(*ordered, strict=True)]


def _relative(levels: Levels, stream: str, pick: Any) -> np.ndarray:
    """Mean over the readers of a stream of the weights that `pick` takes, (seeds, levels); nan where there are none."""
    values = []
    for _, of_seeds in levels:
        of_level = []
        for readers in of_seeds:
            weights = [np.array(row["weights"]) * len(row["weights"]) for row in _of_stream(readers, stream)]
            picked = [found for weight in weights if len(found := pick(weight))]
            of_level.append(np.mean([found.mean() for found in picked]) if picked else np.nan)
        values.append(of_level)
    return np.array(values).T


def _embedding(weights: np.ndarray) -> np.ndarray:
    return weights[:1]


def _between(weights: np.ndarray) -> np.ndarray:
    return weights[1:-1]


def _newest(weights: np.ndarray) -> np.ndarray:
    return weights[-1:]


def _of_stream(readers: Sequence[dict[str, Any]], stream: str) -> list[dict[str, Any]]:
    return [row for row in readers if row.get("stream", "") == stream]
