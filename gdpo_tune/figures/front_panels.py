"""Scatters of a front: panels of points, lines and labels, before any library draws.

`front_figure` draws a panel with plotly and with matplotlib, so HTML and PNG cannot disagree. Every
axis points towards better values: that of a minimised objective is reversed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from textwrap import wrap
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from adjustText import adjust_text
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from gdpo_tune.analysis.front import Front, find_parents, name_extreme
from gdpo_tune.analysis.pareto import Floats, rank_points
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import get_mode
from gdpo_tune.core.trials import Estimate, Objective
from gdpo_tune.figures import style

if TYPE_CHECKING:
    from gdpo_tune.spec.model import Constraint


Layer = Literal["violating", "dominated", "member", "published", "start", "untrained"]
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
        return "trial" if self.objective is None else style.title_axis(self.objective)

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


class LayerStyle(NamedTuple):
    """Look of a layer: lengths in pixels (HTML) and in points (PNG)."""

    pixels: float
    points: float
    edge_pixels: float
    edge_points: float
    opacity: float
    order: int
    """The higher one covers the lower one."""


LOOKS: Mapping[Layer, LayerStyle] = {
    "violating": LayerStyle(6, 3.5, 1.2, 0.9, 0.55, 2),
    "dominated": LayerStyle(8, 5, 1.2, 0.9, 0.35, 3),
    "member": LayerStyle(11, 7, 2, 1.5, 1.0, 4),
    "published": LayerStyle(15, 13, 1.2, 0.9, 1.0, 5),
    "start": LayerStyle(10, 7.5, 0.0, 0.6, 1.0, 4),
    "untrained": LayerStyle(10, 7.5, 0.0, 0.6, 1.0, 4),
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
    goals = [axis.objective for axis in (y, x) if axis.objective is not None]
    titles = [("chosen", front.chosen)]
    # With one objective the knee is the best point, so naming both would say nothing.
    titles += [("knee", front.knee)] if len(goals) > 1 else []
    titles += [(name_extreme(goal), front.extremes.get(goal.name)) for goal in goals]
    labels: dict[int, list[str]] = {}
    for title, configuration in titles:
        if configuration is not None:
            labels.setdefault(configuration.first, []).extend(wrap(title, MAX_LETTERS))
    return Panel(
        x,
        y,
        points=tuple(points.values()),
        staircase=_build_staircase(front, x, y),
        parents=tuple(parents),
        bounds=tuple(bounds),
        labels=tuple((points[first], "\n".join(lines)) for first, lines in labels.items()),
        obstacles=tuple(points[c.first] for c in obstacles),
    )


def _build_point(configuration: Configuration, x: Axis, y: Axis) -> Point:
    role = configuration.role
    layer: Layer = "member" if configuration.is_on_front else "dominated"
    group, mark = style.get_configuration_mark(configuration)
    fill = style.PAPER if configuration.is_provisional else mark.color
    if role == "untrained" or role == "start" or role == "published":
        layer, (group, mark) = role, style.BASELINES[role]
        fill = mark.color if configuration.is_initial else fill
    elif not configuration.feasible:
        layer, fill = "violating", mark.color
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


DPI = 72
"""At this resolution a point is a pixel, so every length below is in both."""
STARTS = list(product((8.0, 30.0), (1, 0, -1), (1, 0, -1)))
"""Distance and direction (up, right) from which the search for positions starts, in this order."""
ITERATIONS = 20
"""Steps from one start. With a limit of time, labels would depend on the machine's speed."""
OVERLAP_COST = 5
"""Points that a label would rather cover than another label."""


def place_labels(
    panel: Panel, size: tuple[float, float], font_size: float, radius: float
) -> list[tuple[float, float]]:
    """Return the offset (right, up) of each label's middle from its point, in points.

    adjustText pushes texts away from points and from one another, and may get stuck in a cloud of
    points. So it starts from several sides: the first places without an overlap are taken, else
    those with the fewest. All lengths are in points; `size` is width and height of the panel,
    `radius` half the size of a mark with some space around it.
    """
    if not panel.labels:
        return []
    figure = Figure(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    texts = [_MeasuredText(figure.text(0, 0, text, fontsize=font_size)) for _, text in panel.labels]
    anchors = np.array([panel.get_position(c) for c, _ in panel.labels]) * size
    points = np.array([panel.get_position(point) for point in panel.obstacles]) * size
    squares = [Bbox([point - radius, point + radius]) for point in points]
    best, least = anchors, np.inf
    for distance, up, right in STARTS:
        for text, anchor in zip(texts, anchors, strict=True):
            text.set_position(anchor + (right, up) * (text.half + distance))
        adjust_text(
            texts,
            objects=squares,
            target_x=anchors[:, 0],
            target_y=anchors[:, 1],
            avoid_self=False,
            prevent_crossings=False,  # its swaps may push a label over the edge
            iter_lim=ITERATIONS,
            ax=axes,
        )
        middles = np.array([text.get_position() for text in texts])
        cost = _count_overlaps([text.get_window_extent() for text in texts], anchors, squares)
        if cost < least:
            best, least = middles, cost
        if not cost:
            break
    return [(float(x), float(y)) for x, y in best - anchors]


class _MeasuredText(Text):
    """A text that is moved, never drawn: laid out once, since each move would do so again."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.half = np.array(text.get_window_extent().size) / 2
        text.remove()

    def get_window_extent(self, *_: object, **__: object) -> Bbox:
        middle = np.array(self.get_position())
        return Bbox([middle - self.half, middle + self.half])


def _count_overlaps(labels: Sequence[Bbox], anchors: Floats, squares: Sequence[Bbox]) -> int:
    """Count points under labels; a label on another one or its line costs `OVERLAP_COST` points."""
    covered = sum(label.count_overlaps(squares) for label in labels)
    clashes = 0
    for (label, anchor), (other, _) in permutations(zip(labels, anchors, strict=True), 2):
        line = Path([anchor, label.get_points().mean(axis=0)])
        clashes += label.overlaps(other) or line.intersects_bbox(other)
    return covered + OVERLAP_COST * clashes
