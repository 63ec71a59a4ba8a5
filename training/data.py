"""Images: scikit-learn's digits, and everything timm's `create_dataset` reads (folders, tar, WebDataset, HF datasets).

Random augmentation is a function of (seed, epoch, index) for data sets with an index, so that a resumed run sees the
same pixels with any number of workers. Streams (`wds/`, `hfids/`, `tfds/`) have no index: a resumed run starts the
interrupted epoch again, and its losses are not those of an uninterrupted run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup, create_dataset, create_transform
from torch.utils.data import DataLoader, Dataset, IterableDataset

from training.config import ImageDataConfig
from training.processes import end_worker_with_parent
from training.streams import reseed, seed_for

_STREAMS = ("wds/", "hfids/", "tfds/")


class Digits(Dataset):
    """The 1797 real 8x8 scans that scikit-learn ships, values in -1..1.

    Split once and for all: a quarter (450) for validation, stratified by class, with random state 0. Augmentation:
    none.
    """

    def __init__(self, train: bool) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
        self.images = torch.tensor(parts[0 if train else 1], dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
        self.labels = torch.tensor(parts[2 if train else 3])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


class Reproducible(Dataset):
    """A data set whose random augmentation is a function of (seed, epoch, index)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        # timm's transforms draw from all three; the training loop reseeds them after the batch is there
        reseed("augmentation", seed=self.seed, epoch=self.epoch, index=index)
        return self.dataset[index]


def make_datasets(config: ImageDataConfig, seed: int) -> tuple[Any, Any]:
    """The training and the validation set.

    Raises:
        FileNotFoundError: nothing is at `root`.
        ValueError: a data set is empty, or smaller than one batch.
    """
    train: Any
    val: Any
    if config.name == "digits":
        train, val = Digits(train=True), Digits(train=False)
    else:
        train, val = _timm_dataset(config, True, seed), _timm_dataset(config, False, seed)
    for name, dataset, split in (("train", train, config.train_split), ("val", val, config.val_split)):
        if len(dataset) == 0:
            raise ValueError(f"the {name} set is empty: data.name {config.name!r}, {config.root!r}, split {split!r}")
    if len(train) < config.batch_size:
        raise ValueError(f"data.batch_size must be at most {len(train)}, the training set, got {config.batch_size}")
    return train if isinstance(train, IterableDataset) else Reproducible(train, seed), val


def _timm_dataset(config: ImageDataConfig, train: bool, seed: int) -> Any:
    split = config.train_split if train else config.val_split
    folder = "/" not in config.name
    if folder or config.name.startswith("wds/"):
        root = Path(config.root) if config.root else None
        if root is None or not root.exists():
            raise FileNotFoundError(f"data.root {config.root!r} does not exist (data.name {config.name!r})")
        if folder and root.is_dir() and not (root / split).exists() and not (root / f"{split}.tar").exists():
            # timm would take the whole of root for either split: validation on training images
            raise FileNotFoundError(f"data.root {config.root!r} has no folder or tar file {split!r}")
    root_name = config.root
    if folder and root_name and (Path(root_name) / f"{split}.tar").is_file():
        root_name = str(Path(root_name) / f"{split}.tar")
    try:
        dataset = create_dataset(
            config.name,
            root=root_name,
            split=split,
            is_training=train,
            batch_size=config.batch_size,
            num_samples=config.train_samples if train else config.val_samples,
            seed=seed_for("data-order", seed=seed),
        )
    except RuntimeError as error:  # timm: "Found 0 images in subfolders of: ..."
        raise ValueError(f"no images for data.name {config.name!r}, root {config.root!r}, split {split!r}") from error
    dataset.transform = _transform(config, train)
    return dataset


def _transform(config: ImageDataConfig, train: bool) -> Any:
    random_crop = train and config.augment == "inception"
    return create_transform(
        config.input_size,
        is_training=random_crop,
        scale=config.crop_scale,
        hflip=config.hflip,
        color_jitter=config.color_jitter,
        auto_augment=config.auto_augment,
        re_prob=config.reprob,
        interpolation=config.interpolation,
        mean=tuple(config.mean),
        std=tuple(config.std),
        crop_pct=config.crop_pct,
    )


def make_loaders(accelerator: Any, config: ImageDataConfig, seed: int, parts: int) -> tuple[Any, Any]:
    """Loaders prepared for the processes; `parts` micro-batches make an update of `batch_size` images.

    Raises:
        ValueError: the batch cannot be split evenly.
    """
    check_batch_sizes(accelerator, config, parts)
    processes = accelerator.num_processes
    train, val = make_datasets(config, seed)
    if isinstance(train, IterableDataset):
        # timm's streams hand every process and worker its own share: accelerate must not split them again
        common, device = _loading(accelerator, config), accelerator.device
        micro = config.batch_size // parts
        train_loader: Any = StreamLoader(train, micro // processes, device, processes, common)
        val_loader: Any = StreamLoader(val, config.eval_batch_size // processes, device, processes, common)
        return train_loader, val_loader
    return indexed_loaders(accelerator, train, val, config, parts)


def check_batch_sizes(accelerator: Any, config: Any, parts: int) -> None:
    """Raise a `ValueError` if a batch of the data config cannot be split evenly over processes and micro-batches."""
    processes = accelerator.num_processes
    for name, size, shares in (
        ("batch_size", config.batch_size, processes * parts),
        ("eval_batch_size", config.eval_batch_size, processes),
    ):
        if size % shares:
            raise ValueError(f"data.{name} must be a multiple of {shares} (processes x micro-batches), got {size}")


def indexed_loaders(accelerator: Any, train: Any, val: Any, config: Any, parts: int) -> tuple[Any, Any]:
    """Loaders of data sets with an index, prepared for the processes: global batches, a seeded order for training."""
    common = _loading(accelerator, config)
    train_loader = DataLoader(train, config.batch_size // parts, shuffle=True, drop_last=True, **common)
    val_loader = DataLoader(val, config.eval_batch_size, shuffle=False, **common)
    return accelerator.prepare(train_loader, val_loader)


def _loading(accelerator: Any, config: Any) -> dict[str, Any]:
    pinned = accelerator.device.type == "cuda"
    return {"num_workers": config.workers, "pin_memory": pinned, "worker_init_fn": end_worker_with_parent}


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


def make_mixup(config: ImageDataConfig) -> Mixup | None:
    """timm's mixup and cutmix, which also smooth the labels; None if both are off."""
    if not config.mixes:
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        prob=config.mixup_prob,
        switch_prob=config.mixup_switch_prob,
        mode=config.mixup_mode,
        label_smoothing=config.label_smoothing,
        num_classes=config.num_classes,
    )
