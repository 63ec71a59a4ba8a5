"""Which implementation computes a read: Triton kernels on a GPU, PyTorch operations everywhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

BACKENDS = ("auto", "eager", "triton")
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Limits of the kernels: beyond them a row no longer fits into registers, or the pointers into a launch.
MAX_WIDTH = 8192
MAX_SOURCES = 257
MAX_HEADS = 4


def _has_triton() -> bool:
    """Whether there is a Triton: torch brings it on Linux only, CPU builds do not. It takes a second to import."""
    spec = importlib.util.find_spec("triton")
    return spec is not None and spec.origin is not None  # None: a folder of that name on the path


# Looked up here, not at a read: torch.compile traces what a read does.
HAS_TRITON = _has_triton()
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU: tests on machines without a GPU

_chosen = "auto"  # a plain variable: torch.compile guards on it, and of a ContextVar older versions know nothing


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the implementation of depth attention for what runs inside, in all threads.

    Args:
        name: "auto" (Triton where its kernels can run, else eager), "eager", or "triton", which raises a ValueError at
            a read that the kernels cannot compute instead of falling back.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    global _chosen
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def is_traced(kernel: str = "eager") -> bool:
    """Whether PyTorch traces or transforms what runs now: compile, export, torch.func, forward-mode AD.

    A custom operator has no rules for the last two, and forward-mode AD would lose its tangents without a word. A
    compiler takes it as it is, which is right for the Triton kernels; on a CPU inductor makes more of the loop.
    """
    compiling = torch.compiler.is_compiling() and (kernel == "eager" or torch.compiler.is_exporting())
    # Not `is not None`: dynamo takes the None for an object
    transforming = isinstance(torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.CInterpreter)
    return compiling or transforming or forward_ad._current_level >= 0


def choose(sources: Sequence[Tensor], heads: int, add: Tensor | None = None) -> str:
    """ "triton" or "eager", for a read of these sources, `add` on the last one."""
    if _chosen == "eager" or (_chosen == "auto" and sources[0].device.type != "cuda"):
        return "eager"
    obstacle = _obstacle(sources, heads, add)
    if obstacle is None:
        return "triton"
    if _chosen == "triton":
        raise ValueError(f"backend 'triton' cannot compute this read: {obstacle}")
    return "eager"


def _obstacle(sources: Sequence[Tensor], heads: int, add: Tensor | None) -> str | None:
    """Why the kernels cannot compute a read; None if they can."""
    first, width = sources[0], sources[0].shape[-1]
    if not HAS_TRITON:
        return "Triton is not installed"
    if first.device.type != "cuda" and not (first.device.type == "cpu" and INTERPRETING):
        return f"the sources are on {first.device}, not on a GPU"
    dtypes = {source.dtype for source in sources} | ({add.dtype} if add is not None else set())
    if not dtypes <= set(TRITON_DTYPES):
        return f"sources must be fp32, fp16 or bf16, got {', '.join(sorted(map(str, dtypes)))}"
    if width > MAX_WIDTH or len(sources) > MAX_SOURCES or heads > MAX_HEADS:
        return (
            f"at most D={MAX_WIDTH}, {MAX_SOURCES} sources and {MAX_HEADS} heads, got D={width}, {len(sources)} "
            f"sources and {heads} heads"
        )
    return None
