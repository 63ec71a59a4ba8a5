"""Configs from and to YAML, the command line (by jsonargparse) and nested dicts; unknown keys are errors.

A file with `base` and `variants` (see `training/compare.py`) is a table of configs; `--variant NAME` picks one.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import yaml

Config = TypeVar("Config")

# Fields that say where and how a run is carried out, not what it computes: they are no part of `config_hash`.
_NOT_HASHED = (
    "output_dir",
    "resume",
    "num_processes",
    "log_with",
    "log_interval",
    "checkpoint_interval",
    "keep_checkpoints",
    "data.workers",
)


def load_config(cls: type[Config], argv: Sequence[str] | None = None) -> Config:
    """The config of one run from `--config FILE` and `--key.key value` overrides; a mistake ends the program.

    `--variant NAME` picks one run out of a comparison table (`base` and `variants`), so that one YAML serves both
    `training.image` and `training.compare`.
    """
    args, picked = take_options(sys.argv[1:] if argv is None else argv, ("--config", "--variant"))
    fields = read_yaml(picked["--config"]) if "--config" in picked else {}
    if "variants" in fields:
        fields = variant_fields(fields, picked.get("--variant"))
    elif "--variant" in picked:
        raise SystemExit("--variant picks a run out of a table: give --config FILE with `base` and `variants`")
    return parse(cls, fields, args)


def parse(cls: type[Config], fields: Mapping[str, Any], args: Sequence[str]) -> Config:
    """The config from nested dicts and command-line overrides; a mistake ends the program with a message."""
    parser = jsonargparse.ArgumentParser(description=(cls.__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action="config", help="YAML file; later options override it")
    parser.add_class_arguments(cls)
    try:
        parsed = parser.parse_args(["--config", yaml.safe_dump(dict(fields), sort_keys=False), *args])
        parsed.pop("config", None)
        return _instantiate(parser, cls, parsed)
    except ValueError as error:
        parser.error(str(error))
    raise AssertionError("unreachable: parser.error exits")


def _instantiate(parser: Any, cls: type[Config], parsed: Any) -> Config:
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before version 4.49
    return cls(**dict(instantiate(parsed)))


def read_yaml(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SystemExit(f"--config {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise SystemExit(f"--config {path} must hold a mapping of fields, got {type(loaded).__name__}")
    return loaded


def from_fields(cls: type[Config], fields: Mapping[str, Any]) -> Config:
    """The config from nested dicts such as `to_fields` makes; unknown keys and wrong types are `ValueError`s."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls)
    try:
        return _instantiate(parser, cls, parser.parse_object(copy.deepcopy(dict(fields))))
    except (jsonargparse.ArgumentError, KeyError, TypeError) as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


def to_fields(config: Any) -> dict[str, Any]:
    """The config as nested dicts of JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def dump_config(config: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(to_fields(config), sort_keys=False))


def config_hash(config: Any) -> str:
    """A short hash of everything that decides what a run computes."""
    flat = flatten(to_fields(config))
    text = json.dumps({key: value for key, value in flat.items() if key not in _NOT_HASHED}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"optim": {"lr": 1}}` as `{"optim.lr": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def merge(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with the nested `overrides` put over them."""
    merged = dict(fields)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def variant_fields(table: Mapping[str, Any], variant: str | None) -> dict[str, Any]:
    """The run `variant` of a comparison table: `base` with the variant's fields put over it."""
    variants = table.get("variants") or {}
    if variant not in variants:
        raise SystemExit(f"--variant must be one of {', '.join(variants)} for this table of variants, got {variant!r}")
    return merge(table.get("base") or {}, variants[variant] or {})


def take_options(argv: Sequence[str], names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Take the first `--name VALUE` or `--name=VALUE` of each of `names` out of the arguments."""
    picked: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in names and name not in picked:
            picked[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    return rest, picked
