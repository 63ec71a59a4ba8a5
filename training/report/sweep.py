"""Sweeps inside a table of variants: which variants are one kind of model with other numbers, and how they end.

Nothing here knows the names of fields. Variants that differ in numbers only (learning rates, scales, sizes) are one
group; what is not a number (the residual, the kind of query) tells the groups apart. The group of the baseline is swept
like the others, so that a table shows how many settings each kind was given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from attnres_vision.config import DEFAULT_NUM_BLOCKS, AttnResConfig
from training.config.io import flatten, to_fields
from training.report.results import PLACE, Result, paired, spread

_LEAST = 3  # settings in the largest group: fewer are no sweep


def sweep(results: Sequence[Result], baseline: str) -> list[dict[str, Any]]:
    """The groups of a table, the baseline's first; empty if the table is no sweep.

    Returns:
        For each group `{"label", "axes", "settings", "best", "test_loss", "edges", "difference",
        "difference_same_lr"}`: the numeric fields that vary in it; its settings `{"variant", "lr", "values",
        "val_loss"}` with the axes' values and the spread over the seeds; the setting with the lowest mean validation
        loss, which is the one reported, and its test loss; the axes on which it is the least or the largest value
        tried; its differences in test loss, by seed, to the baseline group's best, and to the best of those with its
        own learning rate (None without one).
    """
    runs: dict[tuple[str, float], list[Result]] = {}
    for result in results:
        runs.setdefault((result.variant, result.lr), []).append(result)
    fields = {setting: _fields(of_setting[0].result["config"]) for setting, of_setting in runs.items()}
    varying = {
        name: {setting: found.get(name) for setting, found in fields.items()}
        for name in dict.fromkeys(name for found in fields.values() for name in found)
        if name not in PLACE and len({repr(found.get(name)) for found in fields.values()}) > 1
    }
    groups, axes, kinds = _group(list(runs), varying)
    if max(len({variant for variant, _ in members}) for members in groups) < _LEAST:
        return []
    groups = sorted(groups, key=lambda members: all(variant != baseline for variant, _ in members))
    if all(variant != baseline for variant, _ in groups[0]):
        return []  # every run of the baseline failed: nothing to compare with
    found = [_entry(members, axes, kinds, varying, runs) for members in groups]
    for entry in found[1:]:
        best = entry["best"]
        same_lr = [setting for setting in found[0]["settings"] if setting["lr"] == best["lr"]]
        for key, others in (("difference", found[0]["settings"]), ("difference_same_lr", same_lr)):
            if others:
                other = _lowest(others)
                pair = runs[best["variant"], best["lr"]], runs[other["variant"], other["lr"]]
                entry[key] = paired(*pair, lambda result: result["test_loss"])
    return found


def _group(
    settings: list[tuple[str, float]], varying: Mapping[str, Mapping[Any, Any]]
) -> tuple[list[list[tuple[str, float]]], list[str], list[str]]:
    """Groups of settings, the numeric fields that vary within one, and the fields that tell the groups apart."""
    kinds = [name for name, values in varying.items() if not all(_number(value) for value in values.values())]
    while True:
        groups: dict[str, list[tuple[str, float]]] = {}
        for setting in settings:
            groups.setdefault(repr([varying[name][setting] for name in kinds]), []).append(setting)
        # a number that some of a group do not have ("rank: null") is a choice of another kind, not a point on an axis
        mixed = [
            name
            for name, values in varying.items()
            if name not in kinds and any(_mixed([values[s] for s in members]) for members in groups.values())
        ]
        if not mixed:
            break
        kinds += mixed
    axes = [
        name
        for name, values in varying.items()
        if name not in kinds and any(len({values[s] for s in members}) > 1 for members in groups.values())
    ]
    return list(groups.values()), axes, kinds


def _entry(
    members: list[tuple[str, float]],
    axes: list[str],
    kinds: list[str],
    varying: Mapping[str, Mapping[Any, Any]],
    runs: Mapping[tuple[str, float], list[Result]],
) -> dict[str, Any]:
    inside = [name for name in axes if len({varying[name][setting] for setting in members}) > 1]
    settings: list[dict[str, Any]] = [
        {
            "variant": setting[0],
            "lr": setting[1],
            "values": {name: varying[name][setting] for name in inside},
            "val_loss": spread([run.result["val_loss"] for run in runs[setting]]),
        }
        for setting in members
    ]
    best = _lowest(settings)
    tried = {name: [setting["values"][name] for setting in settings] for name in inside}
    edges = [name for name, values in tried.items() if best["values"][name] in (min(values), max(values))]
    # what all kinds that have a field agree on ("mode: block") tells none of them apart
    telling = [
        name for name in kinds if len({repr(value) for value in varying[name].values() if value is not None}) > 1
    ]
    label = ", ".join(filter(None, (_word(name, varying[name][members[0]]) for name in telling))) or members[0][0]
    test_loss = spread([run.result["test_loss"] for run in runs[best["variant"], best["lr"]]])
    entry = {"label": label, "axes": inside, "settings": settings, "best": best, "test_loss": test_loss, "edges": edges}
    return {**entry, "difference": None, "difference_same_lr": None}


def _lowest(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(settings, key=lambda setting: setting["val_loss"]["mean"])


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flat config; of the depth attention also what the config left at its default, where there is one at all."""
    flat = flatten(config)
    given = (config.get("model") or {}).get("attnres")
    if (config.get("model") or {}).get("residual") == "attnres" and isinstance(given, Mapping):
        chosen = AttnResConfig.from_dict(dict(given))
        if chosen.num_blocks is None and chosen.block_size is None:  # a smaller model has fewer, in all of these runs
            chosen = dataclasses.replace(chosen, num_blocks=DEFAULT_NUM_BLOCKS)
        filled = to_fields(chosen)
        flat.update({f"model.attnres.{name}": value for name, value in filled.items()})
    return flat


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _mixed(values: list[Any]) -> bool:
    return any(value is None for value in values) and any(value is not None for value in values)


def _word(name: str, value: Any) -> str:
    """A field of a group's label: a word stands for itself, a switch for its name, the rest with both."""
    short = name.rpartition(".")[2]
    if value is None or value is False or value == [] or value == {}:
        return ""
    if value is True:
        return short
    if isinstance(value, list | tuple):
        return " + ".join(map(str, value))
    return value if isinstance(value, str) else f"{short} {value}"
