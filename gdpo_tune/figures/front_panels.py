"""Scatters of a front: panels of points, lines and labels, before any library draws.

`front_figure` draws a panel with plotly and with matplotlib, so HTML and PNG cannot disagree. Every
axis points towards better values: that of a minimised objective is reversed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from textwrap import wrap
from typing import TYPE_CHECKING, Literal, NamedTuple

from gdpo_tune.analysis.front import Front, find_parents, name_extreme
from gdpo_tune.analysis.pareto import rank_points
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import abbreviate_parameter, get_mode
from gdpo_tune.core.trials import Estimate, Objective
from gdpo_tune.figures import style

if TYPE_CHECKING:
    from gdpo_tune.spec.model import Constraint

Layer = Literal["violating", "dominated", "member", "published", "untrained"]
XY = tuple[float, float]

PADDING = 0.09
"""Share of the spread that is left free beyond the outermost points."""
ATTAINED = "front in these two objectives"
PARENTS = "merge to its parents"
"""Names of lines in legends."""
MAX_LETTERS = 30
"""Letters in a line of a label."""
CROWDED = 200
"""Most points that labels keep free; of more, members and baselines alone."""


class Axis(NamedTuple):
    """One side of a panel."""

    objective: Objective | None
    """None: the trial's number, which stands in where there is only one objective."""
    low: float
    high: float

    @property
    def title(self) -> str:
        """Title of the axis."""
        return "trial" if self.objective is None else title_axis(self.objective)

    @property
    def range(self) -> XY:
        """First and last value from left to right, or from the bottom to the top."""
        is_reversed = self.objective is not None and self.objective.direction == "minimize"
        return (self.high, self.low) if is_reversed else (self.low, self.high)

    def get_estimate(self, configuration: Configuration) -> Estimate:
        """Return the value of a configuration; its first trial on an axis of trials."""
        if self.objective is None:
            return Estimate(float(configuration.first), 0.0)
        return configuration.mean[self.objective.name]

    def get_position(self, value: float) -> float:
        """Return the position of a value, 0 (left or bottom) to 1 (right or top)."""
        first, last = self.range
        return (value - first) / (last - first)


class Look(NamedTuple):
    """Look of a layer: lengths in pixels (HTML) and in points (PNG)."""

    pixels: float
    points: float
    edge_pixels: float
    edge_points: float
    opacity: float
    order: int
    """The higher one covers the lower one."""


LOOKS: Mapping[Layer, Look] = {
    "violating": Look(6, 3.5, 1.2, 0.9, 0.55, 2),
    "dominated": Look(8, 5, 1.2, 0.9, 0.35, 3),
    "member": Look(11, 7, 2, 1.5, 1.0, 4),
    "published": Look(15, 13, 1.2, 0.9, 1.0, 5),
    "untrained": Look(10, 7.5, 0.0, 0.6, 1.0, 4),
}


class Point(NamedTuple):
    """A configuration in a panel."""

    configuration: Configuration
    x: Estimate
    y: Estimate
    layer: Layer
    group: str
    """Name of its mark in the legend."""
    mark: style.Mark
    fill: str
    """Colour inside of its edge, which has the colour of the mark; hollow means one seed."""

    @property
    def xy(self) -> XY:
        """Means on both axes."""
        return self.x.mean, self.y.mean

    @property
    def has_bars(self) -> bool:
        """True if its standard errors are drawn."""
        return self.layer not in ("violating", "dominated")


@dataclass(frozen=True)
class Panel:
    """One pair of objectives."""

    x: Axis
    y: Axis
    points: tuple[Point, ...]
    """In the order of `Front.configurations`."""
    staircase: tuple[XY, ...]
    """Corners of the border of what is attained in these two objectives alone, best y first."""
    parents: tuple[tuple[XY, XY], ...]
    """A line from each merge on the front to each of its parents."""
    bounds: tuple[tuple[str, float], ...]
    """Axis and limit of constraints that lie within the panel."""
    labels: tuple[tuple[Point, str], ...]
    """The chosen one, the knee, and the best in x and in y; a line for each of its titles."""
    obstacles: tuple[Point, ...]
    """Points that labels must not cover."""

    def get_position(self, point: Point) -> XY:
        """Return the position of a point, 0 (left, bottom) to 1 (right, top)."""
        return self.x.get_position(point.x.mean), self.y.get_position(point.y.mean)


def title_axis(objective: Objective) -> str:
    """Return its name, and its direction where less is better."""
    name = abbreviate_parameter(objective.name)
    return name if objective.direction == "maximize" else f"{name} (lower is better)"


def count_columns(panels: int) -> int:
    """Return how many of `panels` stand side by side: at most three."""
    return min(panels, 3)


def build_panels(front: Front, constraints: Mapping[str, Constraint] | None = None) -> list[Panel]:
    """Return one panel for each pair of objectives; for a single one, its values by trial."""
    axes: list[Axis] = [_build_axis(front, objective) for objective in front.objectives]
    pairs = list(combinations(axes, 2)) if len(axes) > 1 else [(_build_axis(front, None), axes[0])]
    return [_build_panel(front, x, y, constraints or {}) for x, y in pairs]


def list_legend(front: Front) -> list[tuple[str, style.Mark]]:
    """Return name and mark of each mode, of checkpoints and merges, and of each baseline."""
    roles = {c.role for c in front.configurations}
    others = {**style.CANDIDATES, **style.BASELINES}
    modes = sorted({get_mode(c.params) for c in front.configurations if c.role == "search"})
    marks = [(mode, style.get_mark(mode)) for mode in modes]
    return marks + [entry for role, entry in others.items() if role in roles]


def list_line_legend(front: Front) -> list[str]:
    """Return the names of the lines that some panel has."""
    names = [ATTAINED] if front.members and len(front.objectives) > 1 else []
    return names + [PARENTS] * any(member.role == "merge" for member in front.members)


def _build_axis(front: Front, objective: Objective | None) -> Axis:
    axis = Axis(objective, 0.0, 1.0)
    ends: list[float] = []
    for configuration in front.configurations:
        estimate = axis.get_estimate(configuration)
        # Only these have error bars, so only theirs need room.
        has_bar = configuration.is_on_front or configuration in front.baselines
        reach = estimate.se if has_bar else 0.0
        ends += [estimate.mean - reach, estimate.mean + reach]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    margin = PADDING * (high - low) or 0.05 * abs(high) or 0.5
    return Axis(objective, low - margin, high + margin)


def _build_panel(front: Front, x: Axis, y: Axis, constraints: Mapping[str, Constraint]) -> Panel:
    points = {c.first: _build_point(c, x, y) for c in front.configurations}
    obstacles = front.configurations
    if len(obstacles) > CROWDED:
        step = 1 + len(front.members) // CROWDED
        obstacles = (*front.members, *front.baselines)[::step]
    parents = [
        (points[merge.first].xy, points[parent.first].xy)
        for merge in front.members
        if merge.role == "merge"
        for parent in find_parents(front, merge)
    ]
    bounds: list[tuple[str, float]] = []
    for side, axis in (("x", x), ("y", y)):
        bound = constraints.get(axis.objective.name) if axis.objective else None
        if bound is not None and axis.low < bound.limit < axis.high:
            bounds.append((side, bound.limit))
    return Panel(
        x,
        y,
        points=tuple(points.values()),
        staircase=_build_staircase(front, x, y),
        parents=tuple(parents),
        bounds=tuple(bounds),
        labels=tuple((points[c.first], text) for c, text in _list_labels(front, x, y)),
        obstacles=tuple(points[c.first] for c in obstacles),
    )


def _build_point(configuration: Configuration, x: Axis, y: Axis) -> Point:
    role, mode = configuration.role, get_mode(configuration.params)
    layer: Layer = "member" if configuration.is_on_front else "dominated"
    group, mark = style.CANDIDATES.get(role) or (mode, style.get_mark(mode))
    fill = style.PAPER if configuration.is_provisional else mark.color
    if role == "untrained" or role == "published":
        layer, (group, mark) = role, style.BASELINES[role]
        fill = mark.color if role == "untrained" else fill
    elif not configuration.feasible:
        layer = "violating"
    estimates = x.get_estimate(configuration), y.get_estimate(configuration)
    return Point(configuration, *estimates, layer, group, mark, fill)


def _build_staircase(front: Front, x: Axis, y: Axis) -> tuple[XY, ...]:
    """Return steps from the left to the bottom edge; what lies below and left is dominated."""
    if x.objective is None or y.objective is None:
        return ()
    ranked = [c for c in front.configurations if c.rank >= 0]
    points = [(x.get_estimate(c).mean, y.get_estimate(c).mean) for c in ranked]
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


def _list_labels(front: Front, x: Axis, y: Axis) -> list[tuple[Configuration, str]]:
    goals = [axis.objective for axis in (y, x) if axis.objective is not None]
    titles = [("chosen", front.chosen)]
    # With one objective the knee is the best point, so naming both would say nothing.
    titles += [("knee", front.knee)] if len(goals) > 1 else []
    titles += [(name_extreme(goal), front.extremes.get(goal.name)) for goal in goals]
    lines: dict[int, tuple[Configuration, list[str]]] = {}
    for title, configuration in titles:
        if configuration is not None:
            lines.setdefault(configuration.first, (configuration, []))[1].extend(
                wrap(title, MAX_LETTERS)
            )
    return [(configuration, "\n".join(texts)) for configuration, texts in lines.values()]
