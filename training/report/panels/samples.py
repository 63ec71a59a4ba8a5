"""Generated clips of all variants next to each other."""

from __future__ import annotations

from training.evaluation.samples import read_strip, write_grid_gif, write_sheet
from training.report.render import Block
from training.report.view import View

_COLUMNS = 6  # captions shown; all of them are in the runs' folders


def panel(view: View) -> list[Block]:
    """One animation and a contact sheet per caption: a row per variant, of its first seed's run, and the real clip."""
    found = {variant: runs[0] for variant, runs in view.shown.items() if runs[0].result.get("samples")}
    if not found:
        return []
    clips, notes = {}, []
    for variant, run in found.items():
        made = run.result["samples"]
        try:
            clips[variant] = [read_strip(run.folder / path, made["frames"]) for path in made["strips"]]
        except (KeyError, OSError) as error:
            reason = made.get("note") or f"its pictures cannot be read ({error})"
            notes.append(f"{variant}: no samples are shown, {reason}")
    blocks = [Block("heading", "Samples"), *([Block("list", items=notes)] if notes else [])]
    if not clips:
        return blocks
    first = found[next(iter(clips))]
    made, captions = first.result["samples"], first.result["samples"]["captions"]
    real = {
        caption: read_strip(first.folder / path, made["frames"])
        for caption, path in made["real"].items()
        if (first.folder / path).exists()
    }
    shown = range(min(len(captions), _COLUMNS))
    rows = [(variant, [(captions[i], of_variant[i]) for i in shown]) for variant, of_variant in clips.items()]
    if all(captions[i] in real for i in shown):
        rows.insert(0, ("real", [(captions[i], real[captions[i]]) for i in shown]))
    write_grid_gif(view.folder / "samples.gif", rows, made["fps"])
    text = (
        f"Samples of each variant's run with seed {first.seed}, from the same noise in every row (sampling seed "
        f"{made['seed']}); what is real is a test clip with that caption, not a target."
    )
    blocks.append(Block("plot", text, path=view.folder / "samples.gif"))
    for number, caption in enumerate(dict.fromkeys(captions[i] for i in shown)):
        index, path = captions.index(caption), view.folder / f"samples_{number}.png"
        sheet = [("real", real[caption])] if caption in real else []
        write_sheet(path, [*sheet, *((variant, of_variant[index]) for variant, of_variant in clips.items())], caption)
        blocks.append(Block("plot", f"{caption}: a row per variant, time to the right.", path=path))
    if len(captions) > _COLUMNS:
        blocks.append(Block("text", f"The first {_COLUMNS} of {len(captions)} samples; all are in the runs' folders."))
    return blocks
