"""Random streams: one function of names and keys seeds all of them, and no two are the same."""

from __future__ import annotations

import ast
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.conftest import ROOT
from training.evaluation import samples
from training.loop.run import make_accelerator
from training.system import streams

KEYS: dict[str, list[Any]] = {
    "seed": [0, 1, 2, 42],
    "epoch": [0, 1, 2, 299],
    "index": [0, 1, 2, 3, 1000, 1_281_166, 2**32],
    "micro_step": [0, 1, 2, 3, 1000, 10**6],
    "rank": [0, 1, 2, 3, 7, 511],
    "row": [0, 1, 2, 3, 511],
    "column": list(range(10)),
    "file": ["a.mp4", "b.mp4", "1", "0"],
    "start": [0, 1, 49],
}
# What seeds a generator, and what is said about those outside of `streams`.
SEEDING = {"manual_seed", "manual_seed_all", "seed", "default_rng", "RandomState", "SeedSequence", "set_seed", "Random"}
FIXED = {("text.py", "RandomState(seed)")}  # tables whose numbers are a format, and pinned in test_video_data


def test_no_two_places_of_any_two_streams_share_a_seed() -> None:
    places = [
        (name, dict(zip(keys, values, strict=True)))
        for name, keys in streams.STREAMS.items()
        for values in itertools.product(*(KEYS[key] for key in keys))
    ]
    # densely, where sums and digits of one number would meet: 200 epochs x 200 images, 300 steps x 64 ranks
    places += [("augmentation", {"seed": 5, "epoch": e, "index": i}) for e in range(200) for i in range(200)]
    places += [("step", {"seed": 5, "micro_step": s, "rank": r}) for s in range(300) for r in range(64)]
    places += [("train-noise", {"seed": 5, "micro_step": s, "row": r}) for s in range(300) for r in range(64)]
    seeds = {streams.seed_for(name, **keys) for name, keys in places}
    assert len(places) > 70_000 and len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert np.mean([bin(seed).count("1") for seed in seeds]) == pytest.approx(31.5, abs=0.1)  # mixed in all bits


def test_a_seed_is_fixed_and_does_not_depend_on_the_order_of_the_keys() -> None:
    """Or runs could not be continued by a later version."""
    assert streams.seed_for("augmentation", seed=1, epoch=2, index=3) == EXPECTED
    assert streams.seed_for("augmentation", index=3, epoch=2, seed=1) == EXPECTED


EXPECTED = 370486273701005081


def test_an_unknown_stream_or_key_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"stream must be one of init.*got 'noise'"):
        streams.seed_for("noise", seed=0)
    with pytest.raises(ValueError, match="'step' takes the keys seed, micro_step, rank, got seed, micro_step"):
        streams.seed_for("step", seed=0, micro_step=1)


def test_generators_of_two_streams_draw_different_numbers() -> None:
    """Those that met: the weights, the first step on rank 0 and image 0 of epoch 0 all started from one state."""
    drawn = []
    for name, keys in (
        ("init", {"seed": 1}),
        ("step", {"seed": 1, "micro_step": 0, "rank": 0}),
        ("augmentation", {"seed": 1, "epoch": 0, "index": 0}),
    ):
        streams.reseed(name, **keys)
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 3
    # those of the validation grid were the training noise of seed 1, and the samples' those of their seed
    places = {"train-noise": {"seed": 1, "micro_step": 2, "row": 3}, "validation-noise": {"index": 2, "column": 3}}
    noise = [torch.randn(4, generator=streams.generator_for(name, **keys)) for name, keys in places.items()]
    noise.append(samples.noise_row(1, 2, (4,)))
    assert len({tuple(row.tolist()) for row in noise}) == 3


def test_the_order_of_the_data_is_another_one_for_every_seed_and_epoch(digits: Any) -> None:
    """accelerate adds the epoch to the seed: epoch 1 of seed 0 was epoch 0 of seed 1."""
    orders = []
    for seed in (0, 1, 2):
        config = digits({"seed": seed})
        accelerator = make_accelerator(config)
        loader = torch.utils.data.DataLoader(range(64), batch_size=64, shuffle=True)
        loader = accelerator.prepare(loader)
        for epoch in range(3):
            loader.set_epoch(epoch)
            orders.append(tuple(next(iter(loader)).tolist()))
    assert len(set(orders)) == 9


def test_nothing_else_in_training_seeds_a_generator() -> None:
    found = []
    for path in sorted((ROOT / "training").rglob("*.py")):
        if path.name == "streams.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            text = ast.unparse(node) if name in SEEDING else ""
            found += [(path.name, text.removeprefix("np.random."))] if text else []
            # libraries are handed seeds of streams, too
            seeds = [word for word in node.keywords if word.arg == "data_seed"] if isinstance(node, ast.Call) else []
            if name == "create_dataset":
                seeds += [word for word in node.keywords if word.arg == "seed"]  # type: ignore[union-attr]
            assert all(ast.unparse(word.value).startswith("seed_for(") for word in seeds), (path.name, name)
    assert set(found) == FIXED
