"""All figures of a sweep in one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.effects import estimate_effects
from gdpo_tune.analysis.findings import describe_findings
from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures.gallery import build_gallery
from gdpo_tune.figures.html_page import build_bullets, build_page, build_section, embed_figure
from gdpo_tune.figures.html_tables import (
    build_front_table,
    build_origins_table,
    build_trials_table,
)
from gdpo_tune.figures.report_texts import (
    build_head,
    build_samples,
    list_failures,
    list_node_losses,
)
from gdpo_tune.figures.timeline import describe_utilisation
from gdpo_tune.results.dimensions import list_dimensions
from gdpo_tune.results.summary import REPORT_FILE, ChosenTrial

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

_MIN_WIDTHS = {"pairs": 900, "surfaces": 900, "slices": 800, "progress": 760, "all": 760}
"""Pixels below which a figure with many panels scrolls instead of shrinking."""
_PAIRS = (
    "Better is right and up. Filled: two or more seeds. Hollow: one seed, provisional. Faded: "
    "dominated. Small cross: violates a constraint. Thin line: from a merge to its parents. Dotted "
    "line: a constraint. Bars: one standard error. A member of the front can lie below the line of "
    "a panel, because it is better in another objective. Hover for details; click a name to hide "
    "it."
)
_FRONT = (
    "Configurations that no other one dominates. Values are means over seeds on test prompts ± one "
    "standard error. With one seed the noise of training is unknown: the configuration is "
    "provisional, and its error is at least the spread of seeds elsewhere in the sweep. P(front): "
    "probability of being on the front, given means and standard errors. Tied: the difference is "
    "within noise."
)
_ORIGINS = (
    "What the front owes to ends of trainings, to their checkpoints, and to merges. Hypervolume: "
    "of the candidates in this row and the rows above. Share: what this row adds, of the whole. "
    "Cost: of all trials of the kind, on the front or not."
)
_SURFACES = (
    "Attainment surfaces: front recomputed 200 times, resampling each mean. A line bounds what "
    "that share of the recomputed fronts attains, in these two objectives. Where the lines are "
    "close together, the front is well known. Grey: the means."
)
_PARALLEL = (
    "One line per configuration, in the colour of its normalization mode. Drag along an axis to "
    "keep the lines that pass there; click the axis to clear."
)
_IMPORTANCE = (
    "Share of the variance between trials that involves a parameter, alone or together with "
    "others, over the whole search space (total Sobol index). Shares of parameters that act "
    "together overlap; noise has the rest. Bars: 95 % intervals. Strong: a clear effect. Medium: "
    "unclear. Pale: no detectable effect, the interval includes what noise alone gives."
)
_SLICES = (
    "Each configuration by one parameter and one objective; the other parameters vary too. Large: "
    "on the front."
)
_PROGRESS = (
    "Hypervolume of the front, against fixed references, after each trial: by trials, by time and "
    "by compute. It falls where a replicate corrects a lucky first trial. The interval at the top "
    "of the page corrects for this optimism."
)
_SHARES = (
    "Share of the training signal that each reward gave: |weight * standard deviation|, divided by "
    "the sum over rewards, mean over the steps. A long front is thinned."
)
_LEARNING = (
    "Running means over five steps. Strong: trials on the front. A dead group has equal rewards "
    "throughout and teaches nothing."
)
_RUNGS = "Validation scores during training. Strong: trials on the front. Cross: stopped early."
_POPULATION = (
    "Values of each member over its steps, in the colour of its mode. Strong: on the front. Dot: "
    "the member copied the training state and parameters of another one. Tables show the initial "
    "values; schedule.json in a member's directory has the values that its policy was trained with."
)
_SAMPLES = (
    "Completions of the untrained policy and of the front's policies, with their scores. All have "
    "the same test prompts, drawn at random. One completion per prompt, sampled at temperature 1."
)
_FAILURES = "Trials that ended without a result. The front and the search ignore them."
_NODE_LOSSES = (
    "Nodes that were lost and attempts that failed. Each trial resumed from its newest "
    "checkpoint. A lost node does not count as a failure of its trials."
)
_TRIALS = "★: on the front. Click a heading to sort."


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
    sections = _build_sections(spec, front, sessions)
    return build_page(f"{spec.name}: Pareto front", head, sections, _describe_age(records))


def _describe_age(records: Sequence[TrialRecord]) -> str:
    """Return the age of the content; the time of drawing would make equal pages differ."""
    times = [time for r in records for time in (r.started, r.finished) if time is not None]
    if not times:
        return "Before the first trial."
    latest = datetime.fromtimestamp(max(times)).astimezone()
    return f"The last trial started or ended at {latest:%Y-%m-%d %H:%M %Z}."


def _build_sections(
    spec: SweepSpec, front: Front, sessions: Sequence[Mapping[str, Any]]
) -> list[str]:
    dimensions = spec.space.dimensions
    effects = estimate_effects(front, list_dimensions(spec.space))
    figures = {
        name: embed_figure(
            draw(), name, buttons=name != "all", min_width=_MIN_WIDTHS.get(name, 560)
        )
        for name, draw in build_gallery(spec, front, effects).items()
    }
    findings, limits = map(build_bullets, describe_findings(front, effects))
    utilisation = describe_utilisation(front.records, sessions)
    parts = [
        ("Trade-offs", _PAIRS, figures.get("pairs")),
        ("Findings", "What parameters do, and which configurations lead.", findings),
        ("Limits of the data", "", limits),
        ("The front", _FRONT, build_front_table(front, dimensions)),
        ("Origins of the front", _ORIGINS, build_origins_table(front)),
        ("Front uncertainty", _SURFACES, figures.get("surfaces")),
        ("From parameters to objectives", _PARALLEL, figures.get("all")),
        ("Which parameters mattered", _IMPORTANCE, figures.get("importance")),
        ("Slices", _SLICES, figures.get("slices")),
        ("Progress", _PROGRESS, figures.get("progress")),
        ("Effective share of each reward", _SHARES, figures.get("shares")),
        ("Training", _LEARNING, figures.get("training")),
        ("Rungs", _RUNGS, figures.get("rungs")),
        ("Population", _POPULATION, figures.get("population")),
        ("Sample completions", _SAMPLES, build_samples(front)),
        ("Timeline", utilisation, figures.get("timeline")),
        ("Failures", _FAILURES, list_failures(front.records)),
        ("Node losses and retries", _NODE_LOSSES, list_node_losses(sessions)),
        ("All trials", _TRIALS, build_trials_table(front, dimensions)),
    ]
    return [build_section(title, caption, body) for title, caption, body in parts if body]
