"""The report of a comparison: `summary.json`, `report.md` with `plots/`, and one self-contained `report.html`.

It is the list `PANELS`, for every task: a panel that finds nothing in the results says nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from training.report.panels import conclusions, depth, losses, noise, samples, setup, sweeps, variants
from training.report.render import text_table, to_html, to_markdown
from training.report.results import Result, at_rate
from training.report.summary import summarise
from training.report.sweep import sweep
from training.report.view import Panel, View
from training.system.disk import write_json

PANELS: tuple[Panel, ...] = (
    variants.table,
    variants.failures,
    conclusions.panel,
    samples.panel,
    losses.curves,
    noise.panel,
    losses.multiplier,
    losses.learning_rates,
    sweeps.panel,
    depth.weights,
    depth.profile,
    setup.configs,
    setup.environments,
)


def write(
    output_dir: Path,
    name: str,
    baseline: str,
    results: Sequence[Result],
    failures: dict[str, str],
    speed: dict[str, dict[str, float]],
) -> str:
    """Write all three files; returns the table of variants as text."""
    groups = sweep(results, baseline)
    # where the baseline has been swept, too, its best setting is what all others are compared with
    reference = groups[0]["best"]["variant"] if groups else baseline
    summary = {"name": name, **summarise(results, reference, failures, speed), "sweep": groups}
    write_json(output_dir / "summary.json", summary)
    # a sweep has too many variants for plots of all: the best of each kind
    shown = [group["best"]["variant"] for group in groups] or list(summary["variants"])
    chosen = {name: at_rate(results, name, summary["variants"][name]["best_learning_rate"]) for name in shown}
    folder = output_dir / "plots"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    view = View(summary, chosen, folder)
    blocks = [block for panel in PANELS for block in panel(view)]
    (output_dir / "report.md").write_text(to_markdown(blocks, output_dir))
    (output_dir / "report.html").write_text(to_html(name, blocks))
    return text_table(variants.variant_table(summary))
