"""One of two processes: context-parallel inference or a DDP step, and the same in one process. See test_parallel.py."""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dit
from tests.dit.tiny import inputs_for, randomise_queries, relative_error, stock_model


def context_parallel(name: str) -> None:
    model = dit.convert(stock_model(name, torch.float32), {"block_size": 2, "query": "condition"})
    randomise_queries(model)
    inputs = inputs_for(name, torch.float32)
    if name != "wan":  # the text tokens are split too, so their number has to be even
        inputs["encoder_hidden_states"] = torch.randn(2, 4, 8)
    inputs.update({"txt_ids": torch.zeros(4, 3)} if name == "flux" else {})
    inputs.update({"encoder_hidden_states_mask": None} if name == "qwen-image" else {})
    with torch.no_grad():
        wanted = model(**inputs)[0]
    from diffusers import ContextParallelConfig

    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    with torch.no_grad():
        error = relative_error(model(**inputs)[0], wanted)
        assert error < 1e-5, error
    model.enable_gradient_checkpointing()
    error = relative_error(model(**inputs)[0].detach(), wanted)
    assert error < 1e-5, error


def ddp(name: str) -> None:
    """Without `find_unused_parameters`: every depth parameter takes part."""
    config = {"block_size": 2, "query": "condition", "condition": ["timestep", "other_stream"]}
    model = dit.convert(stock_model(name), config)
    randomise_queries(model)
    alone = copy.deepcopy(model)
    batches = [inputs_for(name, seed=seed) for seed in (1, 5)]
    losses = [alone(**copy.deepcopy(batch))[0].pow(2).mean() for batch in batches]
    (sum(losses) / 2).backward()
    together = DistributedDataParallel(model)
    together(**batches[dist.get_rank()])[0].pow(2).mean().backward()
    largest = max(value.grad.abs().max() for value in alone.parameters())
    for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert (got.grad - wanted.grad).abs().max() <= 1e-12 * largest


if __name__ == "__main__":
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, also on a CPU
    for model_name in sys.argv[2:]:
        {"context-parallel": context_parallel, "ddp": ddp}[sys.argv[1]](model_name)
        if dist.get_rank() == 0:
            print(f"{model_name}: two processes equal one", flush=True)
    dist.destroy_process_group()
