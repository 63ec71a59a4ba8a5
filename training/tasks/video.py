"""Video diffusion: a diffusers video transformer with standard residuals or Attention Residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import attnres_vision
from training.config.video import VideoConfig
from training.data import encoders
from training.data.loaders import Splits, make_loaders
from training.data.videos import make_datasets
from training.evaluation import samples
from training.evaluation.diagnostics import depth_weights_by_timestep
from training.evaluation.frechet import FrechetDistance
from training.loop import trainer
from training.loop.average import NoAverage, TrainedParameters
from training.loop.task import Scores, Split, Task
from training.system.streams import generator_for
from training.tasks import video_models
from training.tasks.objective import make_objective, squared_error

PROBE_CLIPS = 16


def train(config: VideoConfig) -> dict[str, Any]:
    """Train and evaluate one model; returns what `result.json` says."""
    return trainer.train(VideoTask(config))


class VideoTask(Task):
    """A diffusion objective on clips with captions; held out loss on a fixed grid of clips, noise levels and noise."""

    unit = "clips"
    average = TrainedParameters
    config: VideoConfig

    def __init__(self, config: VideoConfig) -> None:
        super().__init__(config)
        self.objective = make_objective(config.objective)
        count = config.evaluation.sigmas
        self.levels = self.objective.levels((torch.arange(count) + 0.5) / count)

    @property
    def base(self) -> str | None:
        return self.config.model.pretrained

    def build_model(self) -> nn.Module:
        return video_models.build_model(self.config.model)

    def open_data(self) -> Splits:
        config, accelerator = self.config, self.accelerator
        sets = make_datasets(config.data, config.text, config.seed)
        loaders = make_loaders(accelerator, sets, config.data, config.grad_accumulation)
        self.test_set: Any = loaders.test.dataset
        self.empty_text = {name: value.to(accelerator.device) for name, value in self.test_set.empty_text.items()}
        # what is needed after the last step is looked at before the first one
        if config.sampling.vae is not None:
            encoders.vae_folder(config.sampling.vae)
        if config.sampling.frechet:
            FrechetDistance(config.sampling.extractor)
            if len(self.test_set) < 2:
                raise ValueError("sampling.frechet must be 0 for a test set of one clip: it compares with these")
        for caption in config.sampling.captions or ():
            if caption not in self.test_set.caption_texts:
                raise ValueError(f"sampling.captions must be captions of the test set, got {caption!r}")
        return loaders

    def first_of(self, batch: Any) -> Any:
        return {name: value[:PROBE_CLIPS] for name, value in batch.items()}

    def start(self, model: nn.Module) -> dict[str, Any]:
        untrained = {"val": self.score(model, "val"), "test": self.score(model, "test")}
        self.accelerator.print(f"untrained: {self.describe(untrained['val'], 'val')}")
        return {"scores": untrained, **super().start(model)}

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
    def evaluate(self, model: nn.Module, average: NoAverage, split: Split) -> Scores:
        """As for every task, and of the weights themselves where there is a moving average (`_raw`)."""
        raw = self.score(model, split) if average else {}
        return {**super().evaluate(model, average, split), **{f"{name}_raw": value for name, value in raw.items()}}

    @torch.no_grad()
    def score(self, model: nn.Module, split: Split) -> Scores:
        """Mean squared error over the grid of clips and noise levels, every clip once: over all, and per bucket."""
        was_training = model.training
        model.eval()
        rows = []
        for batch in self.held_out[split]:
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

    def describe(self, scores: Scores, split: Split) -> str:
        raw = f" (weights themselves {scores['loss_raw']:.4f})" if "loss_raw" in scores else ""
        return f"{split} loss {scores['loss']:.4f}{raw}"

    def probe_loss(self, model: nn.Module, column: int | None = None) -> Tensor:
        """The loss on a fixed batch at one noise level of the grid, or at all of them, for the diagnostics."""
        columns = range(len(self.levels)) if column is None else (column,)
        return torch.stack([self.grid_error(model, self.probe, column).mean() for column in columns]).mean()

    def profile_loss(self, model: nn.Module) -> Tensor:
        return self.probe_loss(model, len(self.levels) // 2)

    ####################################################################################################################
    # Result
    ####################################################################################################################
    def save(self, model: Any, run_dir: Path) -> None:
        """The transformer as diffusers saves it, or the depth parameters and adapters alone."""
        trained = self.config.model.train
        if trained == "full":
            model.save_pretrained(run_dir / "transformer")
        if "lora" in trained:
            model.save_lora_adapter(run_dir / "lora")
        if "depth" in trained:
            safetensors.torch.save_file(attnres_vision.attnres_state_dict(model), run_dir / "attnres.safetensors")

    def final(self, start: dict[str, Any], val: Scores, test: Scores) -> dict[str, Any]:
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
        return fields

    def forward_one(self, model: nn.Module) -> Tensor:
        shapes = {name: value[:1].to("meta") for name, value in self.probe.items()}
        text = {name: shapes[name] for name in self.empty_text}
        timestep = torch.full((1,), 500.0, device="meta")
        return video_models.predict(model, self.config.model, shapes["clip"], timestep, text)

    def look(self, model: nn.Module, run_dir: Path) -> dict[str, Any]:
        """Depth weights by noise level, samples, and their distance to test clips."""
        sampling = self.config.sampling
        found: dict[str, Any] = {"depth_weights_by_timestep": [], "samples": None, "frechet": None}
        model.eval()
        if self.config.profile:
            columns = {sigma: column for column, sigma in enumerate(self.objective.sigma(self.levels).tolist())}
            found["depth_weights_by_timestep"] = depth_weights_by_timestep(
                model, lambda sigma: self.probe_loss(model, columns[sigma]), list(columns)
            )
        if sampling.count:
            captions = self.captions(sampling.count)
            clips = torch.cat(list(self.generate(model, captions)))
            if self.accelerator.is_main_process:
                real = self.real_clips(captions)
                found["samples"] = samples.write_samples(
                    run_dir, clips, captions, seed=sampling.seed, fps=sampling.fps, real=real
                )
        if sampling.frechet:
            found["frechet"] = self.frechet(model)
        model.train()
        return found

    ####################################################################################################################
    # Samples
    ####################################################################################################################
    def captions(self, count: int) -> list[str]:
        """Captions in turns: those of the test set, not of training."""
        known = self.config.sampling.captions or self.test_set.caption_texts
        return [known[index % len(known)] for index in range(count)]

    @torch.no_grad()
    def generate(self, model: nn.Module, captions: list[str]) -> Iterator[Tensor]:
        """Generated clips in pixels, on the CPU, in batches that the processes share out; every process gets all."""
        sampling, device = self.config.sampling, self.accelerator.device
        to_pixels = self.decoder()

        def make(indices: list[int]) -> Tensor:
            rows = [samples.noise_row(sampling.seed, index, self.test_set.clip_shape) for index in indices]
            texts = [self.test_set.text_of(captions[index]) for index in indices]
            text = {name: torch.stack([of[name] for of in texts]).to(device) for name in self.empty_text}
            predict = samples.guided(
                lambda noisy, timestep, text: self.predict_at(model, noisy, timestep, text).float(),
                text,
                self.empty_text,
                sampling.guidance,
            )
            clips = self.objective.sample(predict, torch.stack(rows).to(device), sampling.steps)
            return to_pixels(clips)

        yield from self.share_out(len(captions), make)

    def decoder(self) -> Callable[[Tensor], Tensor]:
        """What turns clips as the model knows them into pixels, float32."""
        folder = self.config.sampling.vae
        if folder is None:
            return lambda clips: clips.float()
        vae = encoders.load_vae(folder, device=self.accelerator.device)
        return lambda latents: encoders.decode_clips(vae, latents).float()

    def share_out(self, count: int, make: Callable[[list[int]], Tensor]) -> Iterator[Tensor]:
        return samples.share_out(self.accelerator, self.config.data.eval_batch_size, count, make)

    def real_clips(self, captions: list[str]) -> dict[str, Tensor]:
        """A test clip of every caption, in pixels; none of latents, which would have to be decoded."""
        if self.config.data.name == "latents":
            return {}
        known = self.test_set.captions
        asked = [
            caption for caption in dict.fromkeys(captions) if caption in known
        ]  # in an order that files can follow
        return {caption: self.test_set[known.index(caption)]["clip"] for caption in asked}

    def frechet(self, model: nn.Module) -> dict[str, Any]:
        """The Frechet distance of generated clips to as many test clips (in pixels), or to all if there are less.

        On the main process.
        """
        sampling, device = self.config.sampling, self.accelerator.device
        distance = FrechetDistance(sampling.extractor, device)
        to_pixels = self.decoder()
        count = min(sampling.frechet, len(self.test_set))

        def real(numbers: list[int]) -> Tensor:
            taken = [self.test_set[number * len(self.test_set) // count]["clip"] for number in numbers]
            return to_pixels(torch.stack(taken).to(device))

        generated = self.generate(model, self.captions(sampling.frechet))
        for is_real, batches in ((True, self.share_out(count, real)), (False, generated)):
            for clips in batches:
                if self.accelerator.is_main_process:
                    distance.update(clips.clamp(-1, 1).to(device), real=is_real)
        return distance.result() if self.accelerator.is_main_process else {}

    def random_step(
        self, batch: int, device: torch.device
    ) -> tuple[Callable[[Any], Tensor], Callable[[Tensor], Tensor]]:
        config = self.config
        dataset = make_datasets(config.data, config.text, config.seed).train
        clips = torch.randn(batch, *dataset.clip_shape, device=device)
        caption = dataset.text_of(dataset.caption_texts[0])
        text = {name: torch.stack([value] * batch).to(device) for name, value in caption.items()}
        timestep = torch.rand(batch, device=device) * 1000

        def forward(model: Any) -> Tensor:
            return video_models.predict(model, config.model, clips, timestep, text)

        return forward, lambda prediction: squared_error(prediction, clips).mean()


def _grid_noise(index: int, column: int, like: Tensor) -> Tensor:
    generator = generator_for("validation-noise", index=index, column=column)
    return torch.randn(like.shape, generator=generator).to(like)


TASK = VideoTask  # what `training.compare` trains for `task: video`
