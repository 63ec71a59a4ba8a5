"""Atomic checkpoints on top of accelerate's `save_state`.

A checkpoint is written into a folder with a temporary name, flushed to the disk, given a manifest of its files and
only then renamed to `step_<number>`. A folder without a manifest, or whose files differ from it, is never loaded: a
run that was killed while it wrote continues from the checkpoint before. All processes must see the same disk.

Of a model that starts from a stock checkpoint (the base), frozen weights are not written again: the manifest names the
base with the hashes of its files, and a run continues on that very base only.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from training.loop.optim import depth_parameters
from training.system.disk import flush_to_disk, sha256

MANIFEST = "manifest.json"
TRAINED = "trained.safetensors"
_BASE_FILES = ("*.safetensors", "*.bin", "config.json", "*.index.json")


def base_of(accelerator: Accelerator, folder: str) -> dict[str, Any]:
    """What checkpoints say about the base: its `path`, its `revision` (of a snapshot of the hub) and its files' hashes.

    All processes call it; the main one reads the files.
    """
    found: list[Any] = [None]
    if accelerator.is_main_process:
        path = Path(folder).resolve()
        files = sorted({file for pattern in _BASE_FILES for file in path.glob(pattern)})
        hub = path.parent if path.parent.parent.name == "snapshots" else path  # <revision>/transformer
        found[0] = {
            "path": str(path),
            "revision": hub.name if hub.parent.name == "snapshots" else None,
            "sha256": {file.name: sha256(file) for file in files},
        }
    return broadcast_object_list(found)[0]


def leave_out_base(accelerator: Accelerator, model: nn.Module) -> None:
    """Let checkpoints hold of `model` what the base does not: all but its frozen parameters."""

    def save_own(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        weights.clear()  # nothing is left for accelerate to save
        if accelerator.is_main_process:
            own = {name: value.contiguous() for name, value in _own_state(model).items()}
            safetensors.torch.save_file(own, Path(folder) / TRAINED)

    @torch.no_grad()
    def load_own(models: list[nn.Module], folder: str) -> None:
        models.clear()
        stored, own = safetensors.torch.load_file(Path(folder) / TRAINED), _own_state(model)
        if stored.keys() != own.keys():
            different = sorted(stored.keys() ^ own.keys())
            raise ValueError(f"{folder} is of another model: {different[0]!r} is trained in one of them only")
        for name, value in own.items():
            value.copy_(stored[name])

    accelerator.register_save_state_pre_hook(save_own)
    accelerator.register_load_state_pre_hook(load_own)


def of_base(model: nn.Module) -> set[str]:
    """The names of the parameters that stay as the base has them."""
    depth = set(map(id, depth_parameters(model)))
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and id(parameter) not in depth  # frozen queries are not of the base
    }


def _own_state(model: nn.Module) -> dict[str, Tensor]:
    base = of_base(model)
    return {name: value for name, value in model.state_dict().items() if name not in base}


def save(accelerator: Accelerator, run_dir: Path, step: int, keep: int, base: dict[str, Any] | None = None) -> Path:
    """Write the state of everything prepared or registered with `accelerator`; keep the `keep` newest checkpoints.

    `base` is what `base_of` says, of a model of `leave_out_base`.
    """
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
        manifest = {"step": step, "processes": accelerator.num_processes, "files": sizes, "base": base}
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


def load(accelerator: Accelerator, checkpoint: Path, base: dict[str, Any] | None = None) -> None:
    """Restore everything prepared or registered with `accelerator`.

    Raises:
        ValueError: the checkpoint is of another number of processes, whose random states it cannot give back, or was
            trained on another base than `base`.
    """
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    processes, before = manifest["processes"], manifest["base"]
    if processes != accelerator.num_processes:
        raise ValueError(
            f"{checkpoint} was written by {processes} processes, this run has {accelerator.num_processes}: "
            "continue with the same number"
        )
    hashes, now = ((of or {}).get("sha256", {}) for of in (before, base))
    different = sorted(name for name in {*hashes, *now} if hashes.get(name) != now.get(name))
    if different:
        raise ValueError(
            f"{checkpoint} holds what was trained on top of {_named(before)}, and model.pretrained is {_named(base)}, "
            f"which differs in {', '.join(different)}: continue with the same files, or start over "
            "in another output_dir"
        )
    accelerator.load_state(str(checkpoint))


def _named(base: dict[str, Any] | None) -> str:
    return "null" if base is None else base["path"] + (f" (revision {base['revision']})" if base["revision"] else "")
