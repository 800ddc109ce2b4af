"""The geometry of pairwise front pictures, the same for HTML and PNG: axes, ranges, staircase.

Every axis points towards the better values: that of a minimised objective runs backwards, so better
is always right and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.pareto import non_dominated
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.formatting import abbreviate
from gdpo_tune.core.trials import Estimate, Objective

PADDING = 0.09
"""Share of the spread that is left free beyond the outermost points."""


@dataclass(frozen=True)
class Axis:
    """What one side of a panel shows."""

    objective: Objective | None
    """None: the trial's number, which stands in where there is one objective only."""
    low: float
    high: float

    @property
    def title(self) -> str:
        """What a reader sees beside the axis."""
        if self.objective is None:
            return "trial"
        name = abbreviate(self.objective.name)
        return name if self.objective.direction == "maximize" else f"{name} (less is better)"

    @property
    def reversed(self) -> bool:
        """Whether smaller values are further right or up."""
        return self.objective is not None and self.objective.direction == "minimize"

    @property
    def range(self) -> tuple[float, float]:
        """First and last value as drawn from left to right, or from the bottom to the top."""
        return (self.high, self.low) if self.reversed else (self.low, self.high)

    @property
    def worst(self) -> float:
        """The edge where the worse values are."""
        return self.range[0]

    def of(self, configuration: Configuration) -> Estimate:
        """Where a configuration lies on this axis, and how far its error bar reaches."""
        if self.objective is None:
            return Estimate(float(configuration.first), 0.0)
        return configuration.mean[self.objective.name]

    def place(self, value: float) -> float:
        """Position of a value, 0 (left or bottom) to 1 (right or top)."""
        first, last = self.range
        return (value - first) / (last - first)


@dataclass(frozen=True)
class Panel:
    """One pair of objectives."""

    x: Axis
    y: Axis
    staircase: tuple[tuple[float, float], ...]
    """Corners of the border of what was attained in these two objectives alone, best y first."""
    labels: tuple[tuple[Configuration, str], ...]
    """Configurations that are pointed out by name: the knee, and the best in x and in y."""


def panels(front: Front) -> list[Panel]:
    """One panel for each pair of objectives; for a single one, its values by trial number."""
    axes = [_axis(front, objective) for objective in front.objectives]
    pairs = list(combinations(axes, 2)) if len(axes) > 1 else [(_axis(front, None), axes[0])]
    return [Panel(x, y, _staircase(front, x, y), _labels(front, x, y)) for x, y in pairs]


def _axis(front: Front, objective: Objective | None) -> Axis:
    axis = Axis(objective, 0.0, 1.0)
    ends: list[float] = []
    for configuration in front.configurations:
        estimate = axis.of(configuration)
        # Error bars are drawn for these alone, so only theirs need room.
        reach = estimate.se if configuration.on_front or configuration in front.baselines else 0.0
        ends += [estimate.mean - reach, estimate.mean + reach]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    margin = PADDING * (high - low) or 0.05 * abs(high) or 0.5
    return Axis(objective, low - margin, high + margin)


def _staircase(front: Front, x: Axis, y: Axis) -> tuple[tuple[float, float], ...]:
    if x.objective is None or y.objective is None:
        return ()
    points = [(x.of(c).mean, y.of(c).mean) for c in front.configurations if c.rank >= 0]
    best = non_dominated(points, (x.objective, y.objective))
    # From the best y to the best x: along a front one falls exactly as the other rises.
    corners = sorted(
        {point for point, kept in zip(points, best, strict=True) if kept},
        key=lambda point: x.place(point[0]),
    )
    return _steps(corners, x.worst, y.worst)


def _steps(
    corners: Sequence[tuple[float, float]], worst_x: float, worst_y: float
) -> tuple[tuple[float, float], ...]:
    """From the left edge to the bottom edge; what lies below and left of it is dominated."""
    if not corners:
        return ()
    line = [(worst_x, corners[0][1])]
    for here, following in zip(corners, [*corners[1:], None], strict=True):
        line += [here, (here[0], worst_y if following is None else following[1])]
    return tuple(line)


def _labels(front: Front, x: Axis, y: Axis) -> tuple[tuple[Configuration, str], ...]:
    """One text for each configuration; a configuration that is pointed out twice has both."""
    texts: dict[int, list[str]] = {}
    found: dict[int, Configuration] = {}
    goals = [axis.objective for axis in (y, x) if axis.objective is not None]
    # With one objective the knee is the best point, so naming both would say nothing.
    named = [("chosen", front.chosen)]
    named += [("knee", front.knee)] if len(goals) > 1 else []
    named += [
        (front.leads(goal.name), front.extremes[goal.name])
        for goal in goals
        if goal.name in front.extremes
    ]
    for text, configuration in named:
        if configuration is not None:
            found[configuration.first] = configuration
            texts.setdefault(configuration.first, []).append(text)
    return tuple((found[first], ", ".join(parts)) for first, parts in texts.items())
