"""How the runs were made: what differs between their configs, and where they ran."""

from __future__ import annotations

from typing import Any

from training.report.render import Block
from training.report.view import View


def configs(view: View) -> list[Block]:
    rows = [["field", *view.variants]]
    for key, values in view.summary["config_differences"].items():
        rows.append([key, *("" if values[name] is None else str(values[name]) for name in view.variants)])
    return [Block("heading", "What differs between the configs"), Block("table", rows=rows)]


def environments(view: View) -> list[Block]:
    made_with = [environment_text(found) for found in view.summary["environments"]]
    return [Block("heading", "Made with"), Block("list", items=made_with)]


def environment_text(found: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    threads = f", {found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    return f"{packages}; Python {found['python']}; {found['device']}{threads}; commit {found['git'] or 'unknown'}"
