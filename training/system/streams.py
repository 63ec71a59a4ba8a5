"""Where every random number of training comes from: one seed per named stream and keys.

Nothing else in this folder seeds a generator from a number of its own making (`tests/training/test_streams.py` looks).
Sums like `seed + epoch` meet (seed 0, epoch 1 is seed 1, epoch 0), and so do lists of numbers without names:
`numpy.random.SeedSequence((1,))` is that of `(1, 0)`, and the noise of step 0 would be what the weights start from.
"""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import torch

STREAMS: dict[str, tuple[str, ...]] = {
    "init": ("seed",),  # weights that the model starts from
    "setup": ("seed",),  # whatever libraries draw while data are opened
    "data-order": ("seed",),  # accelerate's sampler and timm's streams add the epoch to it
    "augmentation": ("seed", "epoch", "index"),  # of an image
    "clip": ("seed", "epoch", "index"),  # first frame and mirroring of a training clip
    "step": ("seed", "micro_step", "rank"),  # drop path, dropout, mixup
    "train-noise": ("seed", "micro_step", "row"),  # noise, level and dropped caption of a clip of the micro-batch
    "validation-noise": ("index", "column"),  # one grid for all runs, whatever their seed
    "sample": ("seed", "index"),  # noise that a generated clip starts from
    "posterior": ("seed", "file", "start"),  # of a VAE, for an encoded clip
    "random-features": (),  # the network that stands in for a Frechet extractor
}


def seed_for(stream: str, **keys: int | str) -> int:
    """The seed of a stream: 63 well mixed bits of the name and the keys, another one for every other name or key.

    63, not 64: accelerate's sampler and timm's streams add the epoch, and torch takes no more than 64 bits.

    Args:
        stream: one of `STREAMS`.
        keys: exactly the keys of the stream.

    Raises:
        ValueError: no such stream, or other keys.
    """
    if stream not in STREAMS:
        raise ValueError(f"stream must be one of {', '.join(STREAMS)}, got {stream!r}")
    if set(keys) != set(STREAMS[stream]):
        raise ValueError(f"stream {stream!r} takes the keys {', '.join(STREAMS[stream])}, got {', '.join(keys)}")
    text = json.dumps([stream, *(keys[name] for name in STREAMS[stream])])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator_for(stream: str, device: torch.device | str = "cpu", **keys: int | str) -> torch.Generator:
    """A torch generator at the start of a stream."""
    return torch.Generator(device).manual_seed(seed_for(stream, **keys))


def numpy_for(stream: str, **keys: int | str) -> np.random.Generator:
    """A NumPy generator at the start of a stream."""
    return np.random.default_rng(seed_for(stream, **keys))


def reseed(stream: str, **keys: int | str) -> None:
    """Put the global generators of torch (on every device), NumPy and `random` at the start of a stream."""
    seed = seed_for(stream, **keys)
    torch.manual_seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])  # a single number may have 32 bits only: two streams in 2^32 would meet
    random.seed(seed)
