"""Train a table of variants x learning rates x seeds, and report what changed.

    python -m training.compare --config configs/image/digits.yaml [--smoke] [--output_dir DIR]
    accelerate launch --num_processes 8 -m training.compare --config configs/image/imagenet_vit_s16.yaml
    python -m training.compare --config configs/video/clips.yaml

The YAML has `task`, "image" or "video", `base`, a config of `training.image` or `training.video`, and `variants`, what
each variant changes in it. Runs that are complete are not repeated, interrupted ones continue, a changed config gets a
folder of its own. On a CPU `jobs` runs go side by side, as processes of one thread each (more threads than cores would
cost a factor); on a GPU one after the other; under `accelerate launch` with several processes one after the other, each
with all processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before the slow imports
    from training.system.processes import end_with_parent

    end_with_parent()

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState

from training.config.compare import CompareConfig, config_class
from training.config.io import config_hash, dump_config, from_fields, merge, parse, read_yaml, take_options, to_fields
from training.loop import measure
from training.loop.run import RESULT
from training.report.results import Result
from training.report.write import write
from training.system import processes
from training.system.disk import lock_folder, read_json, write_json

_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def task_module(task: str) -> Any:
    """What trains: `training.tasks.image` or `training.tasks.video`; that one's diffusers is slow to import."""
    return importlib.import_module(f"training.tasks.{task}")


@dataclasses.dataclass
class Run:
    """One row of the table's plan."""

    variant: str
    seed: int
    config: Any
    task: str

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def label(self) -> str:
        return f"{self.variant}, lr {self.config.optim.lr:g}, seed {self.seed}"

    def result(self) -> dict[str, Any] | None:
        """The result of this very config; None if it is not complete."""
        result = read_json(self.folder / RESULT)
        return result if result is not None and result["config_hash"] == config_hash(self.config) else None


def plan(config: CompareConfig, output_dir: Path) -> list[Run]:
    """All runs, each config checked before the first one starts. Seeds outermost: a table fills up evenly."""
    runs = []
    for seed in config.seeds:
        for variant, changes in config.variants.items():
            for lr in [None] if config.learning_rates is None else config.learning_rates:
                fields = merge(to_fields(config.base), changes or {})
                fields = merge(fields, {"seed": seed, **({"optim": {"lr": lr}} if lr is not None else {})})
                try:
                    run_config = from_fields(type(config.base), fields)
                except ValueError as error:
                    raise ValueError(f"variant {variant!r}: {error}") from error
                # the hash in the name: a changed config never continues or overwrites another one's run
                name = f"lr_{run_config.optim.lr:g}_seed_{seed}_{config_hash(run_config)[:8]}"
                run_config.output_dir = str(output_dir / "runs" / variant / name)
                runs.append(Run(variant, seed, run_config, config.task))
    return runs


def run_as_processes(runs: list[Run], jobs: int) -> dict[str, str]:
    """Train every run in a process of its own; returns an error message for each that failed."""
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        stack.enter_context(processes.children_end_here())
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # first: nothing else begins, then all ends
        waiting = {pool.submit(_run_process, run): run for run in runs}
        for number, done in enumerate(as_completed(waiting), start=1):
            run, (seconds, error) = waiting[done], done.result()
            result = run.result()
            if error is None and result is not None:
                top1 = f", val top-1 {100 * result['val_top1']:.2f} %" if "val_top1" in result else ""
                text = f"val loss {result['val_loss']:.4f}{top1}, {seconds:.0f} s"
            else:
                failures[run.label] = error or "it ended without a result"
                text = f"FAILED, see {run.folder / 'log.txt'}: {failures[run.label]}"
            print(f"[{number}/{len(runs)}] {run.label}: {text}", flush=True)
    return failures


def _run_process(run: Run) -> tuple[float, str | None]:
    run.folder.mkdir(parents=True, exist_ok=True)
    asked = run.folder / "asked.yaml"
    dump_config(run.config, asked)
    # a process of its own, also under a launcher that started this one as the only process of a group
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    if run.config.device.type == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # the sums, and so the losses, do not depend on the number of cores
    started = time.perf_counter()
    with (run.folder / "log.txt").open("a") as log:
        code = processes.run(
            [
                sys.executable,
                "-m",
                f"training.{run.task}",
                "--config",
                str(asked.resolve()),
                "--output_dir",
                run.folder.resolve(),
            ],
            cwd=Path(__file__).resolve().parents[1],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    seconds = time.perf_counter() - started
    if code == 0:
        return seconds, None
    lines = (run.folder / "log.txt").read_text().strip().splitlines()
    return seconds, f"exit code {code}: {lines[-1] if lines else 'no output'}"


def run_in_this_process(runs: list[Run]) -> None:
    """Train every run here, with all processes of the launcher. A failure ends all: the others would wait for it."""
    for run in runs:
        task_module(run.task).train(run.config)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        gc.collect()  # a bf16 model holds itself through the forward that accelerate gave it: two would not fit
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def side_by_side_speed(config: CompareConfig, runs: list[Run], path: Path) -> dict[str, dict[str, float]]:
    """Seconds per training step of every variant, measured in turns in this process; kept in a file."""
    if config.speed_rounds == 0:
        return {}
    first: dict[str, Any] = {}
    for run in runs:
        first.setdefault(run.variant, run.config)
    text = str([config.speed_rounds, *(config_hash(run_config) for run_config in first.values())])
    key = hashlib.sha256(text.encode()).hexdigest()
    known = read_json(path)
    if known is not None and known["key"] == key:
        return known["speed"]
    task = task_module(config.task).TASK
    tasks = {name: task(run_config) for name, run_config in first.items()}
    speed = measure.training_speed({name: task.speed_step() for name, task in tasks.items()}, config.speed_rounds)
    for name, found in speed.items():
        found[f"{task.unit}_per_second"] = tasks[name].speed_batch / found["seconds_per_step"]
    write_json(path, {"key": key, "speed": speed})
    return speed


def load(argv: Sequence[str]) -> tuple[CompareConfig, Path]:
    """The table from the command line, and its folder."""
    args, picked = take_options(argv, ("--config",))
    smoke = "--smoke" in args
    args = [word for word in args if word != "--smoke"]
    fields = read_yaml(picked["--config"]) if "--config" in picked else {}
    if smoke:
        fields = merge(fields, fields.get("smoke") or {})
    try:
        cls = config_class(fields.get("task", "image"))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    config = parse(cls, fields, args)
    default = Path("runs") / (Path(picked["--config"]).stem if "--config" in picked else config.name)
    return config, Path(config.output_dir or f"{default}{'-smoke' if smoke else ''}")


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing and write the report; 1 if a run failed."""
    config, output_dir = load(sys.argv[1:] if argv is None else argv)
    try:
        runs = plan(config, output_dir)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    main_process = int(os.environ.get("RANK", 0)) == 0

    def where() -> str:
        complete = sum(run.result() is not None for run in runs)
        return (
            f"{complete} of {len(runs)} runs are complete, in {output_dir}. The same command goes on from there; a run "
            "that was interrupted goes on from its last checkpoint"
        )

    with processes.stoppable(where if main_process else str):
        return compare(config, runs, output_dir)


def compare(config: CompareConfig, runs: list[Run], output_dir: Path) -> int:
    """Train what is missing of the runs and write the report; 1 if a run failed."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    main_process = int(os.environ.get("RANK", 0)) == 0
    missing = [run for run in runs if run.result() is None]
    if main_process:
        try:
            lock_folder(output_dir)
        except RuntimeError as error:
            raise SystemExit(f"error: {error}") from error
        print(f"{config.name}: {len(runs)} runs, {len(runs) - len(missing)} complete, in {output_dir}", flush=True)
        dump_config(config, output_dir / "compare.yaml")
    failures: dict[str, str] = {}
    if several:
        run_in_this_process(missing)
    else:
        failures = run_as_processes(missing, config.jobs if config.base.device.type == "cpu" else 1)
    if main_process:
        results = [
            Result(run.variant, run.seed, run.config.optim.lr, run.folder, result)
            for run in runs
            if (result := run.result()) is not None
        ]
        if results:
            if config.base.device.type == "cpu":
                torch.set_num_threads(1)
            speed = side_by_side_speed(config, runs, output_dir / "speed.json")
            print("\n" + write(output_dir, config.name, config.baseline, results, failures, speed))
            print(f"\nReport: {output_dir / 'report.html'}, {output_dir / 'report.md'}, {output_dir / 'summary.json'}")
    if several:
        PartialState().destroy_process_group()
    for label, message in failures.items():
        print(f"FAILED: {label}: {message}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
