"""Train a timm classifier with standard residuals or Attention Residuals.

    accelerate launch training/image.py --config configs/image/imagenet_vit_s16.yaml --variant block --data.root DIR
    python -m training.image --config FILE --optim.lr 1e-3

One loop, from top to bottom. Writes `config.yaml`, `metrics.jsonl`, `checkpoints/`, `weights.safetensors` and, when
everything is done, `result.json` into `output_dir`. An interrupted run continues where it was when the same command is
given again (`resume: auto`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file: modules are found from the repository, not from here
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from timm.loss import BinaryCrossEntropy
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn
from tqdm import tqdm

import attnres_vision
from training import checkpoint, data, loop, measure
from training.config import ImageConfig, OptimConfig, ScheduleConfig
from training.config_io import config_hash, load_config, to_fields
from training.diagnostics import depth_profile, depth_weights

PROFILE_IMAGES = 64


def train(config: ImageConfig) -> dict[str, Any]:
    """Train and evaluate one model; returns what `result.json` says."""
    ####################################################################################################################
    # Processes, folder, seeds
    ####################################################################################################################
    accelerator = loop.make_accelerator(config)
    run_dir = loop.open_run(accelerator, config)
    rank, parts = accelerator.process_index, config.grad_accumulation
    loop.reseed(config.seed)

    ####################################################################################################################
    # Data
    ####################################################################################################################
    train_loader, val_loader = data.make_loaders(accelerator, config.data, config.seed, parts)
    mixup = data.make_mixup(config.data)
    probe = tuple(part[:PROFILE_IMAGES] for part in next(iter(val_loader)))
    steps = config.schedule.total_steps(len(train_loader) / parts)

    ####################################################################################################################
    # Model, optimiser, schedule
    ####################################################################################################################
    memory_before = measure.peak_memory(accelerator.device)
    bare_model = build_model(config).to(accelerator.device)
    # Before `prepare`, which ties the forward of a bf16 model to this very object: a later copy would run its weights.
    ema = ModelEmaV3(bare_model, decay=config.ema_decay, use_warmup=True) if config.ema_decay is not None else None
    criterion = make_criterion(config)
    optimizer = make_optimizer(bare_model, config.optim)
    scheduler = make_scheduler(optimizer, config.schedule, config.optim, steps)
    model: Any = torch.compile(bare_model) if config.model.compile else bare_model
    model, optimizer = accelerator.prepare(model, optimizer)
    evaluated = ema.module if ema is not None else bare_model

    ####################################################################################################################
    # Resume
    ####################################################################################################################
    progress = loop.Progress()
    metrics = loop.Metrics(accelerator, run_dir, ("loss", "grad_norm"))
    accelerator.register_for_checkpointing(progress, *([ema] if ema is not None else []))
    restored = checkpoint.find(run_dir, config.resume)
    if restored is not None:
        checkpoint.load(accelerator, restored)
        accelerator.print(f"continuing from {restored}")
    metrics.truncate(progress.step)
    if config.profile and progress.step == 0:
        start = depth_profile(bare_model, lambda: probe_loss(accelerator, bare_model, probe))
        if accelerator.is_main_process:
            loop.write_json(run_dir / "profile_start.json", start)

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
            images, targets = next(batches)
            # After the batch is there: drop path, dropout and mixup are functions of (seed, micro-step, rank).
            loop.reseed(config.seed, progress.step * parts + part, rank)
            if mixup is not None:
                images, targets = mixup(images, targets)
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    logits = model(images)
                loss = criterion(logits.float(), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), config.optim.clip_grad or float("inf"))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        if ema is not None:
            ema.update(bare_model, step=progress.step)
        progress.step += 1
        clock.stop()

        step, last = progress.step, progress.step == steps
        metrics.train(
            {
                "step": step,
                "samples": step * config.data.batch_size,
                "seconds": round(progress.seconds, 4),
                "lr": scheduler_lr(optimizer),
            },
            torch.stack([torch.stack(losses).mean(), norm.to(losses[0])]),
        )
        bar.update()
        if last or step % config.log_interval == 0:
            bar.set_postfix(loss=f"{metrics.flush()['loss']:.3f}", refresh=False)
        if last or due(step, config.eval_interval):
            metrics.flush()
            scores = evaluate(accelerator, evaluated, val_loader)
            metrics.evaluation(
                {
                    "step": step,
                    "samples": step * config.data.batch_size,
                    "seconds": round(progress.seconds, 4),
                    **scores,
                }
            )
            accelerator.print(f"step {step}/{steps}: val loss {scores['loss']:.4f}, top-1 {100 * scores['top1']:.2f} %")
        if last or due(step, config.checkpoint_interval):
            metrics.flush()
            checkpoint.save(accelerator, run_dir, step, config.keep_checkpoints)
    bar.close()

    ####################################################################################################################
    # Result
    ####################################################################################################################
    ending = depth_profile(bare_model, lambda: probe_loss(accelerator, bare_model, probe)) if config.profile else []
    weights = depth_weights(evaluated, lambda: probe_loss(accelerator, evaluated, probe)) if config.profile else []
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
            "samples": steps * config.data.batch_size,
            "seconds": progress.seconds,
            "train_loss": sum(tail) / len(tail),  # over the last 5 % of the steps
            "val_loss": final["loss"],
            "top1": final["top1"],
            "parameters": measure.count_parameters(bare_model),
            "gflops": measure.forward_gflops(lambda: build_model(config), (1, *probe[0].shape[1:])),
            "images_per_second": rate,
            "peak_memory": measure.peak_memory(accelerator.device),
            "peak_memory_before": memory_before,
            "processes": accelerator.num_processes,
            "environment": measure.environment(accelerator.device),
            "profile": {"start": loop.read_json(run_dir / "profile_start.json"), "end": ending},
            "depth_weights": weights,
            "config": to_fields(config),
        }
        safetensors.torch.save_model(evaluated, str(run_dir / "weights.safetensors"))
        loop.write_json(run_dir / loop.RESULT, result)
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.wait_for_everyone()  # and not end_training: it would end the processes' group for the next run, too
    return result


def build_model(config: ImageConfig) -> nn.Module:
    """The timm model of the config, with Attention Residuals attached if it says so.

    AttnRes variants draw no random number before the standard model is made: all variants start from the same weights.
    """
    chosen = config.model
    model: Any = timm.create_model(chosen.name, num_classes=config.data.num_classes, **chosen.kwargs)
    if chosen.residual == "attnres":
        model = attnres_vision.attach(model, chosen.attnres)
    if chosen.freeze_queries:
        for name, parameter in model.named_parameters():
            if ".depth." in name:
                parameter.requires_grad_(False)
    if chosen.grad_checkpointing:
        model.set_grad_checkpointing(True)
    return model


def make_optimizer(model: Any, config: OptimConfig) -> torch.optim.Optimizer:
    """timm's optimiser over timm's groups, depth parameters in groups of their own."""
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    if config.layer_decay is not None:
        groups = param_groups_layer_decay(model, config.weight_decay, exempt, layer_decay=config.layer_decay)
    else:
        groups = param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=exempt)
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


def make_criterion(config: ImageConfig) -> nn.Module:
    """Loss of the training step. With mixup the targets are already soft, and smoothed."""
    smoothing = 0.0 if config.data.mixes else config.data.label_smoothing
    if config.loss == "bce":
        return BinaryCrossEntropy(smoothing=smoothing)
    return nn.CrossEntropyLoss(label_smoothing=smoothing)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> dict[str, float]:
    """Mean cross entropy and top-1 accuracy over the whole validation set, every image once."""
    was_training = model.training
    model.eval()
    total = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    stream = isinstance(loader, data.StreamLoader)
    for images, targets in loader:
        with accelerator.autocast():
            logits = model(images)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        scores = torch.stack([losses, (logits.argmax(-1) == targets).float(), torch.ones_like(losses)], dim=1)
        # drops the images that were handed out twice to fill the last batch; the shares of a stream are disjoint
        scores = scores if stream else accelerator.gather_for_metrics(scores)
        total += scores.double().sum(0)
    if stream:
        total = accelerator.reduce(total, "sum")
    model.train(was_training)
    loss, correct, count = total.tolist()
    return {"loss": loss / count, "top1": correct / count}


def probe_loss(accelerator: Accelerator, model: nn.Module, probe: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The loss on a fixed batch, for the profiles."""
    with accelerator.autocast():
        logits = model(probe[0])
    return F.cross_entropy(logits.float(), probe[1])


def scheduler_lr(optimizer: Any) -> float:
    """The learning rate of the parameters that no `lr_scale` applies to (or the largest one)."""
    return max(group["lr"] / group.get("lr_scale", 1.0) for group in optimizer.param_groups)


def speed_step(config: ImageConfig) -> Callable[[], object]:
    """One training step (forward, backward, update) on random images of one process's micro-batch, for rating speed."""
    device = torch.device("cuda" if torch.cuda.is_available() and not config.cpu else "cpu")
    model: Any = build_model(config).to(device).train()
    optimizer = make_optimizer(model, config.optim)
    channels = config.model.kwargs.get("in_chans", 3)
    batch = speed_batch(config)
    images = torch.randn(batch, channels, config.data.input_size, config.data.input_size, device=device)
    targets = torch.randint(config.data.num_classes, (batch,), device=device)
    model = torch.compile(model) if config.model.compile else model

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.mixed_precision == "bf16"):
            logits = model(images)
        F.cross_entropy(logits.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed_batch(config: ImageConfig) -> int:
    """Images that one process sees at once."""
    return max(1, config.data.batch_size // (config.grad_accumulation * int(os.environ.get("WORLD_SIZE", 1))))


def due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def main(argv: list[str] | None = None) -> None:
    train(load_config(ImageConfig, argv))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
