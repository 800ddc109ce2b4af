"""Places of the few labels inside a panel, so that they hide neither points nor one another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
from adjustText import adjust_text
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.transforms import Bbox, IdentityTransform

from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.figures.front_panels import Panel

DPI = 72
"""At this resolution a point is a pixel, so every length below is in both."""
STARTS = list(product((8.0, 30.0), (1, 0, -1), (1, 0, -1)))
"""Distance and direction (up, right) from which the search for positions starts, in this order."""
ITERATIONS = 20
"""Steps from one start. With a limit of time, labels would depend on the machine's speed."""
CLASH = 5
"""Points that a label would rather cover than another label."""


def place_labels(
    panel: Panel, size: tuple[float, float], font_size: float, radius: float
) -> list[tuple[float, float]]:
    """Return the offset (right, up) of each label's middle from its point, in points.

    adjustText pushes texts away from points and from one another, and may get stuck in a cloud of
    points. So it starts from several sides: the first places without an overlap are taken, else
    those with the fewest. Equal input gives equal places. The panel's obstacles are kept free.

    All lengths are in points; `size` is width and height of the panel, `radius` half the size of a
    mark with some space around it.
    """
    if not panel.labels:
        return []
    figure = Figure(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), frameon=False)
    pixels = IdentityTransform()
    texts = [
        axes.text(0, 0, text, ha="center", va="center", fontsize=font_size, transform=pixels)
        for _, text in panel.labels
    ]
    anchors = np.array([panel.get_position(c) for c, _ in panel.labels]) * size
    points = np.array([panel.get_position(point) for point in panel.obstacles]) * size
    squares = [Bbox([point - radius, point + radius]) for point in points]
    halves = [np.array(text.get_window_extent().size) / 2 for text in texts]
    best, least = anchors, np.inf
    for distance, up, right in STARTS:
        for text, anchor, half in zip(texts, anchors, halves, strict=True):
            text.set_position(anchor + (right, up) * (half + distance))
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


def _count_overlaps(labels: Sequence[Bbox], anchors: Floats, squares: Sequence[Bbox]) -> int:
    """Return how many points labels cover, and `CLASH` for each label that touches another one.

    The line from a label to its point belongs to the label.
    """
    covered = sum(label.count_overlaps(squares) for label in labels)
    clashes = 0
    for (label, anchor), (other, _) in permutations(zip(labels, anchors, strict=True), 2):
        line = Path([anchor, label.get_points().mean(axis=0)])
        clashes += label.overlaps(other) or line.intersects_bbox(other)
    return covered + CLASH * clashes
