"""The training loop, from top to bottom, for whatever a `Task` trains.

Writes `config.yaml`, `metrics.jsonl`, `checkpoints/`, what the task saves and, when everything is done, `result.json`
into `output_dir`. An interrupted run continues where it was when the same command is given again (`resume: auto`).
"""

from __future__ import annotations

from typing import Any

import torch
from tqdm import tqdm

from training.config.io import config_hash, to_fields
from training.loop import checkpoint, measure, run
from training.loop.average import NoAverage
from training.loop.optim import make_optimizer, make_scheduler, scheduler_lr
from training.loop.task import Task
from training.system import streams
from training.system.disk import read_json, write_json


def train(task: Task) -> dict[str, Any]:
    """Train and evaluate one model; returns what `result.json` says."""
    ####################################################################################################################
    # Processes, folder, seeds
    ####################################################################################################################
    config = task.config
    accelerator = run.make_accelerator(config)
    run_dir = run.open_run(accelerator, config)
    rank, parts = accelerator.process_index, config.grad_accumulation
    need = memory_need(task)
    accelerator.print(f"memory: {measure.describe_memory(need)}")
    measure.check_memory(need, accelerator.device)
    streams.reseed("setup", seed=config.seed)

    ####################################################################################################################
    # Data
    ####################################################################################################################
    train_loader = task.make_loader(accelerator)
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
    progress = run.Progress()
    metrics = run.Metrics(accelerator, run_dir, ("loss", "grad_norm"))
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
            write_json(run_dir / run.START, start)

    ####################################################################################################################
    # Train
    ####################################################################################################################
    model.train()
    clock = run.StepClock(progress)
    batches = run.endless_batches(accelerator, train_loader, progress.step * parts)
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
        records = run.read_metrics(run_dir)
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
            **task.result(read_json(run_dir / run.START) or {}, final, tested, ending),
        }
        write_json(run_dir / run.RESULT, result)
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


def due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
