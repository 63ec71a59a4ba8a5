"""The training loop, from top to bottom, for whatever a `Task` trains.

Writes `config.yaml`, `metrics.jsonl`, `checkpoints/`, what the task saves and, when everything is done, `result.json`
into `output_dir`. An interrupted run continues where it was when the same command is given again (`resume: auto`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from accelerate import Accelerator
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch import nn
from tqdm import tqdm

import attnres_vision
from training import checkpoint, loop, measure, streams
from training.average import NoAverage
from training.config import OptimConfig, ScheduleConfig
from training.config_io import config_hash, to_fields


class Task(Protocol):
    """What is trained: data, model, loss and evaluation. One object serves one run.

    Attributes:
        config: the run's config, a `TrainConfig` with `model`, `data`, `optim` and `schedule`.
        unit: what a sample is called in the result, as in `images_per_second`.
        average: the kind of moving average that `ema_decay` asks for.
    """

    config: Any
    unit: str
    average: type[NoAverage]

    @property
    def base(self) -> str | None:
        """The folder of the stock checkpoint that frozen parameters come from; None if they come from none."""

    def build_model(self) -> nn.Module:
        """The model on the current default device; on `meta` for counting memory and FLOPs before and after."""

    def make_loader(self, accelerator: Accelerator, parts: int) -> Any:
        """The prepared loader of training micro-batches, `parts` to an update; validation data stay with the task."""

    def start(self, model: nn.Module) -> dict[str, Any]:
        """Numbers about the untrained model, as JSON values; `result` gets them back."""

    def loss(self, model: nn.Module, batch: Any, micro_step: int) -> torch.Tensor:
        """The loss of one micro-batch, a scalar. Global random numbers are seeded by (seed, micro-step, rank)."""

    def evaluate(self, model: nn.Module, average: NoAverage, split: Literal["val", "test"]) -> dict[str, float]:
        """Scores on a split, `loss` among them; all processes call it and get the same."""

    def describe(self, scores: dict[str, float], split: Literal["val", "test"]) -> str:
        """The scores, on a line that names the split."""

    def finish(self, model: nn.Module, average: NoAverage, run_dir: Path) -> dict[str, Any]:
        """What only the trained model can say; all processes call it. The main one saves the weights."""

    def result(
        self, start: dict[str, Any], val: dict[str, Any], test: dict[str, Any], ending: dict[str, Any]
    ) -> dict[str, Any]:
        """The task's own fields of `result.json`, `val_loss` and `test_loss` among them, on the main process.

        What depends on a split says so in its name. Reports choose by `val_*` and show `test_*`.
        """


def train(task: Task) -> dict[str, Any]:
    """Train and evaluate one model; returns what `result.json` says."""
    ####################################################################################################################
    # Processes, folder, seeds
    ####################################################################################################################
    config = task.config
    accelerator = loop.make_accelerator(config)
    run_dir = loop.open_run(accelerator, config)
    rank, parts = accelerator.process_index, config.grad_accumulation
    need = memory_need(task)
    accelerator.print(f"memory: {measure.describe_memory(need)}")
    measure.check_memory(need, accelerator.device)
    streams.reseed("setup", seed=config.seed)

    ####################################################################################################################
    # Data
    ####################################################################################################################
    train_loader = task.make_loader(accelerator, parts)
    steps = config.schedule.total_steps(len(train_loader) / parts)

    ####################################################################################################################
    # Model, optimiser, schedule
    ####################################################################################################################
    memory_before = measure.peak_memory(accelerator.device)
    streams.reseed("init", seed=config.seed)  # whatever was drawn for the data
    bare_model = task.build_model().to(accelerator.device)
    average = (NoAverage if config.ema_decay is None else task.average)(bare_model, config.ema_decay)
    optimizer = make_optimizer(bare_model, config.optim)
    scheduler = make_scheduler(optimizer, config.schedule, config.optim, steps)
    model: Any = torch.compile(bare_model) if config.model.compile else bare_model
    model, optimizer = accelerator.prepare(model, optimizer)

    ####################################################################################################################
    # Resume
    ####################################################################################################################
    progress = loop.Progress()
    metrics = loop.Metrics(accelerator, run_dir, ("loss", "grad_norm"))
    accelerator.register_for_checkpointing(progress, *([average] if average else []))
    base = None
    if task.base is not None and checkpoint.of_base(bare_model):
        base = checkpoint.base_of(accelerator, task.base)
        checkpoint.leave_out_base(accelerator, bare_model)
    restored = checkpoint.find(run_dir, config.resume)
    if restored is not None:
        checkpoint.load(accelerator, restored, base)
        accelerator.print(f"continuing from {restored}")
    metrics.truncate(progress.step)
    if progress.step == 0:
        start = task.start(bare_model)
        if accelerator.is_main_process:
            loop.write_json(run_dir / loop.START, start)

    ####################################################################################################################
    # Train
    ####################################################################################################################
    model.train()
    clock = loop.StepClock(progress)
    batches = loop.endless_batches(accelerator, train_loader, progress.step * parts)
    bar = tqdm(total=steps, initial=progress.step, unit="step", disable=None if accelerator.is_main_process else True)
    while progress.step < steps:
        clock.start()
        scheduler.step_update(progress.step)
        losses = []
        for part in range(parts):
            batch, micro_step = next(batches), progress.step * parts + part
            # After the batch is there: drop path, dropout and mixup are functions of (seed, micro-step, rank).
            streams.reseed("step", seed=config.seed, micro_step=micro_step, rank=rank)
            with accelerator.accumulate(model):
                loss = task.loss(model, batch, micro_step)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), config.optim.clip_grad or float("inf"))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        average.update(bare_model, progress.step)
        progress.step += 1
        clock.stop()

        step, last = progress.step, progress.step == steps
        where = {"step": step, "samples": step * config.data.batch_size, "seconds": round(progress.seconds, 4)}
        metrics.train(
            {**where, "lr": scheduler_lr(optimizer)}, torch.stack([torch.stack(losses).mean(), norm.to(losses[0])])
        )
        bar.update()
        if last or step % config.log_interval == 0:
            bar.set_postfix(loss=f"{metrics.flush()['loss']:.3f}", refresh=False)
        if last or due(step, config.eval_interval):
            metrics.flush()
            scores = task.evaluate(bare_model, average, "val")
            metrics.evaluation({**where, **scores})
            accelerator.print(f"step {step}/{steps}: {task.describe(scores, 'val')}")
        if last or due(step, config.checkpoint_interval):
            metrics.flush()
            checkpoint.save(accelerator, run_dir, step, config.keep_checkpoints, base)
    bar.close()

    ####################################################################################################################
    # Result
    ####################################################################################################################
    tested = task.evaluate(bare_model, average, "test")  # once: no decision about a run can rest on it
    accelerator.print(f"trained: {task.describe(tested, 'test')}")
    ending = task.finish(bare_model, average, run_dir)
    result: dict[str, Any] = {}
    if accelerator.is_main_process:
        records = loop.read_metrics(run_dir)
        losses_seen = [record["loss"] for record in records if record["kind"] == "train"]
        tail = losses_seen[-max(1, len(losses_seen) // 20) :]
        final = [record for record in records if record["kind"] == "eval"][-1]
        rate = progress.timed_steps * config.data.batch_size / progress.timed_seconds if progress.timed_steps else None
        result = {
            "config_hash": config_hash(config),
            "steps": steps,
            "samples_seen": steps * config.data.batch_size,
            "seconds": progress.seconds,
            "train_loss": sum(tail) / len(tail),  # over the last 5 % of the steps
            "parameters": measure.count_parameters(bare_model),
            "memory_need": need,
            f"{task.unit}_per_second": rate,
            "peak_memory": measure.peak_memory(accelerator.device),
            "peak_memory_before": memory_before,
            "processes": accelerator.num_processes,
            "environment": measure.environment(accelerator.device),
            "config": to_fields(config),
            **task.result(loop.read_json(run_dir / loop.START) or {}, final, tested, ending),
        }
        loop.write_json(run_dir / loop.RESULT, result)
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.wait_for_everyone()  # and not end_training: it would end the processes' group for the next run, too
    return result


def memory_need(task: Task) -> dict[str, int]:
    """What training holds in memory, in bytes, counted on the meta device: see `measure.training_memory`."""
    with torch.device("meta"):
        model = task.build_model()
    averaged = task.average.averaged(model) if task.config.ema_decay is not None else []
    return measure.training_memory(model, make_optimizer(model, task.config.optim), averaged)


def make_optimizer(model: Any, config: OptimConfig) -> torch.optim.Optimizer:
    """timm's optimiser over timm's groups, depth parameters in groups of their own."""
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    if config.layer_decay is not None:
        groups = param_groups_layer_decay(model, config.weight_decay, exempt, layer_decay=config.layer_decay)
    else:
        groups = param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=exempt)
    groups = [group for group in groups if group["params"]]
    if attnres_vision.readers(model):
        groups = attnres_vision.depth_param_groups(model, groups, query_lr_scale=config.query_lr_scale)
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps}
    options = {name: value for name, value in options.items() if value is not None}
    return create_optimizer_v2(groups, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, **options)


def make_scheduler(optimizer: torch.optim.Optimizer, config: ScheduleConfig, optim: OptimConfig, steps: int) -> Any:
    """timm's schedule, per update. It is what multiplies a group's learning rate by its `lr_scale`."""
    warmup = config.warmup_steps(steps)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.kind,
        num_epochs=steps,
        warmup_epochs=warmup,
        warmup_lr=optim.lr / max(1, warmup),  # the first update is not lost to a learning rate of zero
        min_lr=config.min_lr,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return scheduler


def scheduler_lr(optimizer: Any) -> float:
    """The learning rate of the parameters that no `lr_scale` applies to (or the largest one)."""
    return max(group["lr"] / group.get("lr_scale", 1.0) for group in optimizer.param_groups)


def due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
