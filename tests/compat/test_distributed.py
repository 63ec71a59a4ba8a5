"""Data-parallel training over two gloo processes on the CPU equals one process on the whole batch."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.compat.models import attached, images

STEPS, WORLD = 3, 2
CASES: dict[str, dict[str, Any]] = {
    "ddp-block-static": {"wrap": "ddp", "name": "vit", "config": {"block_size": 3}},
    "ddp-block-token-checkpointing": {
        "wrap": "ddp",
        "name": "eva",
        "config": {"block_size": 3, "query": "token", "rank": 4},
        "checkpointing": True,
    },
    "fsdp-block-static": {"wrap": "fsdp", "name": "vit", "config": {"block_size": 3}},
    "fsdp-block-token": {"wrap": "fsdp", "name": "vit", "config": {"block_size": 3, "query": "token", "rank": 4}},
    "fsdp-full-token-checkpointing": {
        "wrap": "fsdp",
        "name": "eva",
        "config": {"mode": "full", "query": "token", "rank": 4},
        "checkpointing": True,
    },
    "ddp-two-phase": {"wrap": "ddp", "name": "vit", "config": {"mode": "full", "two_phase": True}},
    # Parameters of later layers are whole when a group of readers begins, and gone before its backward ends
    "fsdp-two-phase-unsharded": {
        "wrap": "fsdp",
        "name": "vit",
        "config": {"mode": "full", "two_phase": True},
        "reshard_after_forward": False,
    },
}


def train(model: nn.Module, run: Callable[[Tensor], Tensor], rank: int, world: int) -> list[float]:
    """The losses of three AdamW steps on this rank's share of the batches, averaged over the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        batch = images(4, seed=step).double().chunk(world)[rank]
        loss = run(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / world)
    return losses


def build(case: dict[str, Any]) -> nn.Module:
    """In float64: a key's bias has no gradient but rounding, and AdamW would make a full step of it in float32."""
    model = attached(case["name"], case["config"], depth=3).double().train()
    model.set_grad_checkpointing(case.get("checkpointing", False))
    return model


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def worker(rank: int, port: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    for name in names:
        case = CASES[name]
        model = build(case)
        if case["wrap"] == "ddp":
            losses = train(model, DistributedDataParallel(model), rank, WORLD)
            state = model.state_dict()
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (WORLD,))
            options = {"mesh": mesh, "reshard_after_forward": case.get("reshard_after_forward", True)}
            for block in model.blocks:
                fully_shard(block, **options)
            fully_shard(model, **options)

            def run(batch: Tensor, model: nn.Module = model) -> Tensor:
                with torch.no_grad():  # a validation in between leaves the layers whole, if they may stay so
                    model(batch)
                return model(batch)

            losses = train(model, run, rank, WORLD)
            state = {
                key: value.full_tensor() for key, value in model.state_dict().items() if hasattr(value, "to_local")
            }
        if rank == 0:
            torch.save({"losses": losses, "state": state}, Path(folder) / f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and the interpreter's exit would then abort


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one pair of processes: starting them costs more than the training does."""
    folder = tmp_path_factory.mktemp("distributed")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    mp.spawn(worker, args=(port, str(folder), list(CASES)), nprocs=WORLD)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(name: str, results: Path) -> None:
    model = build(CASES[name])
    start = {key: value.detach().clone() for key, value in model.named_parameters()}
    losses = train(model, model, 0, 1)
    got = torch.load(results / f"{name}.pt")
    assert got["losses"] == pytest.approx(losses, rel=1e-9)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    parameters = dict(model.named_parameters())
    assert parameters.keys() <= got["state"].keys()
    for key, value in parameters.items():
        assert not torch.equal(value, start[key]), f"{key} was not trained"
        torch.testing.assert_close(got["state"][key], value, rtol=1e-6, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}")
