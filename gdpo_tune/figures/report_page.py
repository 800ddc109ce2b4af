"""All pictures of a sweep in one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.findings import reading
from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core.files import write_whole
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures.front_table import front_table
from gdpo_tune.figures.gallery import effects_of, gallery
from gdpo_tune.figures.header import header
from gdpo_tune.figures.html_page import bullets, drawing, page, section
from gdpo_tune.figures.incidents import incidents_list
from gdpo_tune.figures.samples import samples
from gdpo_tune.figures.timeline import utilisation
from gdpo_tune.figures.trials_table import failures, trials_table
from gdpo_tune.results.summary import REPORT, Choice

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def write_report(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    path: Path | None = None,
    *,
    ending: str = "",
    chosen: Choice | None = None,
    sessions: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the interactive report and return where it is.

    The file appears whole or not at all, so a reader never meets half of one.

    Args:
        spec: the sweep.
        records: all its trials; there may be none.
        path: default: `report.html` in the sweep's folder.
        ending: why nothing was left to run, if so.
        chosen: what a person chose.
        sessions: which processes worked on the sweep, as `Ledger.sessions` has them.

    Raises:
        OSError: the file cannot be written.
    """
    target = path or spec.directory / REPORT
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, report_html(spec, records, ending, chosen, sessions))
    return target


def report_html(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    ending: str = "",
    chosen: Choice | None = None,
    sessions: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The whole page, plotly.js included once; equal records give an equal page."""
    front = build_front(records, spec.objective_list(), chosen and chosen.number)
    sections = _sections(spec, front, sessions)
    return page(
        f"{spec.name}: Pareto front",
        header(spec, front, ending, chosen),
        sections,
        _age(records),
    )


def _age(records: Sequence[TrialRecord]) -> str:
    """How old the content is; when it was drawn says less, and no two pages would be equal."""
    times = [time for r in records for time in (r.started, r.finished) if time is not None]
    if not times:
        return "Before the first trial."
    latest = datetime.fromtimestamp(max(times)).astimezone()
    return f"The last trial started or ended at {latest:%Y-%m-%d %H:%M %Z}."


def _sections(spec: SweepSpec, front: Front, sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    dimensions, found = spec.space.dimensions, effects_of(spec, front)
    drawn = {
        name: drawing(draw(), name, buttons=name != "all", narrowest=_NARROWEST.get(name, 560))
        for name, draw in gallery(spec, front, found).items()
    }
    known, unknown = reading(front, found)
    failed = any(record.state == "failed" for record in front.records)
    parts = [
        ("Trade-offs", _PAIRS, drawn.get("pairs")),
        ("In words", "What moved what.", bullets(known) if known else None),
        ("What the data cannot tell", "", bullets(unknown) if unknown else None),
        ("The front", _FRONT, front_table(front, dimensions)),
        ("How sure the border is", _SURFACES, drawn.get("surfaces")),
        ("From parameters to objectives", _PARALLEL, drawn.get("all")),
        ("Importance of each parameter", _IMPORTANCE, drawn.get("importance")),
        ("Slices", _SLICES, drawn.get("slices")),
        ("Progress", _PROGRESS, drawn.get("progress")),
        ("Effective share of each reward", _SHARES, drawn.get("shares")),
        ("Training", _LEARNING, drawn.get("training")),
        ("Rungs", _RUNGS, drawn.get("rungs")),
        ("Population", _POPULATION, drawn.get("population")),
        ("What the policies say", _SAMPLES, samples(front)),
        ("Timeline", utilisation(front.records, sessions), drawn.get("timeline")),
        ("Failures", _FAILURES, failures(front) if failed else None),
        ("What happened", _INCIDENTS, incidents_list(sessions)),
        ("All trials", _TRIALS, trials_table(front, dimensions)),
    ]
    return [section(title, caption, body) for title, caption, body in parts if body]


_NARROWEST = {"pairs": 900, "surfaces": 900, "slices": 800, "progress": 760, "all": 760}
"""Pixels below which a figure with many panels scrolls instead of shrinking."""
_SURFACES = (
    "Attainment surfaces: every mean is drawn anew with its standard error, 200 times. What lies "
    "below and left of a line is attained by that share of the fronts so drawn, in these two "
    "objectives. Where the lines run together the border is well known. Grey: the means."
)
_IMPORTANCE = (
    "Share of an objective's variance over configurations that a parameter explains, among what "
    "the other parameters leave, by a linear model with squares (logarithms where a parameter "
    "spans a factor of 5). Bars: 95 %. Pale: no effect is told from noise. Interactions are not "
    "looked at."
)
_SLICES = (
    "Each configuration by one parameter and one objective; everything else varies too. Large: on "
    "the front."
)
_RUNGS = (
    "What trials were worth on validation prompts on the way. Strong: trials of the front. Cross: "
    "stopped there."
)
_SAMPLES = (
    "Completions of the front's policies on the first test prompts, with what they were judged. "
    "Sampled at temperature 1, one a prompt, not chosen."
)
_FRONT = (
    "Configurations that no other one beats, by their means over seeds on test prompts ± one "
    "standard error. With one seed a configuration's own noise of training is unknown: its place "
    "is provisional, and its error at least the spread of seeds elsewhere in the sweep. P(front): "
    "the probability of a place on the front, given means and standard errors. Best: ahead by more "
    "than noise; ahead: another one may be as good."
)
_PAIRS = (
    "Better is right and up. Filled: two seeds or more. Hollow: one seed, provisional. Faded: "
    "dominated. Small cross: breaks a constraint. Dotted line: a constraint. Bars: one standard "
    "error. A member of the front may lie below the line of a panel, because it is ahead in "
    "another objective. Point at a mark for all its values; click a name to hide it."
)
_PARALLEL = (
    "One line a configuration, in the colour of its normalization mode. Drag along an axis to keep "
    "the lines that pass there; click the axis to let go."
)
_PROGRESS = (
    "Hypervolume of the front, against fixed references, after each trial: by trials, by time, and "
    "by the work in them. It falls where a replicate corrects a lucky first trial. The interval "
    "above takes off what luck adds to it."
)
_SHARES = (
    "Share of the training signal that each reward gave, |weight * standard deviation| over their "
    "sum, mean over the steps. A long front is thinned."
)
_LEARNING = (
    "Running means over five steps. Strong: trials of the front. A dead group has equal rewards "
    "throughout and teaches nothing."
)
_POPULATION = (
    "Values of each member over its steps, in the colour of its mode. Strong: on the front. Dot: "
    "it took over another one's training and parameters. Tables show the values that members began "
    "with; schedule.json in a member's folder has the one training that its policy comes from."
)
_FAILURES = (
    "Trials that ended without a result. They count neither for the front nor for the search."
)
_INCIDENTS = (
    "Nodes that were lost and attempts at trials that failed. Each trial went on from its newest "
    "checkpoint. The loss of a node counts as no failure of a trial."
)
_TRIALS = "★ is on the front. Click a heading to sort."
