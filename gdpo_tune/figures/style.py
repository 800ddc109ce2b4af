"""Colours and symbols that all figures share.

HTML and PNG read the same tables, so a colour or a symbol means the same in both. Each mode has its
own symbol too, so that no figure depends on colour alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import (
    CANDIDATE_COLORS,
    INK,
    MODE_COLORS,
    OTHER_COLOR,
    abbreviate_parameter,
    get_mode,
)
from gdpo_tune.core.trials import Objective
from gdpo_tune.results.front_table import BASELINES as NAMES

MUTED = "#667085"
FAINT = "#aab2bf"
GRID = "#e9ecf1"
PAPER = "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Mark:
    """Colour and symbol of a kind of points."""

    color: str
    plotly: str
    """Name of the symbol in plotly."""
    matplotlib: str | tuple[int, int, int]
    """Symbol of the same shape in matplotlib: a name, or corners, style and angle."""


MODES: dict[str, Mark] = {
    mode: Mark(MODE_COLORS[mode], *symbols)
    for mode, symbols in {
        "gdpo": ("circle", "o"),
        "grpo": ("square", "s"),
        "grpo_no_std": ("diamond", "D"),
        "grpo_batch": ("triangle-up", "^"),
        "gdpo_no_batch_norm": ("triangle-down", "v"),
        "gdpo_no_std": ("pentagon", "p"),
        "dvao": ("triangle-left", "<"),
        "saw": ("cross", "P"),
        "gd2po": ("triangle-right", ">"),
    }.items()
}
OTHER = Mark(OTHER_COLOR, "hexagon", "h")
"""Mark of a mode that `MODES` lacks."""

BASELINES = {
    "published": (NAMES["published"], Mark(INK, "star", "*")),
    "start": (NAMES["start"], Mark(INK, "octagon", "8")),
    "untrained": (NAMES["untrained"], Mark(INK, "x", "X")),
}
"""Role of a baseline -> its name in legends, and its mark."""
CANDIDATES = {
    "checkpoint": ("checkpoint", Mark(CANDIDATE_COLORS["checkpoint"], "hexagram", (6, 1, 0))),
    "merge": ("merge", Mark(CANDIDATE_COLORS["merge"], "star-diamond", (4, 1, 0))),
}
"""Role of a candidate that nobody trained -> its name in legends, and its mark."""
REWARDS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Colours of rewards, in the order of their names."""


def get_mark(mode: str) -> Mark:
    """Return the colour and symbol of a normalization mode."""
    return MODES.get(mode, OTHER)


def get_configuration_mark(configuration: Configuration) -> tuple[str, Mark]:
    """Return the name in legends, and the mark, of a configuration that is no baseline."""
    mode = get_mode(configuration.params)
    return CANDIDATES.get(configuration.role) or (mode, get_mark(mode))


def fade(color: str, alpha: float) -> str:
    """Return `#rrggbb` as a CSS colour with an opacity of `alpha` (0 to 1)."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def count_columns(panels: int) -> int:
    """Return how many of `panels` stand side by side: at most three."""
    return min(panels, 3)


def title_axis(objective: Objective) -> str:
    """Return the title of an objective's axis, with its direction if smaller is better."""
    name = abbreviate_parameter(objective.name)
    return name if objective.direction == "maximize" else f"{name} (lower is better)"


def list_log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten from `low` to `high`, both above 0."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    return [tick for tick in candidates if low <= tick <= high]
