"""What all pictures share: colours, symbols, and how numbers are written.

HTML and PNG read the same tables, so a colour or a symbol means the same in both. The colours are
those of Okabe and Ito, which stay apart under the common colour-vision deficiencies, and two of
Tol's; each mode has a symbol of its own as well, so that no picture depends on colour alone.

Source: Okabe and Ito 2008, Color Universal Design; Tol 2021, Colour Schemes (muted).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gdpo_tune.analysis.probability import Interval
from gdpo_tune.core.trials import Estimate, Params, ParamValue

INK = "#1c2430"
MUTED = "#667085"
FAINT = "#aab2bf"
GRID = "#e9ecf1"
PAPER = "#ffffff"
NOTHING = "\N{EM DASH}"
"""Stands where there is no value."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Mark:
    """How the points of one normalization mode are drawn."""

    color: str
    plotly: str
    """Name of the symbol in plotly."""
    matplotlib: str
    """Name of the same symbol in matplotlib."""


MODES: dict[str, Mark] = {
    "gdpo": Mark("#0072b2", "circle", "o"),
    "grpo": Mark("#d55e00", "square", "s"),
    "grpo_no_std": Mark("#009e73", "diamond", "D"),
    "grpo_batch": Mark("#cc79a7", "triangle-up", "^"),
    "gdpo_no_batch_norm": Mark("#56b4e9", "triangle-down", "v"),
    "gdpo_no_std": Mark("#e69f00", "pentagon", "p"),
    "dvao": Mark("#882255", "triangle-left", "<"),
    "saw": Mark("#999933", "cross", "P"),
}
OTHER = Mark("#7f7f7f", "hexagon", "h")
"""A mode that this table does not know yet."""

SHORT = {
    "reward_weights": "w {}",
    "conditioning": "{} if",
    "conditioning_threshold": "{} if at least",
}
"""Names of the parameters that exist once a reward."""

UNTRAINED = Mark(INK, "x", "X")
PUBLISHED = Mark(INK, "star", "*")
REWARDS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Colours of rewards, in the order of their names."""


def mode_of(params: Params) -> str:
    """The normalization mode that a configuration was trained with."""
    return str(params.get("normalization", "gdpo"))


def mark_of(mode: str) -> Mark:
    """Colour and symbol of a mode."""
    return MODES.get(mode, OTHER)


def faded(color: str, alpha: float) -> str:
    """`#rrggbb` as a CSS colour with an opacity of `alpha` (0 to 1)."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def number(value: float) -> str:
    """A measured value for reading: three decimals below 10, fewer above; a dash if not finite."""
    return f"{value:,.{_decimals(value)}f}" if math.isfinite(value) else NOTHING


def estimate(value: Estimate | None) -> str:
    """`mean ± standard error` with as many decimals in both; a dash for nothing."""
    if value is None:
        return NOTHING
    return f"{number(value.mean)} ± {value.se:,.{_decimals(value.mean)}f}"


def interval(value: Interval) -> str:
    """`low to high`."""
    return f"{number(value.low)} to {number(value.high)}"


def _decimals(value: float) -> int:
    magnitude = abs(value)
    return 3 if magnitude < 10 else 1 if magnitude < 1000 else 0


def parameter(value: ParamValue | None) -> str:
    """A parameter's value for reading, in three significant digits; a dash for nothing."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()  # as it is written in the file
    if not isinstance(value, float):
        return str(value)
    if 0 < abs(value) < 1e-3:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.3g}"


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from `low` to `high`, both above 0."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    return [tick for tick in candidates if low <= tick <= high]


def short_name(name: str) -> str:
    """A parameter's name for a narrow column: `reward_weights.format` becomes `w format`."""
    family, _, reward = name.partition(".")
    return SHORT.get(family, "{}").format(reward) if reward else name.replace("_", " ")


def duration(seconds: float) -> str:
    """Seconds for reading: `45 s`, `7 min 05 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
