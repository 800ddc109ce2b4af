"""All pictures of a sweep in one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.figures import REPORT, Choice
from gdpo_tune.figures.front_table import front_table
from gdpo_tune.figures.header import header
from gdpo_tune.figures.hypervolume import hypervolume_figure
from gdpo_tune.figures.learning import learning_figure
from gdpo_tune.figures.page import drawing, page, section
from gdpo_tune.figures.pairs import pairs_figure
from gdpo_tune.figures.parallel import is_drawable, parallel_figure
from gdpo_tune.figures.population import has_moved, population_figure
from gdpo_tune.figures.shares import shares_figure
from gdpo_tune.figures.steps import steps_of
from gdpo_tune.figures.trials_table import failures, trials_table
from gdpo_tune.files import write_whole
from gdpo_tune.trials import Measurement, TrialRecord

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def write_report(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    path: Path | None = None,
    *,
    ending: str = "",
    chosen: Choice | None = None,
) -> Path:
    """Write the interactive report and return where it is.

    The file appears whole or not at all, so a reader never meets half of one.

    Args:
        spec: the sweep.
        records: all its trials; there may be none.
        path: default: `report.html` in the sweep's folder.
        ending: why nothing was left to run, if so.
        chosen: what a person chose.

    Raises:
        OSError: the file cannot be written.
    """
    target = path or spec.directory / REPORT
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, report_html(spec, records, ending, chosen))
    return target


def report_html(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    ending: str = "",
    chosen: Choice | None = None,
) -> str:
    """The whole page, plotly.js included once; equal records give an equal page."""
    front = build_front(records, spec.objective_list(), chosen and chosen.number)
    sections = _sections(front, spec.space.dimensions, steps_of(records))
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


def _sections(
    front: Front, dimensions: Sequence[str], steps: dict[int, list[Measurement]]
) -> list[str]:
    sections: list[str] = []
    if front.configurations:
        sections.append(section("Trade-offs", _PAIRS, drawing(pairs_figure(front), "pairs")))
    sections.append(section("The front", _FRONT, front_table(front, dimensions)))
    if is_drawable(front.configurations):
        figure = parallel_figure(front, dimensions)
        sections.append(
            section(
                "From parameters to objectives", _PARALLEL, drawing(figure, "all", buttons=False)
            )
        )
    if front.hypervolume_over_trials:
        figure = hypervolume_figure(front)
        sections.append(section("Progress", _PROGRESS, drawing(figure, "progress")))
    if steps and front.members:
        sections.append(
            section(
                "Effective share of each reward",
                _SHARES,
                drawing(shares_figure(front, steps), "shares"),
            )
        )
    if steps:
        figure = learning_figure(front, steps)
        sections.append(section("Training", _LEARNING, drawing(figure, "training")))
    if has_moved(front.records):
        figure = population_figure(front)
        sections.append(section("Population", _POPULATION, drawing(figure, "population")))
    if any(record.state == "failed" for record in front.records):
        sections.append(section("Failures", _FAILURES, failures(front)))
    sections.append(section("All trials", _TRIALS, trials_table(front, dimensions)))
    return sections


_FRONT = (
    "Configurations that no other one beats, by their means over seeds on test prompts ± one "
    "standard error. With one seed a configuration's own noise of training is unknown: its place "
    "is provisional, and its error at least the spread of seeds elsewhere in the sweep. P(front): "
    "the probability of a place on the front, given means and standard errors. Best: ahead by more "
    "than noise; ahead: another one may be as good."
)
_PAIRS = (
    "Better is right and up. Filled: two seeds or more. Hollow: one seed, provisional. Faded: "
    "dominated. Small cross: breaks a constraint. Bars: one standard error. A member of the front "
    "may lie below the line of a panel, because it is ahead in another objective. Point at a mark "
    "for all its values; click a name to hide it."
)
_PARALLEL = (
    "One line a configuration, in the colour of its normalization mode. Drag along an axis to keep "
    "the lines that pass there; click the axis to let go."
)
_PROGRESS = (
    "Hypervolume of the front, against fixed references, after each trial. It falls where a "
    "replicate corrects a lucky first trial. The interval above takes off what luck adds to it."
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
_TRIALS = "★ is on the front. Click a heading to sort."
