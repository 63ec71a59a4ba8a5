"""What the training loops share: processes, seeds, data order, metrics.

A run that is stopped and continued computes the same losses bit for bit on a CPU. That takes all of: a data order that
is a function of (seed, epoch), skipped batches instead of re-drawn ones, augmentation seeded by (seed, epoch, index)
(`training/data/`), random numbers reseeded by (seed, micro-step, rank) at every micro-step (`system/streams.py`), and
the step and the moving average in the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import yaml
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import IterableDataset

from training.config.base import TrainConfig
from training.config.io import config_hash, dump_config, flatten, from_fields, load_config, to_fields
from training.system.disk import lock_folder
from training.system.processes import command_of, is_accelerate_launch, stoppable
from training.system.streams import seed_for

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
RESULT = "result.json"
START = "start.json"
Config = TypeVar("Config", bound=TrainConfig)


def run_command(config_class: type[Config], train: Callable[[Config], object], argv: Sequence[str] | None) -> None:
    """What the training scripts do: the config from the command line, a run that says how it goes on when stopped."""
    config = load_config(config_class, argv)
    with stoppable(lambda: how_to_go_on(config)):
        train(config)
    PartialState().destroy_process_group()


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of a run. Every misunderstanding with the launcher is an error, none is a slower run."""
    if config.log_with is not None and config.log_with not in [str(name) for name in get_available_trackers()]:
        raise ValueError(
            f"log_with must be an installed accelerate tracker "
            f"({', '.join(str(name) for name in get_available_trackers()) or 'none is installed'}) or null, "
            f"got {config.log_with!r}"
        )
    accelerator = Accelerator(
        cpu=config.cpu,
        mixed_precision=config.mixed_precision,
        log_with=config.log_with,
        project_dir=config.output_dir,
        # split_batches: the loader's batch is the global one, whatever the number of processes
        dataloader_config=DataLoaderConfiguration(
            split_batches=True,
            use_seedable_sampler=True,
            data_seed=seed_for("data-order", seed=config.seed),
            non_blocking=True,
        ),
        # an update always takes the same number of micro-batches, also across the end of an epoch
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.grad_accumulation, sync_with_dataloader=False
        ),
    )
    check_process_count(accelerator.num_processes, config.num_processes)
    return accelerator


def check_process_count(running: int, expected: int | None) -> None:
    """Compare the processes that run together with what was asked for.

    `accelerate launch --cpu --num_processes 2` silently starts one process, and `--multi_gpu` without
    `ACCELERATE_USE_CPU=true` on a machine without a GPU starts unrelated copies.

    Raises:
        RuntimeError: the numbers differ.
    """
    asked = {
        "num_processes in the config": expected,
        "WORLD_SIZE in the environment": int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None,
        "--num_processes of accelerate launch": _launcher_processes(),
    }
    for source, number in asked.items():
        if number is not None and number != running:
            raise RuntimeError(
                f"{source} says {number} processes, but {running} train together. On a CPU start them with "
                f"ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_machines 1 --num_processes {number} "
                "--mixed_precision no --dynamo_backend no ... and --cpu true, or with torchrun"
            )


def _launcher_processes() -> int | None:
    """`--num_processes` on the command line of an accelerate launcher that is our parent (Linux; else None).

    With `--cpu` the launcher leaves no trace of the number in the environment, so its command line is the only place
    where the user's wish can be seen.
    """
    words = command_of(os.getppid())
    if not is_accelerate_launch(words):
        return None
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--num_processes", "--num-processes"):
            value = value if equals else words[position + 1]
            return int(value) if value.isdigit() else None
    return None


def open_run(accelerator: Accelerator, config: TrainConfig) -> Path:
    """Make the run's folder, or clear it (`resume: none`), and write the config into it.

    Raises:
        ValueError: the folder holds a run of another config, which `resume: auto` would continue.
        RuntimeError: another process trains into the folder.
    """
    run_dir = Path(config.output_dir)
    if accelerator.is_main_process:
        lock_folder(run_dir)
        if config.resume == "none":
            clear_run(run_dir)
        elif config.resume == "auto" and (run_dir / CONFIG).exists() and (run_dir / METRICS).exists():
            _check_same_config(run_dir, config)  # a run that never trained a step, say for a mistake, has no claim
        dump_config(config, run_dir / CONFIG)
    accelerator.wait_for_everyone()
    if config.log_with is not None:
        accelerator.init_trackers("attnres-vision", config={k: str(v) for k, v in flatten(to_fields(config)).items()})
    return run_dir


def how_to_go_on(config: TrainConfig) -> str:
    """What a run that is stopped says, on its main process: where it is and how it goes on."""
    if int(os.environ.get("RANK", 0)) != 0:
        return ""
    run_dir = Path(config.output_dir)
    kept = sorted((run_dir / "checkpoints").glob("step_*"))
    point = f"its last checkpoint, {kept[-1].name}" if kept else "the start: it has no checkpoint (checkpoint_interval)"
    if config.resume == "none":
        return f"the run is in {run_dir}. With resume: auto the same command goes on from {point}"
    return f"the run is in {run_dir}. The same command goes on from {point}"


def clear_run(run_dir: Path) -> None:
    """Remove what an earlier run wrote into the folder, and nothing else."""
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    for name in (CONFIG, METRICS, RESULT, START):
        (run_dir / name).unlink(missing_ok=True)


def _check_same_config(run_dir: Path, config: TrainConfig) -> None:
    try:
        old = from_fields(type(config), yaml.safe_load((run_dir / CONFIG).read_text()))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{run_dir / CONFIG} is no config of this version; choose another output_dir") from error
    if config_hash(old) != config_hash(config):
        before, now = flatten(to_fields(old)), flatten(to_fields(config))
        changed = ", ".join(key for key in sorted({*before, *now}) if before.get(key) != now.get(key))
        raise ValueError(
            f"{run_dir} holds a run of another config (different: {changed}); choose another output_dir, "
            "or resume: none to start over"
        )


def endless_batches(accelerator: Accelerator, loader: Any, start: int) -> Iterator[Any]:
    """The micro-batches of all epochs, from micro-batch `start` on; the order is a function of the epoch alone."""
    epoch, skip = divmod(start, len(loader))
    while True:
        # both: accelerate tells the sampler the epoch, but not the data set behind nested samplers
        loader.dataset.set_epoch(epoch)
        loader.set_epoch(epoch)
        indexed = not isinstance(loader.dataset, IterableDataset)  # a stream starts its epoch again
        yield from accelerator.skip_first_batches(loader, skip) if skip and indexed else loader
        epoch, skip = epoch + 1, 0


@dataclasses.dataclass
class Progress:
    """Where a run is; part of every checkpoint."""

    step: int = 0
    seconds: float = 0.0  # in training steps, without evaluation, checkpoints and start-up
    timed_steps: int = 0  # steps and seconds after the first few of every start, for the throughput
    timed_seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class StepClock:
    """Measures training steps; the first ones of every start (allocations, autotuning, compilation) are not rated."""

    def __init__(self, progress: Progress, warmup: int = 5) -> None:
        self.progress, self.warmup = progress, warmup
        self.steps = 0

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self) -> None:
        seconds = time.perf_counter() - self.started
        self.steps += 1
        self.progress.seconds += seconds
        if self.steps > self.warmup:
            self.progress.timed_steps += 1
            self.progress.timed_seconds += seconds


class Metrics:
    """`metrics.jsonl`: one JSON object a line, `kind` "train" (every step) or "eval"; what reports are made from.

    Training numbers stay on the device until `flush`, so that a step does not wait for the one before it.
    """

    def __init__(self, accelerator: Accelerator, run_dir: Path, names: tuple[str, ...]) -> None:
        self.accelerator, self.path, self.names = accelerator, run_dir / METRICS, names
        self.pending: list[tuple[dict[str, Any], torch.Tensor]] = []

    def truncate(self, step: int) -> None:
        """Forget what was written after `step` by the run that this one continues, half-written lines too."""
        if not self.accelerator.is_main_process or not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines(keepends=True) if _step_of(line) <= step]
        partial = self.path.with_suffix(".tmp")
        partial.write_text("".join(kept))
        os.replace(partial, self.path)

    def train(self, fields: dict[str, Any], values: torch.Tensor) -> None:
        """Note one step; `values` are this process's numbers for `names`."""
        self.pending.append((fields, values))

    def flush(self) -> dict[str, float]:
        """Write the noted steps, averaged over the processes; the newest one is returned.

        Raises:
            FloatingPointError: a loss is not finite.
        """
        if not self.pending:
            return {}
        values = self.accelerator.reduce(torch.stack([values for _, values in self.pending]).double(), "mean").tolist()
        records = [
            {"kind": "train", **fields, **dict(zip(self.names, row, strict=True))}
            for (fields, _), row in zip(self.pending, values, strict=True)
        ]
        self.pending = []
        self._write(records)
        for record in records:
            if not np.isfinite(record["loss"]):
                raise FloatingPointError(f"the training loss is {record['loss']} at step {record['step']}")
        self._track({name: records[-1][name] for name in (*self.names, "lr")}, records[-1]["step"])
        return records[-1]

    def evaluation(self, fields: dict[str, Any]) -> None:
        self._write([{"kind": "eval", **fields}])
        numbers = {key: value for key, value in fields.items() if isinstance(value, float)}
        self._track(numbers, fields["step"])

    def _track(self, numbers: dict[str, float], step: int) -> None:
        if self.accelerator.trackers:
            self.accelerator.log(numbers, step=step)

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    with (run_dir / METRICS).open() as file:
        return [json.loads(line) for line in file]


def _step_of(line: str) -> float:
    """The step of a line of `metrics.jsonl`; infinite if the line is none, as the end of a process may leave it."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else float("inf")
    except (ValueError, TypeError, KeyError):
        return float("inf")
