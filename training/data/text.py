"""Captions as vectors without a text model: their UTF-8 bytes through a fixed random table.

For training in pixel space on a handful of captions, where a real text encoder would be larger than the video model.
Nothing is learned: captions are told apart, not understood.
"""

from __future__ import annotations

import numpy as np
import torch

EMPTY, PAD = 256, 257  # after the 256 bytes


# One caption: token embeddings `text` (L, D_text) float32, `text_mask` (L,) bool, `pooled` (D_pooled,) float32.
Text = dict[str, torch.Tensor]


class ByteText:
    """A caption's bytes as token embeddings, and one vector for the whole caption; frozen, the same on every machine.

    Token `i` is `(table[byte_i] + position_i) / sqrt(2)`; the pooled vector is the sum of `table'[byte_i] * sign'_i`
    over the tokens, divided by the square root of their number, so that the order of the bytes counts in it too. Both
    have mean 0 and variance 1 per channel. The empty caption is one special token; padding is masked, and zero.

    Args:
        width: channels `D_text` of a token.
        length: number of tokens `L`; a caption of more bytes is an error, not cut, for two might become the same.
        pooled_width: channels `D_pooled` of the pooled vector.
        seed: of the tables, at least 0.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, width: int = 64, length: int = 64, pooled_width: int = 64, seed: int = 0) -> None:
        for name, value, low in (
            ("width", width, 1), ("length", length, 1), ("pooled_width", pooled_width, 1), ("seed", seed, 0),
        ):  # fmt: skip
            if value < low:
                raise ValueError(f"text.{name} must be at least {low}, got {value}")
        self.width, self.length, self.pooled_width = width, length, pooled_width
        # Uniform numbers of NumPy's frozen legacy generator: the same bits on every platform and in every version,
        # which normal numbers (by way of log and sqrt) and torch's generators do not promise.
        random = np.random.RandomState(seed)
        self.table = _unit_variance(random.random_sample((PAD, width)))
        self.positions = _unit_variance(random.random_sample((length, width)))
        self.pooled_table = _unit_variance(random.random_sample((PAD, pooled_width)))
        self.pooled_signs = torch.from_numpy(random.random_sample((length, pooled_width)) < 0.5) * 2.0 - 1.0

    def ids(self, caption: str) -> torch.Tensor:
        """The caption's bytes, padded with `PAD`: int64 of shape `(L,)`.

        Raises:
            ValueError: the caption has more than `length` bytes.
        """
        tokens = list(caption.encode()) or [EMPTY]
        if len(tokens) > self.length:
            raise ValueError(f"text.length must be at least {len(tokens)} for the caption {caption!r}: {self.length}")
        return torch.tensor(tokens + [PAD] * (self.length - len(tokens)))

    def __call__(self, caption: str) -> Text:
        """Embed one caption; `""` is the empty caption of classifier-free guidance."""
        ids = self.ids(caption)
        mask = ids != PAD
        tokens = ids[mask]
        count = len(tokens)
        text = torch.zeros(self.length, self.width)
        text[:count] = (self.table[tokens] + self.positions[:count]) / 2**0.5
        pooled = (self.pooled_table[tokens] * self.pooled_signs[:count]).sum(0) / count**0.5
        return {"text": text, "text_mask": mask, "pooled": pooled}


def _unit_variance(uniform: np.ndarray) -> torch.Tensor:
    """Numbers from 0..1 as float32 of mean 0 and variance 1."""
    return torch.from_numpy(((uniform - 0.5) * 12**0.5).astype(np.float32))
