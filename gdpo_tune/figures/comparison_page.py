"""The page of a comparison: the verdict in words, then what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from gdpo_tune.analysis.comparison import Comparison
from gdpo_tune.analysis.sides import Side
from gdpo_tune.analysis.verdict import Verdict
from gdpo_tune.core.files import write_whole
from gdpo_tune.core.formatting import abbreviate, format_duration, format_estimate, format_number
from gdpo_tune.core.trials import Estimate
from gdpo_tune.figures.front_table import html_table
from gdpo_tune.figures.html_page import bullets, drawing, page, section
from gdpo_tune.figures.paired_fronts import effects_figure, sides_figure


def write_comparison(
    comparison: Comparison, verdict: Verdict, notes: Sequence[str], path: Path
) -> Path:
    """Write the page and return where it is; it appears whole or not at all.

    Args:
        comparison: what was measured.
        verdict: what it comes to.
        notes: what limits it.
        path: its folder exists.
    """
    left, right = comparison.left.name, comparison.right.name
    title = f"{left} against {right}"
    told = f'<p class="verdict">{escape(verdict.headline)}</p>'
    head = f"<header><h1>{escape(title)}</h1>{told}</header>"
    sections = [section("Why", _WHY, bullets(verdict.reasons))]
    if notes:
        sections.append(section("What limits this", "", bullets(notes)))
    if len(comparison.objectives) > 1:
        sections.append(section("Trade-offs", _SIDES, drawing(sides_figure(comparison), "sides")))
    sections.append(section("Objectives", _EFFECTS, drawing(effects_figure(comparison), "effects")))
    sections.append(section("The two sides", "", _table(comparison)))
    footer = "Equal sweeps give an equal page."
    write_whole(path, page(title, head, sections, footer))
    return path


_WHY = (
    "A difference is called only where the test says that luck in dealing out the same trials to "
    "two sides would rarely make it as large (p at most .04, corrected for all tests on this "
    "page), and where the interval agrees. Of two equal searches at most one pair in twenty is "
    "called different in anything; docs/comparison.md has the measured rates."
)
_SIDES = (
    "Strong: not dominated by its own side in these two objectives. Ground: the side whose front "
    "reaches there more often when its configurations are drawn again, the stronger the more often."
)
_EFFECTS = (
    "How often a configuration of one side is better than one of the other, over all pairs, with "
    "95 % intervals. Half, the dashed line, is no difference."
)


def _table(comparison: Comparison) -> str:
    rows = [
        _row(side, volume)
        for side, volume in zip(
            (comparison.left, comparison.right), comparison.hypervolumes, strict=True
        )
    ]
    heads = ["side", "configurations", "stopped early", "failed trials", "on its front", "time"]
    heads.append(f"hypervolume of {comparison.count}")
    for name in comparison.best:
        heads.append(f"best {abbreviate(name)}")
    cells = [
        [
            format_estimate(
                Estimate(found.left, found.left_error)
                if place == 0
                else Estimate(found.right, found.right_error)
            )
            for found in comparison.best.values()
        ]
        for place in (0, 1)
    ]
    return html_table(
        "sides",
        map(escape, heads),
        [
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in [*row, *more]) + "</tr>"
            for row, more in zip(rows, cells, strict=True)
        ],
    )


def _row(side: Side, volume: float) -> list[str]:
    return [
        side.name,
        str(side.tried),
        str(side.stopped),
        str(side.failed),
        str(len(side.front)),
        format_duration(side.seconds),
        format_number(volume),
    ]
