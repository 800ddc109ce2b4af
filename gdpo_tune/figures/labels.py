"""Where the few texts inside a panel go, so that they hide neither points nor one another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 0.57, 1.36
"""Of a character and of a line, as shares of the font size."""
RADII = (20.0, 32.0, 46.0, 62.0, 80.0)
FORBIDDEN = 1000.0
"""Cost of a square pixel beyond the panel or near another label; covering a point costs 1.5."""
APART = 0.8
"""Free space around a label as a share of the font size: nearer, two of them read as one."""
DOT = 6.0
"""Half the side of a point."""
CROSSING = 150.0
"""Cost of a line from a text to its point that runs over another point."""
ANGLES = tuple(math.radians(degrees) for degrees in (45, 90, 0, 20, 70, 135, 315, 180, 225, 270))
"""Right and up first: better values lie there, so there is nothing behind a front."""


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels from the lower left corner of the panel."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """Shared area in square pixels."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)

    def grown(self, margin: float) -> Box:
        """The rectangle with a margin on all sides, in pixels."""
        return Box(self.left - margin, self.bottom - margin, self.right + margin, self.top + margin)

    @property
    def area(self) -> float:
        """In square pixels."""
        return (self.right - self.left) * (self.top - self.bottom)


def arrange(
    anchors: Sequence[tuple[float, float]],
    texts: Sequence[str],
    obstacles: Sequence[tuple[float, float]],
    size: tuple[float, float],
    font: float,
) -> list[tuple[float, float]]:
    """Offset of each text's centre from its anchor, in pixels, up and right positive.

    Args:
        anchors: the points that the texts speak of, in pixels from the lower left corner.
        texts: one for each anchor.
        obstacles: points that are better not covered, nor crossed on the way, in the same pixels.
        size: width and height of the panel in pixels.
        font: font size in pixels.
    """
    whole = Box(0.0, 0.0, *size)
    taken: list[Box] = []  # with the free space around them
    offsets: list[tuple[float, float]] = []
    dots = [Box(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in obstacles]
    for (x, y), text in zip(anchors, texts, strict=True):
        others = [(a - x, b - y) for a, b in obstacles if math.dist((a, b), (x, y)) > DOT]
        half = len(text) * WIDTH * font / 2
        candidates = [
            (_inside(x + dx, half, size[0]) - x, dy)
            for radius in RADII
            for dx, dy in (_candidate(radius, angle, text, font) for angle in ANGLES)
        ]
        boxes = [_box(x + dx, y + dy, text, font) for dx, dy in candidates]
        costs = [
            FORBIDDEN * (box.area - box.overlap(whole))
            + FORBIDDEN * sum(box.overlap(other) for other in taken)
            + 1.5 * sum(box.overlap(dot) for dot in dots)
            + CROSSING * sum(_runs_over(offset, other) for other in others)
            + 6 * math.hypot(*offset)
            + index
            for index, (box, offset) in enumerate(zip(boxes, candidates, strict=True))
        ]
        chosen = costs.index(min(costs))
        taken.append(boxes[chosen].grown(APART * font))
        offsets.append(candidates[chosen])
    return offsets


def _candidate(radius: float, angle: float, text: str, font: float) -> tuple[float, float]:
    # The text's near end, not its centre, is to lie at the radius.
    half = len(text) * WIDTH * font / 2
    return (math.cos(angle) * (radius + half), math.sin(angle) * radius)


def _inside(center: float, half: float, width: float) -> float:
    """The nearest centre at which a text lies within the panel, as far as it fits at all."""
    return min(max(center, half), max(width - half, half))


def _runs_over(end: tuple[float, float], point: tuple[float, float]) -> bool:
    """Whether the line from the origin to `end` touches a dot around `point`."""
    along = (end[0] * point[0] + end[1] * point[1]) / (end[0] ** 2 + end[1] ** 2)
    nearest = min(max(along, 0.0), 1.0)
    return math.dist((nearest * end[0], nearest * end[1]), point) < DOT


def _box(x: float, y: float, text: str, font: float) -> Box:
    half = len(text) * WIDTH * font / 2
    return Box(x - half, y - HEIGHT * font / 2, x + half, y + HEIGHT * font / 2)
