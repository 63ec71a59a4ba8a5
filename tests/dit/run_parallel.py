"""One of two processes: context-parallel inference, and the same in one process. Started by test_parallel.py."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

import dit
from tests.dit.tiny import inputs_for, randomise_queries, relative_error, stock_model


def check(name: str) -> None:
    model = dit.convert(stock_model(name, torch.float32), {"block_size": 2, "query": "condition"})
    randomise_queries(model)
    inputs = inputs_for(name, torch.float32)
    if name != "wan":  # the text tokens are split too, so their number has to be even
        inputs["encoder_hidden_states"] = torch.randn(2, 4, 8)
    inputs.update({"txt_ids": torch.zeros(4, 3)} if name == "flux" else {})
    inputs.update({"encoder_hidden_states_mask": None} if name == "qwen-image" else {})
    with torch.no_grad():
        wanted = model(**inputs)[0]
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    with torch.no_grad():
        error = relative_error(model(**inputs)[0], wanted)
        assert error < 1e-5, error
    model.enable_gradient_checkpointing()
    error = relative_error(model(**inputs)[0].detach(), wanted)
    assert error < 1e-5, error
    if dist.get_rank() == 0:
        print(f"{name}: two processes equal one", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, also on a CPU
    for model_name in sys.argv[1:]:
        check(model_name)
    dist.destroy_process_group()
