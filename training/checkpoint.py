"""Atomic checkpoints on top of accelerate's `save_state`.

A checkpoint is written into a folder with a temporary name, flushed to the disk, given a manifest of its files and
only then renamed to `step_<number>`. A folder without a manifest, or whose files differ from it, is never loaded: a
run that was killed while it wrote continues from the checkpoint before. All processes must see the same disk.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from accelerate import Accelerator

MANIFEST = "manifest.json"


def save(accelerator: Accelerator, run_dir: Path, step: int, keep: int) -> Path:
    """Write the state of everything prepared or registered with `accelerator`; keep the `keep` newest checkpoints."""
    folder = run_dir / "checkpoints"
    final = folder / f"step_{step:08d}"
    writing = folder / f".writing_{step:08d}"
    if accelerator.is_main_process:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(writing))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        files = sorted(path for path in writing.rglob("*") if path.is_file())
        for path in files:
            flush_to_disk(path)
        sizes = {str(path.relative_to(writing)): path.stat().st_size for path in files}
        manifest = {"step": step, "processes": accelerator.num_processes, "files": sizes}
        (writing / MANIFEST).write_text(json.dumps(manifest, indent=1))
        flush_to_disk(writing / MANIFEST)
        flush_to_disk(writing)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(writing, final)
        flush_to_disk(folder)
        for old in whole_checkpoints(run_dir)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return [path for path in sorted((run_dir / "checkpoints").glob("step_*")) if what_is_wrong(path) is None]


def what_is_wrong(checkpoint: Path) -> str | None:
    """Why this folder is not a whole checkpoint; None if it is one."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"it has no readable {MANIFEST}"
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return None


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint that `resume` ("auto", "none" or a path) means; None is a fresh start.

    Raises:
        ValueError: the path given is not a whole checkpoint.
    """
    if resume == "none":
        return None
    if resume == "auto":
        whole = whole_checkpoints(run_dir)
        return whole[-1] if whole else None
    wrong = what_is_wrong(Path(resume))
    if wrong is not None:
        raise ValueError(f"resume must be 'auto', 'none' or the path of a whole checkpoint, got {resume!r}: {wrong}")
    return Path(resume)


def load(accelerator: Accelerator, checkpoint: Path) -> None:
    """Restore everything prepared or registered with `accelerator`.

    Raises:
        ValueError: the checkpoint is of another number of processes, whose random states it cannot give back.
    """
    processes = json.loads((checkpoint / MANIFEST).read_text())["processes"]
    if processes != accelerator.num_processes:
        raise ValueError(
            f"{checkpoint} was written by {processes} processes, this run has {accelerator.num_processes}: "
            "continue with the same number"
        )
    accelerator.load_state(str(checkpoint))


def flush_to_disk(path: Path) -> None:
    """Ask the system to write a file, or a folder's list of names, to the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
