"""What a panel of the report sees, and what it is.

A panel is a function that looks at the comparison and returns blocks, none where it has nothing to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training.report.plots import colours
from training.report.render import Block
from training.report.results import Result


@dataclasses.dataclass(frozen=True)
class View:
    """A comparison.

    Attributes:
        summary: what `summary.json` says.
        shown: the runs of the variants that are drawn, at their best learning rate: all variants, or of a sweep the
            best of each kind.
        folder: where plots go.
    """

    summary: dict[str, Any]
    shown: dict[str, list[Result]]
    folder: Path

    @property
    def baseline(self) -> str:
        return self.summary["baseline"]

    @property
    def variants(self) -> dict[str, Any]:
        return self.summary["variants"]

    @property
    def palette(self) -> dict[str, str]:
        return colours(list(self.shown), self.baseline)


Panel = Callable[[View], Sequence[Block]]
