"""All figures of a sweep in one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.findings import describe_findings
from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures.captions import (
    CAPTIONS,
    CHOOSE,
    COMPLETIONS,
    READING_THE_FIGURE,
    READING_THE_TABLE,
)
from gdpo_tune.figures.choose_panel import build_choose_panel
from gdpo_tune.figures.completions_grid import build_completions
from gdpo_tune.figures.front_png import draw_front_svg
from gdpo_tune.figures.gallery import Gallery, build_gallery
from gdpo_tune.figures.html_page import (
    build_bullets,
    build_contents,
    build_page,
    build_section,
    embed_figure,
)
from gdpo_tune.figures.html_tables import build_front_table, build_origins_table, build_trials_table
from gdpo_tune.figures.policy_cards import build_cards
from gdpo_tune.figures.report_texts import (
    build_head,
    describe_sweep,
    list_failures,
    list_node_losses,
)
from gdpo_tune.figures.timeline import describe_utilisation
from gdpo_tune.results.dimensions import estimate_sweep_effects
from gdpo_tune.results.summary import REPORT_FILE, ChosenTrial
from gdpo_tune.results.warnings import capitalize_warning, list_result_warnings

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

_MIN_WIDTHS = {"pairs": 300, "surfaces": 300, "slices": 700, "progress": 700, "all": 700}
"""Pixels below which a figure with many panels scrolls instead of shrinking."""
_FIGURES = {
    "surfaces": "Front uncertainty",
    "importance": "Which parameters mattered",
    "all": "Parameters and objectives",
    "slices": "Each parameter against each objective",
    "progress": "Progress",
    "training": "Training curves",
    "rungs": "Validation scores during training",
    "shares": "Share of the training signal",
    "population": "Population",
    "timeline": "Timeline",
}
"""Name of a figure in the gallery -> title of its section."""


def write_report(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    path: Path | None = None,
    *,
    ending: str = "",
    chosen: ChosenTrial | None = None,
    sessions: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the interactive report and return its path; it appears whole or not at all.

    Default of `path`: `report.html` in the sweep's directory. `ending` says why nothing was left to
    run, if so; `sessions` are as `Ledger.get_sessions` returns them.

    Raises:
        OSError: the file cannot be written.
    """
    target = path or spec.directory / REPORT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, build_report(spec, records, ending, chosen, sessions))
    return target


def build_report(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    ending: str = "",
    chosen: ChosenTrial | None = None,
    sessions: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the whole page, plotly.js included once; equal records give an equal page."""
    front = build_front(records, spec.list_objectives(), chosen and chosen.name)
    head = build_head(spec, front, ending, chosen)
    bodies = {title: body for title, body in _build_bodies(spec, front, sessions).items() if body}
    captions = {**CAPTIONS, "Timeline": describe_utilisation(front.records, sessions)}
    sections = [build_section(title, captions[title], bodies[title]) for title in bodies]
    answers = [title for title in (CHOOSE, COMPLETIONS) if title in bodies]
    contents = build_contents(
        {"": answers, "Evidence": [title for title in bodies if title not in answers]}
    )
    title = f"{spec.name}: Pareto front"
    return build_page(title, head, sections, _describe_age(records), contents)


def _describe_age(records: Sequence[TrialRecord]) -> str:
    """Return the age of the content; the time of drawing would make equal pages differ."""
    times = [time for r in records for time in (r.started, r.finished) if time is not None]
    if not times:
        return "Before the first trial."
    latest = datetime.fromtimestamp(max(times)).astimezone()
    return f"The last trial started or ended at {latest:%Y-%m-%d %H:%M %Z}."


def _build_bodies(
    spec: SweepSpec, front: Front, sessions: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return title -> body of every section in order; empty where there is no data."""
    dimensions = spec.space.dimensions
    effects = estimate_sweep_effects(spec, front)
    gallery = build_gallery(spec, front, effects)
    findings, limits = map(build_bullets, describe_findings(front, effects))
    warnings = [capitalize_warning(str(each)) for each in list_result_warnings(spec, front)]
    completions = build_completions(front)
    links = [COMPLETIONS] if completions else []
    return {
        CHOOSE: _build_answer(spec, front, gallery, warnings, links),
        COMPLETIONS: completions,
        "Warnings": build_bullets(warnings),
        "Findings": findings,
        "Limits of the data": limits,
        **{title: _embed(gallery, name, title) for name, title in _FIGURES.items()},
        "Origins of the front": build_origins_table(front),
        "Failures": list_failures(front.records),
        "Node losses and retries": list_node_losses(sessions),
        "All trials": build_trials_table(front, dimensions),
        "About this sweep": describe_sweep(spec, front),
    }


def _build_answer(
    spec: SweepSpec, front: Front, gallery: Gallery, warnings: Sequence[str], links: Sequence[str]
) -> str:
    """Return the first screen: figure, controls, table, and the cards with their `links`."""
    # The first warning is about the knee, which the page selects.
    doubt = f'<p class="warning">{escape(warnings[0])}</p>' if front.knee_shortfall else ""
    legend = f"<details><summary>How to read this</summary><p>{READING_THE_FIGURE}</p>"
    legend += f"<p>{READING_THE_TABLE}</p></details>"
    panel = build_choose_panel(spec, front)
    table = f"<div>{build_front_table(front)}{legend if front.members else ''}</div>"
    still = draw_front_svg(front, spec.name) if "pairs" in gallery else ""
    figure = _embed(gallery, "pairs", CHOOSE, still)
    choice = f'<div class="choice">{panel}{table}</div>' if panel else table
    return f"{doubt}{figure}{choice}{build_cards(spec, front, links)}"


def _embed(gallery: Gallery, name: str, title: str, still: str = "") -> str:
    """Return a figure as HTML; empty if there is no data for it."""
    if name not in gallery:
        return ""
    return embed_figure(
        gallery[name](),
        name,
        title,
        buttons=name != "all",
        min_width=_MIN_WIDTHS.get(name, 560),
        stacks=name in ("pairs", "surfaces"),
        still=still,
    )
