"""The dtypes of a read and of what it computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def promoted_dtype(sources: Sequence[Tensor]) -> torch.dtype:
    """The dtype of a sum of the sources, which is the dtype of a read."""
    return promoted([source.dtype for source in sources])


def promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Likewise, of dtypes."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax and sum: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Scores stay in fp32 under autocast too; entering a disabled autocast costs microseconds, so only if needed."""
    enabled = autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else contextlib.nullcontext()


def norm_is_fp32(name: str, device_type: str) -> bool:
    """Whether autocast makes aten's `name` compute in fp32 and return it: on GPUs it does, on a CPU it leaves norms."""
    return autocast_enabled(device_type) and _autocast_knows(name, device_type)


@torch.compiler.assume_constant_result  # dynamo cannot trace the look-up
def _autocast_knows(name: str, device_type: str) -> bool:
    key = f"Autocast{device_type.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a kind of device; the meta device has none, and torch raises if it is asked."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
