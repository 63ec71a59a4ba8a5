"""Loaders of any data set, prepared for the processes: global batches, a seeded order, micro-batches of an update."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from training.config.base import LoadingConfig
from training.system.processes import end_worker_with_parent


class Splits(NamedTuple):
    """The parts of a data set, or their loaders."""

    train: Any
    val: Any
    test: Any


def make_loaders(accelerator: Any, sets: Splits, config: LoadingConfig, parts: int) -> Splits:
    """The loaders of three data sets; `parts` micro-batches make an update of `batch_size` samples.

    Raises:
        ValueError: a batch cannot be split evenly over processes and micro-batches.
    """
    processes = accelerator.num_processes
    for name, size, shares in (
        ("batch_size", config.batch_size, processes * parts),
        ("eval_batch_size", config.eval_batch_size, processes),
    ):
        if size % shares:
            raise ValueError(f"data.{name} must be a multiple of {shares} (processes x micro-batches), got {size}")
    pinned = accelerator.device.type == "cuda"
    common = {"num_workers": config.workers, "pin_memory": pinned, "worker_init_fn": end_worker_with_parent}
    micro = config.batch_size // parts
    if isinstance(sets.train, IterableDataset):
        # timm's streams hand every process and worker its own share: accelerate must not split them again
        sizes = (micro, config.eval_batch_size, config.eval_batch_size)
        pairs = zip(sets, sizes, strict=True)
        return Splits(
            *(StreamLoader(of, size // processes, accelerator.device, processes, common) for of, size in pairs)
        )
    train = DataLoader(sets.train, micro, shuffle=True, drop_last=True, **common)
    held_out = (DataLoader(dataset, config.eval_batch_size, shuffle=False, **common) for dataset in sets[1:])
    return Splits(*accelerator.prepare(train, *held_out))


class StreamLoader:
    """A timm stream on this process's device, with the interface that the training loop uses."""

    def __init__(self, dataset: Any, batch_size: int, device: Any, processes: int, common: dict[str, Any]) -> None:
        self.dataset, self.device = dataset, device
        self.length = max(1, len(dataset) // (batch_size * processes))
        self.loader = DataLoader(dataset, batch_size, **common)

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Any:
        for batch in self.loader:
            yield [part.to(self.device, non_blocking=True) for part in batch]
