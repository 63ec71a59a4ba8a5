"""Train a video diffusion transformer of diffusers with standard residuals or Attention Residuals.

    accelerate launch training/video.py --config configs/video/hunyuan_finetune.yaml --variant block --data.root DIR
    python -m training.video --config configs/video/clips.yaml --variant standard --optim.lr 1e-3

The loop is `training/trainer.py`; here is what it trains: clips, model, objective and evaluation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    if not __package__:  # run as a file: modules are found from the repository, not from here
        sys.path[0] = str(Path(__file__).resolve().parents[1])
    from training.processes import end_with_parent

    end_with_parent()  # before the slow imports

import safetensors.torch
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

import attnres_vision
from training import encoders, generate, loop, measure, processes, trainer, video_data, video_models
from training.average import NoAverage, TrainedParameters
from training.config_io import load_config
from training.diagnostics import depth_profile, depth_weights, depth_weights_by_timestep
from training.objective import make_objective, squared_error
from training.streams import generator_for
from training.video_config import VideoConfig

PROBE_CLIPS = 16


def train(config: VideoConfig) -> dict[str, Any]:
    """Train and evaluate one model; returns what `result.json` says."""
    return trainer.train(VideoTask(config))


class VideoTask:
    """Video diffusion, a `trainer.Task`."""

    unit = "clips"
    average: type[NoAverage] = TrainedParameters

    @property
    def base(self) -> str | None:
        return self.config.model.pretrained

    def __init__(self, config: VideoConfig) -> None:
        self.config = config
        self.objective = make_objective(config.objective)
        count = config.evaluation.sigmas
        self.levels = self.objective.levels((torch.arange(count) + 0.5) / count)

    def build_model(self) -> nn.Module:
        return video_models.build_model(self.config.model)

    def make_loader(self, accelerator: Accelerator, parts: int) -> Any:
        config = self.config
        self.accelerator = accelerator
        loaders = video_data.make_loaders(accelerator, config.data, config.text, config.seed, parts)
        self.held_out = {"val": loaders.val, "test": loaders.test}
        self.test_set: Any = loaders.test.dataset
        self.empty_text = {name: value.to(accelerator.device) for name, value in self.test_set.empty_text.items()}
        if config.sampling.vae is not None:  # what is needed after the last step is looked at before the first one
            encoders.vae_folder(config.sampling.vae)
        if config.sampling.frechet:
            from training.frechet import FrechetDistance  # torchmetrics

            FrechetDistance(config.sampling.extractor)
            if len(self.test_set) < 2:
                raise ValueError("sampling.frechet must be 0 for a test set of one clip: it compares with these")
        for caption in config.sampling.captions or ():
            if caption not in self.test_set.caption_texts:
                raise ValueError(f"sampling.captions must be captions of the test set, got {caption!r}")
        self.probe = next(iter(loaders.val))
        self.probe = {name: value[:PROBE_CLIPS] for name, value in self.probe.items()}
        return loaders.train

    def start(self, model: nn.Module) -> dict[str, Any]:
        plain = NoAverage(model, None)
        untrained = {"val": self.evaluate(model, plain, "val"), "test": self.evaluate(model, plain, "test")}
        self.accelerator.print(f"untrained: {self.describe(untrained['val'], 'val')}")
        return {"scores": untrained, "profile": self.profile(model)}

    def loss(self, model: nn.Module, batch: Any, micro_step: int) -> Tensor:
        clean = batch["clip"]
        noise, level, dropped = self.draw(clean, micro_step)
        text = {}
        for name, empty in self.empty_text.items():
            where = dropped.view(-1, *[1] * empty.ndim)
            text[name] = torch.where(where, empty, batch[name])
        prediction = self.predict(model, self.objective.add_noise(clean, noise, level), level, text)
        error = squared_error(prediction, self.objective.target(clean, noise, level))
        return (self.objective.weight(level) * error).mean()

    def draw(self, clean: Tensor, micro_step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Noise, level and whether the caption is dropped, of every clip of this process's share of a micro-batch.

        Functions of (seed, micro-step, position in the whole micro-batch): the same whatever the number of processes.
        """
        noise, level, dropped = torch.empty_like(clean), [], []
        first = self.accelerator.process_index * len(clean)  # shares are contiguous, and equally large
        for row in range(len(clean)):
            place = {"seed": self.config.seed, "micro_step": micro_step, "row": first + row}
            generator = generator_for("train-noise", clean.device, **place)
            noise[row].normal_(generator=generator)
            level.append(self.objective.draw(generator))
            chance = torch.rand(1, generator=generator, device=clean.device)
            dropped.append(chance < self.config.objective.text_dropout)
        return noise, torch.cat(level), torch.cat(dropped)

    def predict(self, model: nn.Module, noisy: Tensor, level: Tensor, text: Mapping[str, Tensor]) -> Tensor:
        return self.predict_at(model, noisy, self.objective.timestep(level), text)

    def predict_at(self, model: nn.Module, noisy: Tensor, timestep: Tensor, text: Mapping[str, Tensor]) -> Tensor:
        with self.accelerator.autocast():
            return video_models.predict(model, self.config.model, noisy, timestep, text)

    ####################################################################################################################
    # Evaluation
    ####################################################################################################################
    def evaluate(self, model: nn.Module, average: NoAverage, split: Literal["val", "test"]) -> dict[str, float]:
        """Loss on the grid: over all, and per bucket; of the moving average, and of the weights (`_raw`)."""
        with average.weights(model) as evaluated:
            scores = self.grid_loss(evaluated, self.held_out[split])
        raw = self.grid_loss(model, self.held_out[split]) if average else {}
        return {**scores, **{f"{name}_raw": value for name, value in raw.items()}}

    @torch.no_grad()
    def grid_loss(self, model: nn.Module, loader: Any) -> dict[str, float]:
        """Mean squared error over the grid of a split's clips and noise levels, every clip once."""
        was_training = model.training
        model.eval()
        rows = []
        for batch in loader:
            errors = [self.grid_error(model, batch, column) for column in range(len(self.levels))]
            # drops the clips that were handed out twice to fill the last batch
            rows.append(self.accelerator.gather_for_metrics(torch.stack(errors, 1)).double().cpu())
        model.train(was_training)
        losses = torch.cat(rows).mean(0)
        buckets = losses.view(self.config.evaluation.buckets, -1).mean(1)
        return {"loss": losses.mean().item(), **{f"bucket_{i}": value.item() for i, value in enumerate(buckets)}}

    def grid_error(self, model: nn.Module, batch: Mapping[str, Tensor], column: int) -> Tensor:
        """The squared error of a batch of held out clips at one noise level of the grid, (B,)."""
        clean = batch["clip"]
        level = self.levels[column].to(clean.device).expand(len(clean))
        noise = torch.stack([_grid_noise(int(index), column, clean[0]) for index in batch["index"]])
        text = {name: batch[name] for name in self.empty_text}
        prediction = self.predict(model, self.objective.add_noise(clean, noise, level), level, text)
        return squared_error(prediction, self.objective.target(clean, noise, level))

    def describe(self, scores: dict[str, float], split: Literal["val", "test"]) -> str:
        raw = f" (weights themselves {scores['loss_raw']:.4f})" if "loss_raw" in scores else ""
        return f"{split} loss {scores['loss']:.4f}{raw}"

    def probe_loss(self, model: nn.Module, column: int | None = None) -> Tensor:
        """The loss on a fixed batch at one noise level of the grid, or at all of them, for the diagnostics."""
        columns = range(len(self.levels)) if column is None else (column,)
        return torch.stack([self.grid_error(model, self.probe, column).mean() for column in columns]).mean()

    def profile(self, model: nn.Module) -> list[dict[str, Any]]:
        middle = len(self.levels) // 2
        return depth_profile(model, lambda: self.probe_loss(model, middle)) if self.config.profile else []

    ####################################################################################################################
    # Result
    ####################################################################################################################
    def finish(self, model: nn.Module, average: NoAverage, run_dir: Path) -> dict[str, Any]:
        config, main = self.config, self.accelerator.is_main_process
        ending: dict[str, Any] = {"profile": self.profile(model)}
        with average.weights(model) as evaluated:
            if main:
                save_weights(evaluated, config, run_dir)
            evaluated.eval()
            if config.profile:
                ending["depth_weights"] = depth_weights(evaluated, lambda: self.probe_loss(evaluated))
                columns = {sigma: column for column, sigma in enumerate(self.objective.sigma(self.levels).tolist())}
                ending["depth_weights_by_timestep"] = depth_weights_by_timestep(
                    evaluated, lambda sigma: self.probe_loss(evaluated, columns[sigma]), list(columns)
                )
            if config.sampling.count:
                captions = self.captions(config.sampling.count)
                clips = torch.cat(list(self.samples(evaluated, captions)))
                if main:
                    ending["samples"] = generate.write_samples(
                        run_dir,
                        clips,
                        captions,
                        seed=config.sampling.seed,
                        fps=config.sampling.fps,
                        real=self.real_clips(captions),
                    )
            if config.sampling.frechet:
                ending["frechet"] = self.frechet(evaluated)
            evaluated.train()
        return ending

    def result(
        self, start: dict[str, Any], val: dict[str, Any], test: dict[str, Any], ending: dict[str, Any]
    ) -> dict[str, Any]:
        count = self.config.evaluation.buckets
        fields: dict[str, Any] = {}
        for split, scores in (("val", val), ("test", test)):
            fields[f"{split}_loss"] = scores["loss"]
            fields[f"{split}_loss_raw"] = scores.get("loss_raw")
            fields[f"{split}_loss_untrained"] = start.get("scores", {}).get(split, {}).get("loss")
            fields[f"{split}_buckets"] = [
                {
                    "low": number / count,
                    "high": (number + 1) / count,
                    "loss": scores[f"bucket_{number}"],
                    "loss_raw": scores.get(f"bucket_{number}_raw"),
                }
                for number in range(count)
            ]
        return {
            **fields,
            "gflops": measure.forward_gflops(self.build_model, self.forward_on_meta),
            "profile": {"start": start.get("profile", []), "end": ending["profile"]},
            "depth_weights": ending.get("depth_weights", []),
            "depth_weights_by_timestep": ending.get("depth_weights_by_timestep", []),
            "samples": ending.get("samples"),
            "frechet": ending.get("frechet"),
        }

    def forward_on_meta(self, model: nn.Module) -> Tensor:
        shapes = {name: value[:1].to("meta") for name, value in self.probe.items()}
        text = {name: shapes[name] for name in self.empty_text}
        timestep = torch.full((1,), 500.0, device="meta")
        return video_models.predict(model, self.config.model, shapes["clip"], timestep, text)

    ####################################################################################################################
    # Samples
    ####################################################################################################################
    def captions(self, count: int) -> list[str]:
        """Captions in turns: those of the test set, not of training."""
        known = self.config.sampling.captions or self.test_set.caption_texts
        return [known[index % len(known)] for index in range(count)]

    @torch.no_grad()
    def samples(self, model: nn.Module, captions: list[str]) -> Iterator[Tensor]:
        """Generated clips in pixels, on the CPU, in batches that the processes share out; every process gets all."""
        sampling, device = self.config.sampling, self.accelerator.device
        vae = encoders.load_vae(sampling.vae, device=device) if sampling.vae is not None else None

        def make(indices: list[int]) -> Tensor:
            rows = [generate.noise_row(sampling.seed, index, self.test_set.clip_shape) for index in indices]
            texts = [self.test_set.text_of(captions[index]) for index in indices]
            text = {name: torch.stack([of[name] for of in texts]).to(device) for name in self.empty_text}
            predict = generate.guided(
                lambda noisy, timestep, text: self.predict_at(model, noisy, timestep, text).float(),
                text,
                self.empty_text,
                sampling.guidance,
            )
            clips = self.objective.sample(predict, torch.stack(rows).to(device), sampling.steps)
            return (clips if vae is None else encoders.decode_clips(vae, clips)).float()

        yield from self.share_out(len(captions), make)

    def share_out(self, count: int, make: Callable[[list[int]], Tensor]) -> Iterator[Tensor]:
        """Clips 0..count-1, in this order and on the CPU, of which every process makes its share and gets all.

        Every process calls `make` equally often, with equally many clips: a sharded model takes all of them for one.
        """
        for first in range(0, count, self.config.data.eval_batch_size):
            indices = list(range(first, min(count, first + self.config.data.eval_batch_size)))
            with self.accelerator.split_between_processes(list(indices), apply_padding=True) as share:
                made = make(share)
            clips = self.accelerator.gather(made.contiguous())
            made_by = self.accelerator.gather(torch.tensor(share, device=made.device)).tolist()
            yield clips[[made_by.index(index) for index in indices]].cpu()  # without what filled up the shares

    def real_clips(self, captions: list[str]) -> dict[str, Tensor]:
        """A test clip of every caption, in pixels; none of latents, which would have to be decoded."""
        if self.config.data.name == "latents":
            return {}
        known = self.test_set.captions
        return {caption: self.test_set[known.index(caption)]["clip"] for caption in set(captions) if caption in known}

    def frechet(self, model: nn.Module) -> dict[str, Any]:
        """The Frechet distance of generated clips to as many test clips (in pixels), or to all if there are less.

        On the main process.
        """
        from training.frechet import FrechetDistance

        sampling, device = self.config.sampling, self.accelerator.device
        distance = FrechetDistance(sampling.extractor, device)
        vae = encoders.load_vae(sampling.vae, device=device) if sampling.vae is not None else None
        count = min(sampling.frechet, len(self.test_set))

        def real(numbers: list[int]) -> Tensor:
            taken = [self.test_set[number * len(self.test_set) // count]["clip"] for number in numbers]
            clips = torch.stack(taken).to(device)
            return (clips if vae is None else encoders.decode_clips(vae, clips)).float()

        generated = self.samples(model, self.captions(sampling.frechet))
        for is_real, batches in ((True, self.share_out(count, real)), (False, generated)):
            for clips in batches:
                if self.accelerator.is_main_process:
                    distance.update(clips.clamp(-1, 1).to(device), real=is_real)
        return distance.result() if self.accelerator.is_main_process else {}


def save_weights(model: Any, config: VideoConfig, run_dir: Path) -> None:
    """What was trained: the transformer as diffusers saves it, or the depth parameters and adapters alone."""
    if config.model.train == "full":
        model.save_pretrained(run_dir / "transformer")
    if "lora" in config.model.train:
        model.save_lora_adapter(run_dir / "lora")
    if "depth" in config.model.train:
        safetensors.torch.save_file(attnres_vision.attnres_state_dict(model), run_dir / "attnres.safetensors")


def _grid_noise(index: int, column: int, like: Tensor) -> Tensor:
    generator = generator_for("validation-noise", index=index, column=column)
    return torch.randn(like.shape, generator=generator).to(like)


def speed_step(config: VideoConfig) -> Callable[[], object]:
    """One training step (forward, backward, update) on random clips of one process's micro-batch, for rating speed."""
    device = torch.device("cuda" if torch.cuda.is_available() and not config.cpu else "cpu")
    model: Any = video_models.build_model(config.model).to(device).train()
    optimizer = trainer.make_optimizer(model, config.optim)
    dataset = video_data.make_datasets(config.data, config.text, config.seed)[0]
    batch = speed_batch(config)
    clips = torch.randn(batch, *dataset.clip_shape, device=device)
    caption: Any = dataset.text_of(dataset.caption_texts[0])
    text = {name: torch.stack([value] * batch).to(device) for name, value in caption.items()}
    timestep = torch.rand(batch, device=device) * 1000
    called = torch.compile(model) if config.model.compile else model

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.mixed_precision == "bf16"):
            prediction = video_models.predict(called, config.model, clips, timestep, text)
        squared_error(prediction, clips).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed_batch(config: VideoConfig) -> int:
    """Clips that one process sees at once."""
    return max(1, config.data.batch_size // (config.grad_accumulation * int(os.environ.get("WORLD_SIZE", 1))))


def main(argv: list[str] | None = None) -> None:
    config = load_config(VideoConfig, argv)
    with processes.stoppable(lambda: loop.how_to_go_on(config)):
        train(config)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
