"""Images: scikit-learn's digits, and everything timm's `create_dataset` reads (folders, tar, WebDataset, HF datasets).

Three parts: what is trained on, what everything is chosen on (validation), what is reported (test).
Random augmentation is a function of (seed, epoch, index) for data sets with an index, so that a resumed run sees the
same pixels with any number of workers. Streams (`wds/`, `hfids/`, `tfds/`) have no index: a resumed run starts the
interrupted epoch again, and its losses are not those of an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup, create_dataset, create_transform
from torch.utils.data import Dataset, IterableDataset, Subset

from training.config.image import ImageDataConfig
from training.data.loaders import Splits
from training.system.streams import reseed, seed_for

_HELD_OUT_TEST = 347  # of the digits


class Digits(Dataset):
    """The 1797 real 8x8 scans that scikit-learn ships, values in -1..1.

    Split once and for all, stratified by class, with random state 0: 1000 for training, 450 for validation, 347 for the
    test. Augmentation: none.
    """

    def __init__(self, split: str) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        # What there was before the test part is still the validation set: settings have been chosen on it.
        rest, val, rest_labels, val_labels = train_test_split(
            images, labels, test_size=0.25, stratify=labels, random_state=0
        )
        train, test, train_labels, test_labels = train_test_split(
            rest, rest_labels, test_size=_HELD_OUT_TEST, stratify=rest_labels, random_state=0
        )
        parts = {"train": (train, train_labels), "val": (val, val_labels), "test": (test, test_labels)}
        images, labels = parts[split]
        self.images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
        self.labels = torch.tensor(labels)

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


BUILT_IN: dict[str, Callable[[str], Dataset]] = {"digits": Digits}  # made from "train", "val" and "test"


def make_datasets(config: ImageDataConfig, seed: int) -> Splits:
    """The training, the validation and the test set; they share no image.

    Where the data have a test set (`data.test_split`, or a folder or tar file `test`), the validation set is
    `data.val_split`. Where they have none, `data.val_split` is the test set, and the validation set is held out of the
    training set: of every class `data.val_size`, the same images whatever the seed.

    Raises:
        FileNotFoundError: nothing is at `root`.
        ValueError: a data set is empty, or smaller than one batch; the parts have different classes.
    """
    names = {"train": config.train_split, "val": config.val_split, "test": config.val_split}
    train: Any
    val: Any
    test: Any
    if config.name in BUILT_IN:
        train, val, test = (BUILT_IN[config.name](part) for part in names)
    else:
        test_split = config.test_split or _test_folder(config)
        if config.name.startswith("wds/"):
            _check_shards(names | {"test": str(test_split)})
        if test_split is None:
            whole = _timm_dataset(config, "train", config.train_split, seed)
            held_out = held_out_images(_labels(whole, config), config.val_size)
            again = _timm_dataset(config, "train", config.train_split, seed, plain=True)
            train = Subset(whole, [index for index in range(len(whole)) if index not in held_out])
            val = Subset(again, sorted(held_out))
            test = _timm_dataset(config, "test", config.val_split, seed)
            names["val"] = config.train_split
        else:
            names["test"] = test_split
            train, val, test = (_timm_dataset(config, part, split, seed) for part, split in names.items())
        _check_classes(config, names, (train, val, test))
    for (name, split), dataset in zip(names.items(), (train, val, test), strict=True):
        if len(dataset) == 0:
            raise ValueError(f"the {name} set is empty: data.name {config.name!r}, {config.root!r}, split {split!r}")
    if len(train) < config.batch_size:
        raise ValueError(f"data.batch_size must be at most {len(train)}, the training set, got {config.batch_size}")
    return Splits(train if isinstance(train, IterableDataset) else Reproducible(train, seed), val, test)


def held_out_images(labels: Sequence[int], size: float) -> set[int]:
    """The images (their indices) that are held out of a training set for validation.

    Args:
        labels: of all images.
        size: share of every class when below 1, else a number of images per class. At least one image of a class is
            held out and at least one is left; a class of one image stays as it is.
    """
    of_class: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        of_class.setdefault(label, []).append(index)
    held_out: set[int] = set()
    for members in of_class.values():
        count = max(1, round(size * len(members) if size < 1 else size))
        # by a hash of the place in the class: neither the first ones of a folder, nor a matter of any seed
        places = sorted(range(len(members)), key=lambda place: hashlib.sha256(str(place).encode()).digest())
        held_out.update(members[place] for place in places[: min(count, len(members) - 1)])
    return held_out


def _labels(dataset: Any, config: ImageDataConfig) -> list[int]:
    """The class of every image, without decoding any."""
    reader: Any = getattr(dataset, "reader", None)
    if hasattr(reader, "iter_targets"):  # HF datasets
        return [int(label) for label in reader.iter_targets()]
    targets = getattr(reader, "targets", getattr(dataset, "targets", getattr(dataset, "labels", None)))
    if targets is None and hasattr(reader, "samples"):  # folders and tar files
        targets = [label for _, label in reader.samples]
    if targets is None:
        raise ValueError(
            f"data.test_split must be given for data.name {config.name!r}: the classes of its images are not known "
            "before they are read, so no validation set can be held out of data.train_split"
        )
    return [int(label) for label in targets]


def _test_folder(config: ImageDataConfig) -> str | None:
    """ "test" if the root has a folder of class folders, or a tar file, of that name."""
    if "/" in config.name or not config.root:
        return None
    root = Path(config.root)
    # ImageNet's own test folder has images without classes
    has_classes = (root / "test").is_dir() and any(path.is_dir() for path in (root / "test").iterdir())
    return "test" if has_classes or (root / "test.tar").is_file() else None


def _check_shards(names: dict[str, str]) -> None:
    from webdataset.shardlists import expand_urls

    shards = {part: set(expand_urls(split.split("|")[0])) for part, split in names.items()}
    for one, other in itertools.combinations(names, 2):
        if shared := sorted(shards[one] & shards[other]):
            raise ValueError(f"data.{one}_split and data.{other}_split must share no shard, both have {shared[0]!r}")


def _check_classes(config: ImageDataConfig, names: dict[str, str], datasets: Sequence[Any]) -> None:
    """Labels are numbers of class names: the parts must have the same ones."""
    whole = [dataset.dataset if isinstance(dataset, Subset) else dataset for dataset in datasets]
    readers = [getattr(dataset, "reader", None) for dataset in whole]
    known = [getattr(reader, "class_to_idx", getattr(reader, "class_name_to_idx", None)) for reader in readers]
    for part, classes in zip(names, known, strict=True):
        if classes and known[0] and set(classes) != set(known[0]):
            different = sorted(set(classes) ^ set(known[0]))
            raise ValueError(
                f"data.root {config.root!r}: splits {names['train']!r} and {names[part]!r} must have the same classes, "
                f"got {len(known[0])} and {len(classes)}, {different[0]!r} in one of them only"
            )


def _timm_dataset(config: ImageDataConfig, part: str, split: str, seed: int, plain: bool = False) -> Any:
    """A split as timm reads it; `part` is what it is for, `plain` leaves a training set without augmentation."""
    train = part == "train"
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
    samples = {"train": config.train_samples, "val": config.val_samples, "test": config.test_samples}
    try:
        dataset = create_dataset(
            config.name,
            root=root_name,
            split=split,
            is_training=train,
            batch_size=config.batch_size,
            num_samples=samples[part],
            seed=seed_for("data-order", seed=seed),
        )
    except RuntimeError as error:  # timm: "Found 0 images in subfolders of: ..."
        raise ValueError(f"no images for data.name {config.name!r}, root {config.root!r}, split {split!r}") from error
    dataset.transform = _transform(config, train and not plain)
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
