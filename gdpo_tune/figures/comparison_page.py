"""The page of a comparison: the verdict in a sentence, then its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from gdpo_tune.analysis.comparison import Comparison
from gdpo_tune.analysis.verdict import Verdict
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.text import (
    abbreviate_parameter,
    format_duration,
    format_estimate,
    format_number,
)
from gdpo_tune.figures.comparison_figures import draw_sides, draw_superiority
from gdpo_tune.figures.html_page import build_bullets, build_page, build_section, embed_figure
from gdpo_tune.figures.html_tables import build_table

_WHY = (
    "A difference is significant if two conditions hold. First, p is at most .04 in a permutation "
    "test, which assigns configurations to the sides at random; it is corrected for all tests on "
    "this page. Second, the 95 % interval excludes equality. Of two equal searches at most one "
    "pair in twenty is called different in anything; docs/comparison.md has the measured rates."
)
_SIDES = (
    "Strong: not dominated within its own side in these two objectives. Background: the side whose "
    "front reaches there more often when its configurations are resampled; the more often, the "
    "stronger."
)
_SUPERIORITY = (
    "How often a configuration of one side is better than one of the other, over all pairs, with "
    "95 % intervals. The dashed line at one half is no difference."
)


def write_comparison(
    comparison: Comparison, verdict: Verdict, notes: Sequence[str], path: Path
) -> Path:
    """Write the page and return its path, in a directory that exists; it appears whole or not."""
    title = f"{comparison.left.name} against {comparison.right.name}"
    headline = f'<p class="verdict">{escape(verdict.headline)}</p>'
    head = f"<header><h1>{escape(title)}</h1>{headline}</header>"
    sections = [build_section("Why", _WHY, build_bullets(verdict.reasons))]
    if notes:
        sections.append(build_section("Limitations", "", build_bullets(notes)))
    if len(comparison.left.objectives) > 1:
        sides = embed_figure(
            draw_sides(comparison), "sides", "Trade-offs", stacks=True, min_width=300
        )
        sections.append(build_section("Trade-offs", _SIDES, sides))
    if comparison.superiority:
        effects = embed_figure(draw_superiority(comparison), "effects", "Objectives")
        sections.append(build_section("Objectives", _SUPERIORITY, effects))
    heads = ["side", "configurations", "stopped early", "failed trials", "on its front", "time"]
    heads.append(f"hypervolume of {comparison.count}")
    heads += [f"best {abbreviate_parameter(name)}" for name in comparison.best]
    rows: list[str] = []
    volumes = comparison.hypervolumes
    for index, side in enumerate((comparison.left, comparison.right)):
        counts = (side.tried_count, side.stopped, side.failed, len(side.front))
        cells = [side.name, *map(str, counts), format_duration(side.seconds)]
        cells.append(format_number(volumes[index], abs(volumes[0] - volumes[1])))
        cells += [format_estimate(pair[index]) for pair in comparison.best.values()]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    table = build_table("sides", map(escape, heads), rows, "The two sides")
    sections.append(build_section("The two sides", "", table))
    write_atomically(path, build_page(title, head, sections))
    return path
