"""In-place changes of the tensors that a depth stream holds.

Where a host's `x + out` makes a new tensor, a stream keeps `out` itself. A host that changes it afterwards would change
the stream, and without autograd nobody would say so. PyTorch counts such changes (`Tensor._version`): the stream
compares the counts. Where there is no count, in inference mode and in what a compiler traces, it holds a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNKNOWN = -1


def is_uncounted(tensor: Tensor) -> bool:
    """Whether PyTorch counts no changes of the tensor, although no compiler has them in its graph."""
    return not torch.compiler.is_compiling() and tensor.is_inference()


def held(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy where nobody counts its changes. (Inductor removes a copy that makes no difference.)"""
    return tensor.clone() if torch.compiler.is_compiling() or is_uncounted(tensor) else tensor


def version(tensor: Tensor) -> int:
    """How often the tensor, or another one of the same storage, has been changed in place."""
    if torch.compiler.is_compiling() or not isinstance(tensor, Tensor):  # a pytree's leaf may be anything
        return UNKNOWN
    return UNKNOWN if is_uncounted(tensor) else tensor._version


def is_changed(tensor: Tensor, recorded: int) -> bool:
    """Whether the tensor has been changed in place since `recorded` was its version."""
    return recorded != UNKNOWN and tensor._version != recorded
