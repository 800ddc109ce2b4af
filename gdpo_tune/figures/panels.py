"""Geometry of pairwise front figures, the same for HTML and PNG: axes, ranges, staircase, labels.

Every axis points towards better values: that of a minimised objective is reversed, so better is
always right and up.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from textwrap import wrap

from gdpo_tune.analysis.front import Front, name_extreme
from gdpo_tune.analysis.origins import find_parents
from gdpo_tune.analysis.pareto import rank_points
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import abbreviate_parameter, get_mode
from gdpo_tune.core.trials import Estimate, Objective
from gdpo_tune.figures import style

PADDING = 0.09
"""Share of the spread that is left free beyond the outermost points."""
ATTAINED = "front in these two objectives"
"""Name of the staircase in legends."""
PARENTS = "merge to its parents"
"""Name of the lines from merges in legends."""
MAX_LETTERS = 30
"""Letters in a line of a label."""


@dataclass(frozen=True)
class Axis:
    """One side of a panel."""

    objective: Objective | None
    """None: the trial's number, which stands in where there is only one objective."""
    low: float
    high: float

    @property
    def title(self) -> str:
        """Text beside the axis."""
        return "trial" if self.objective is None else title_axis(self.objective)

    @property
    def range(self) -> tuple[float, float]:
        """First and last value from left to right, or from the bottom to the top."""
        is_reversed = self.objective is not None and self.objective.direction == "minimize"
        return (self.high, self.low) if is_reversed else (self.low, self.high)

    def get_estimate(self, configuration: Configuration) -> Estimate:
        """Return the value of a configuration on this axis, and its standard error."""
        if self.objective is None:
            return Estimate(float(configuration.first), 0.0)
        return configuration.mean[self.objective.name]

    def get_position(self, value: float) -> float:
        """Return the position of a value, 0 (left or bottom) to 1 (right or top)."""
        first, last = self.range
        return (value - first) / (last - first)


@dataclass(frozen=True)
class Panel:
    """One pair of objectives."""

    x: Axis
    y: Axis
    staircase: tuple[tuple[float, float], ...]
    """Corners of the border of what is attained in these two objectives alone, best y first."""
    labels: tuple[tuple[Configuration, str], ...]
    """Configurations with a label: the chosen one, the knee, and the best in x and in y."""

    def get_point(self, configuration: Configuration) -> tuple[float, float]:
        """Return the values of a configuration on both axes."""
        return self.x.get_estimate(configuration).mean, self.y.get_estimate(configuration).mean

    def get_position(self, configuration: Configuration) -> tuple[float, float]:
        """Return the position of a configuration, 0 (left, bottom) to 1 (right, top)."""
        x, y = self.get_point(configuration)
        return self.x.get_position(x), self.y.get_position(y)


def title_axis(objective: Objective) -> str:
    """Return the title of an objective's axis."""
    name = abbreviate_parameter(objective.name)
    return name if objective.direction == "maximize" else f"{name} (lower is better)"


def count_columns(panels: int) -> int:
    """Return how many of `panels` stand side by side: at most three."""
    return min(panels, 3)


def list_modes(front: Front) -> list[str]:
    """Return the normalization modes that the search tried."""
    return sorted({get_mode(c.params) for c in front.configurations if c.role == "search"})


def list_legend(front: Front) -> list[tuple[str, style.Mark]]:
    """Return name and mark of each mode, of checkpoints and merges, and of each baseline."""
    roles = {c.role for c in front.configurations}
    others = {**style.CANDIDATES, **style.BASELINES}
    modes = [(mode, style.get_mark(mode)) for mode in list_modes(front)]
    return modes + [entry for role, entry in others.items() if role in roles]


def list_lines_to_parents(
    front: Front, panel: Panel
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return a line, as its two ends, from each merge on the front to each of its parents."""
    return [
        (panel.get_point(merge), panel.get_point(parent))
        for merge in front.members
        if merge.role == "merge"
        for parent in find_parents(front, merge)
    ]


def build_panels(front: Front) -> list[Panel]:
    """Return one panel for each pair of objectives; for a single one, its values by trial."""
    axes = [_build_axis(front, objective) for objective in front.objectives]
    pairs = list(combinations(axes, 2)) if len(axes) > 1 else [(_build_axis(front, None), axes[0])]
    return [Panel(x, y, _build_staircase(front, x, y), _label(front, x, y)) for x, y in pairs]


def _build_axis(front: Front, objective: Objective | None) -> Axis:
    axis = Axis(objective, 0.0, 1.0)
    ends: list[float] = []
    for configuration in front.configurations:
        estimate = axis.get_estimate(configuration)
        # Only these have error bars, so only theirs need room.
        reach = (
            estimate.se if configuration.is_on_front or configuration in front.baselines else 0.0
        )
        ends += [estimate.mean - reach, estimate.mean + reach]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    margin = PADDING * (high - low) or 0.05 * abs(high) or 0.5
    return Axis(objective, low - margin, high + margin)


def _build_staircase(front: Front, x: Axis, y: Axis) -> tuple[tuple[float, float], ...]:
    """Return steps from the left to the bottom edge; what lies below and left is dominated."""
    if x.objective is None or y.objective is None:
        return ()
    points = [
        (x.get_estimate(c).mean, y.get_estimate(c).mean)
        for c in front.configurations
        if c.rank >= 0
    ]
    is_best = rank_points(points, (x.objective, y.objective)) == 0
    # From the best y to the best x: along a front one falls exactly as the other rises.
    corners = sorted(
        {point for point, kept in zip(points, is_best, strict=True) if kept},
        key=lambda point: x.get_position(point[0]),
    )
    if not corners:
        return ()
    steps = [(x.range[0], corners[0][1])]
    for corner, following in zip(corners, [*corners[1:], None], strict=True):
        steps += [corner, (corner[0], y.range[0] if following is None else following[1])]
    return tuple(steps)


def _label(front: Front, x: Axis, y: Axis) -> tuple[tuple[Configuration, str], ...]:
    """Return one text per configuration, with a line for each of its titles."""
    goals = [axis.objective for axis in (y, x) if axis.objective is not None]
    titles = [("chosen", front.chosen)]
    # With one objective the knee is the best point, so naming both would say nothing.
    titles += [("knee", front.knee)] if len(goals) > 1 else []
    titles += [(name_extreme(goal), front.extremes.get(goal.name)) for goal in goals]
    texts: dict[int, list[str]] = {}
    labelled = {c.first: c for _, c in titles if c is not None}
    for title, configuration in titles:
        if configuration is not None:
            texts.setdefault(configuration.first, []).extend(wrap(title, MAX_LETTERS))
    return tuple((labelled[first], "\n".join(lines)) for first, lines in texts.items())
