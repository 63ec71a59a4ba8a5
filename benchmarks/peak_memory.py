"""Peak memory of a training step, shared by the benchmarks of whole models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


def peak_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> int:
    """Peak of tensor bytes alive in `step`, with parameters and optimiser state, from the profiler's allocations."""
    state = [value for state in optimizer.state.values() for value in state.values()]
    static = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *state])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return static + peak
