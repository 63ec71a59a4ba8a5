"""AttnResConfig: everything that defines which Attention Residuals a model runs.

One frozen dataclass of JSON values, so that it can travel in a timm `model_args`, a diffusers `config.json` or a
YAML file. It is checked when it is made; what depends on a model (its depth, its width) is checked by `attach`,
before the model is touched.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

Mode = Literal["block", "full"]
Query = Literal["static", "token", "block", "condition"]
Form = Literal["sum", "mean"]
Condition = Literal["timestep", "pooled_text", "other_stream"]

DEFAULT_NUM_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class AttnResConfig:
    """Which Attention Residuals a model runs (arXiv 2603.15031, sections 3.1 and 3.2).

    Args:
        mode: `"block"` reads finished block sums and the open block's partial sum (Eq. 5, 6); `"full"` reads every
            sublayer's output (Eq. 1 to 4) and is `"block"` with `block_size=1`.
        num_blocks: number of blocks N, between 1 and the model's number of sublayers. A number that does not divide
            the sublayers gives a short last block. All others have the same size, so there can be fewer than N blocks
            (N = 16 with 24 sublayers: 12 blocks of 2). `None` is 8, the paper's choice, or the number of sublayers if
            that is smaller. The model's own config, which is also the saved one, has the number: loaded with fewer
            layers, it is a number out of range like any other.
        block_size: sublayers per block S, instead of `num_blocks`. A transformer block of attention and MLP counts 2.
        query: where a reader's query comes from. `"static"`: a learned vector (the paper's default). `"token"`: plus a
            projection of the newest source, token by token (the paper's input-dependent ablation). `"block"`: plus a
            projection of the newest source at the block's entry. `"condition"`: plus a projection of the model's
            conditioning vector (for a ViT the token mean of the embedding, for a diffusion transformer `condition`).
        condition: for diffusion transformers with `query="condition"`, what the query is computed from, one or more of
            `"timestep"` (the model's own time embedding), `"pooled_text"` (its projection of the pooled text embedding)
            and `"other_stream"` (the token mean of the other stream's newest source, when the transformer block is
            entered). `None` is the first of these that the model has: `("timestep",)` for all of diffusers'.
        rank: rank of the projection of an input-dependent query; `None` is a full D x D matrix.
        heads: number of depth heads; each D / heads slice of the width has its own softmax over the sources.
        scale: factor on the scores. The paper has 1.0; `D ** -0.5` is what some follow-ups use.
        form: `"sum"` multiplies the weighted mean by the number of sources, which makes zero queries compute exactly
            the standard residual; `"mean"` is the paper's formula.
        key_eps: epsilon of the keys' RMSNorm.
        two_phase: readers are taken together, up to eight in whole blocks: the first one reads the sources there are
            for all of them, and the others read only what has come since (not with `query="token"` or depth heads,
            which it leaves alone; with `query="block"` one block at a time). `None` does so on a GPU, `True` on a CPU
            too, where it saves little, `False` never. The result is the same but for rounding.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    mode: Mode = "block"
    num_blocks: int | None = None
    block_size: int | None = None
    query: Query = "static"
    condition: tuple[Condition, ...] | None = None
    rank: int | None = None
    heads: int = 1
    scale: float = 1.0
    form: Form = "sum"
    key_eps: float = 1e-6
    two_phase: bool | None = None

    def __post_init__(self) -> None:
        for field, allowed in (("mode", Mode), ("query", Query), ("form", Form)):
            _check(field, getattr(self, field), getattr(self, field) in get_args(allowed), _one_of(get_args(allowed)))
        for field in ("num_blocks", "block_size", "rank"):
            value = getattr(self, field)
            _check(field, value, value is None or (_is_int(value) and value >= 1), "an integer of at least 1, or None")
        _check("heads", self.heads, _is_int(self.heads) and self.heads >= 1, "an integer of at least 1")
        _check("scale", self.scale, _is_number(self.scale) and self.scale != 0, "a finite number other than 0")
        _check("key_eps", self.key_eps, _is_number(self.key_eps) and self.key_eps > 0, "a finite number above 0")
        _check("two_phase", self.two_phase, self.two_phase in (None, True, False), "True, False or None")
        _check("rank", self.rank, self.rank is None or self.query != "static", "None when query is 'static'")

        if self.condition is not None:
            _check("condition", self.condition, self.query == "condition", "None unless query is 'condition'")
            object.__setattr__(self, "condition", _condition(self.condition))

        if self.mode == "full":
            _check("num_blocks", self.num_blocks, self.num_blocks is None, "None when mode is 'full'")
            _check("block_size", self.block_size, self.block_size in (None, 1), "None or 1 when mode is 'full'")
            object.__setattr__(self, "block_size", 1)
        elif self.block_size is not None:
            _check("num_blocks", self.num_blocks, self.num_blocks is None, "None when block_size is given")
        object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "key_eps", float(self.key_eps))

    def for_sublayers(self, sublayers: int) -> AttnResConfig:
        """This config for a model of `sublayers` sublayers: `num_blocks` is a number unless `block_size` is one.

        Raises:
            ValueError: `num_blocks` or `block_size` is larger than the number of sublayers.
        """
        if self.num_blocks is None and self.block_size is None:
            return dataclasses.replace(self, num_blocks=min(DEFAULT_NUM_BLOCKS, sublayers))
        field, value = ("block_size", self.block_size) if self.block_size else ("num_blocks", self.num_blocks)
        assert value is not None
        if value > sublayers:
            raise ValueError(
                f"{field} must be between 1 and {sublayers} for this model ({sublayers} sublayers), got {value}"
            )
        return self

    def sublayers_per_block(self, sublayers: int) -> int:
        """Block size S for a model of `sublayers` sublayers.

        Raises:
            ValueError: `num_blocks` or `block_size` is larger than the number of sublayers.
        """
        config = self.for_sublayers(sublayers)
        if config.block_size is not None:
            return config.block_size
        assert config.num_blocks is not None
        return math.ceil(sublayers / config.num_blocks)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON values; `from_dict` gives an equal config back."""
        return {**dataclasses.asdict(self), "condition": None if self.condition is None else list(self.condition)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> AttnResConfig:
        """The config from a mapping such as `to_dict` makes; missing fields take their defaults.

        Raises:
            ValueError: an unknown key (the message names the nearest valid one) or an invalid value.
        """
        if not isinstance(fields, Mapping):
            raise ValueError(f"AttnResConfig fields must be a mapping of names to values, got {fields!r}")
        names = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.4)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown AttnResConfig field {key!r}{hint} (valid: {', '.join(names)})")
        return cls(**fields)

    @classmethod
    def resolve(cls, config: AttnResConfig | Mapping[str, Any] | None = None, **fields: Any) -> AttnResConfig:
        """The config from whichever way a user gives it: a config, a mapping, or keyword fields."""
        if config is not None and fields:
            raise ValueError(f"give either config or fields, got config={config!r} and {sorted(fields)}")
        if isinstance(config, cls):
            return config
        return cls.from_dict(fields if config is None else cast(Mapping[str, Any], config))


def _condition(value: Any) -> tuple[Condition, ...]:
    names = get_args(Condition)
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    valid = listed and len(value) > 0 and len(set(value)) == len(value) and all(name in names for name in value)
    _check("condition", value, valid, f"a sequence of different names, each {_one_of(names)}, or None")
    return tuple(value)


def _check(field: str, value: Any, valid: bool, allowed: str) -> None:
    if not valid:
        raise ValueError(f"{field} must be {allowed}, got {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(values: tuple[str, ...]) -> str:
    return "one of " + ", ".join(repr(value) for value in values)
