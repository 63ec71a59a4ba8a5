"""Names of what the benchmarks compare, made from the configuration and held against the model that was built."""

from __future__ import annotations

from typing import Any

from torch import nn

from attnres_vision.config import AttnResConfig
from attnres_vision.stream.reader import DepthAttention

STOCK = "stock"


def named(*choices: dict[str, Any] | None) -> dict[str, dict[str, Any] | None]:
    """Options of `attach` by the name of the variant; None is the stock model."""
    return {label(options): options for options in choices}


def label(options: dict[str, Any] | None) -> str:
    return STOCK if options is None else _label(AttnResConfig(**options))


def _label(config: AttnResConfig) -> str:
    blocks = f"block S={config.block_size}" if config.num_blocks is None else f"block N={config.num_blocks}"
    words = ["full" if config.mode == "full" else blocks, config.query]
    words += [f"rank {config.rank}"] if config.rank is not None else []
    words += [f"{config.heads} heads"] if config.heads > 1 else []
    phases = {None: "", True: ", two-phase", False: ", one-phase"}[config.two_phase]
    return " ".join(words) + phases


def check(model: nn.Module, options: dict[str, Any] | None) -> None:
    """Raise if a model is not the variant that its row names."""
    found = {_label(module.config) for module in model.modules() if isinstance(module, DepthAttention)} or {STOCK}
    if found != {label(options)}:
        raise RuntimeError(f"the row is named {label(options)!r}, and the model is {', '.join(sorted(found))}")


def dtype_of(model: nn.Module) -> str:
    """ "float32": that of the parameters; of several all, joined by a plus sign."""
    return "+".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}))
