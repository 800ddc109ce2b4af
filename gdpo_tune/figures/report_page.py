"""The report of a sweep, the figures that it has, and the page of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any, Literal, NamedTuple

# plotly uses pandas if it is in `sys.modules`, even while the tracking thread has imported only a
# part of it. This import waits until pandas is complete.
import pandas as pandas
import plotly.graph_objects as go
from markupsafe import Markup

from gdpo_tune.analysis.front import (
    Front,
    find_untrained,
    grade_against_untrained,
    name_extreme,
    subtract_estimates,
    summarize_origins,
)
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.errors import TaskFileError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.metrics import COST_METRICS, MetricInfo
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.task_info import STRICT
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_duration,
    format_first,
    format_hypervolume,
    format_interval,
    format_number,
    format_parameter,
)
from gdpo_tune.core.trial_files import read_completions
from gdpo_tune.core.trials import (
    HALVED,
    UNSHARED,
    WITHOUT_ENGINE,
    Estimate,
    format_parts,
    title_candidate,
)
from gdpo_tune.figures import trial_curves
from gdpo_tune.figures.comparison_figures import draw_sides, draw_superiority
from gdpo_tune.figures.front_plotly import draw_pairs
from gdpo_tune.figures.front_png import draw_front_svg
from gdpo_tune.figures.html import build_page, embed_data, embed_figure, get_parts
from gdpo_tune.figures.parameter_figures import (
    draw_effects,
    draw_parallel,
    draw_slices,
    list_sliced,
)
from gdpo_tune.results import wording
from gdpo_tune.results.comparison_report import ComparisonReport
from gdpo_tune.results.front_table import build_front_row, list_rows, title_policy
from gdpo_tune.results.open_sweep import Sweep

CHOOSE = "Policies to choose from"
COMPLETIONS = "Sample completions"
FIGURES = {
    "effects": "Which parameters mattered",
    "all": "Parameters and objectives",
    "slices": "Each parameter against each objective",
    "progress": "Progress",
    "training": "Training curves",
    "rungs": "Validation scores during training",
}
"""Name of a figure -> title of its section."""

STEPS = 50
"""Least steps of a slider."""
MAX_POLICIES = 40
"""Policies with sample completions: baselines, the knee and the extremes first."""
MAX_NAMED = 12
"""Policies that are named where completions are missing."""


def write_report(sweep: Sweep, path: Path | None = None) -> Path:
    """Write `report.html` in the sweep's directory, or `path`, whole or not; return the path."""
    target = path or sweep.spec.directory / wording.REPORT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, build_report(sweep))
    return target


def build_report(sweep: Sweep) -> str:
    """Return the whole page, plotly.js included once; equal records give an equal page."""
    front, gallery, parts = sweep.front, build_gallery(sweep), get_parts()
    findings, limits = map(parts.bullets, wording.describe_findings(front, sweep.effects))
    warnings = [wording.capitalize_warning(str(each)) for each in sweep.warnings]
    completions = build_completions(front)
    still = draw_front_svg(front, sweep.spec.name) if "pairs" in gallery else ""
    dimensions = [name for name in sweep.spec.space.dimensions if name != "normalization"]
    goals = [goal.name for goal in front.objectives]
    failures = [
        (title_candidate(record.name), record.reason or "no reason recorded")
        for record in front.records
        if record.state == "failed"
    ]
    losses = [
        (f"{datetime.fromtimestamp(incident.time).astimezone():%Y-%m-%d %H:%M:%S}", str(incident))
        for incident in wording.list_incidents(sweep.sessions)
    ]
    bodies = {
        CHOOSE: parts.answer(
            # The first warning is about the knee, which the page selects.
            warnings[0] if front.knee_shortfall else "",
            embed_figure(gallery["pairs"](), "pairs", CHOOSE, still) if still else "",
            build_choose_panel(sweep),
            parts.front_table(goals, list_rows(front), len(front.members)),
            build_cards(sweep, [COMPLETIONS] if completions else []),
        ),
        COMPLETIONS: completions,
        "Warnings": parts.bullets(warnings),
        "Findings": findings,
        "Limits of the data": limits,
        **{t: embed_figure(gallery[n](), n, t) for n, t in FIGURES.items() if n in gallery},
        "Origins of the front": parts.origins(summarize_origins(front)),
        "Failures": parts.failures(failures),
        "Node losses and retries": parts.failures(losses),
        "All trials": parts.trials_table(front.records, dimensions, goals, front.trial_numbers),
        "About this sweep": parts.facts(_describe_sweep(sweep)),
    }
    bodies = {title: body for title, body in bodies.items() if body.strip()}
    sections = [parts.section(title, body) for title, body in bodies.items()]
    answers = [title for title in (CHOOSE, COMPLETIONS) if title in bodies]
    contents = {"": answers, "Evidence": [title for title in bodies if title not in answers]}
    head = parts.header(sweep.spec.name, _describe_head(sweep))
    # The age of the content: the time of drawing would make equal pages differ.
    times = [t for r in sweep.records for t in (r.started, r.finished) if t is not None]
    age = "Before the first trial."
    if times:
        latest = datetime.fromtimestamp(max(times)).astimezone()
        age = f"The last trial started or ended at {latest:%Y-%m-%d %H:%M %Z}."
    return build_page(f"{sweep.spec.name}: Pareto front", head, sections, age, contents)


def build_gallery(sweep: Sweep) -> Mapping[str, Callable[[], go.Figure]]:
    """Return name -> function that draws it, for the figures that there is data for."""
    spec, front, records = sweep.spec, sweep.front, sweep.records
    dimensions, gpus = spec.space.dimensions, spec.resources.total_gpus
    steps = trial_curves.read_all_steps(records)
    trained = [c for c in front.configurations if c.is_training]
    drawers: dict[str, tuple[object, Callable[[], go.Figure]]] = {
        "pairs": (front.configurations, lambda: draw_pairs(front, spec.constraints, dimensions)),
        "all": (len(trained) > 1, lambda: draw_parallel(front, dimensions)),
        "effects": (
            any(math.isfinite(found.value) for found in sweep.effects.contrasts),
            lambda: draw_effects(sweep.effects),
        ),
        "slices": (list_sliced(front, dimensions), lambda: draw_slices(front, dimensions)),
        "progress": (
            front.hypervolume_over_trials,
            lambda: trial_curves.draw_hypervolume(front, gpus),
        ),
        "training": (steps, lambda: trial_curves.draw_learning(front, steps)),
        "rungs": (
            any(len(r.rungs) > 1 and r.is_training for r in records),
            lambda: trial_curves.draw_rungs(front),
        ),
    }
    return {name: draw for name, (data, draw) in drawers.items() if data}


def _describe_head(sweep: Sweep) -> dict[str, str]:
    spec, chosen = sweep.spec, sweep.chosen
    complete, others = wording.describe_states(sweep.records)
    return {
        "task": spec.task,
        "policy": spec.policy,
        "scoring": "" if spec.scoring == STRICT else spec.scoring,
        "constraints": ", ".join(f"{name} {bound}" for name, bound in spec.constraints.items()),
        "trials": f"{complete} complete" + (f", {others}" if others else ""),
        "wall-clock time": format_duration(wording.measure_wall_time(sweep.records)),
        "ended": sweep.ending,
        "chosen": "; ".join(chosen.lines) if chosen else "",
    }


def _describe_sweep(sweep: Sweep) -> dict[str, str]:
    spec, front = sweep.spec, sweep.front
    work = wording.describe_work(front.records, "trials")
    completions = sum(record.cost.completions for record in front.records)
    provisional = sum(member.is_provisional for member in front.members)
    points = ", ".join(f"{goal.name} {goal.reference:g}" for goal in front.objectives)
    return {
        "directory": spec.address or str(spec.directory.absolute()),
        "identity": spec.compute_identity(),
        "on the front": f"{len(front.members)}, {provisional} provisional",
        "hypervolume": format_hypervolume(front.hypervolume, front.hypervolume_interval, points),
        "cost": f"{work}, {completions:,} completions",
        "changes": wording.describe_content(front.records),
        "prompts too long, left out": wording.describe_left_out_prompts(front.records),
        "prompts computed with each completion": wording.count_notes(front.records, UNSHARED),
        "micro-batches made smaller, because memory ran out": wording.count_notes(
            front.records, HALVED
        ),
        "merges that vLLM has not sampled": wording.count_notes(front.records, WITHOUT_ENGINE),
    }


# The panel that chooses a policy. The page applies it as `--pick` does: `results.picks` and
# assets/choice.js follow the same rules.


class Slider(NamedTuple):
    """Control of the acceptable values of one metric."""

    name: str
    comparison: Literal[">=", "<="]
    low: float
    high: float
    step: float

    @property
    def loosest(self) -> float:
        """The end that every member satisfies; there the metric has no limit."""
        return self.low if self.comparison == ">=" else self.high

    @property
    def label(self) -> str:
        """Name of the control."""
        bound = "at least" if self.comparison == ">=" else "at most"
        return f"{abbreviate_parameter(self.name)} {bound}"


def list_sliders(sweep: Sweep) -> list[Slider]:
    """Return a slider per objective, and per constraint on another metric of the members.

    It goes over the members' values, its ends on whole steps.
    """
    front = sweep.front
    comparisons: dict[str, Literal[">=", "<="]] = {
        goal.name: ">=" if goal.direction == "maximize" else "<=" for goal in front.objectives
    }
    for name, constraint in sweep.spec.constraints.items():
        comparisons.setdefault(name, constraint.op)
    sliders: list[Slider] = []
    for name, comparison in comparisons.items():
        values = [member.mean[name].mean for member in front.members if name in member.mean]
        if values and all(map(math.isfinite, values)):
            span = (max(values) - min(values)) or abs(values[0]) or 1.0
            exponent = math.floor(math.log10(span / STEPS))
            step, digits = 10.0**exponent, max(0, -exponent)
            ends = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step
            sliders.append(Slider(name, comparison, *(round(x, digits) for x in (*ends, step))))
    return sliders


def list_preferences(front: Front) -> dict[str, str]:
    """Return rule of `--pick` -> its name in the panel."""
    return {"knee": "knee (best compromise)"} | {
        f"{goal.direction[:3]} {goal.name}": name_extreme(goal) for goal in front.objectives
    }


def build_choices(sweep: Sweep) -> dict[str, Any]:
    """Return what the page needs to choose as `--pick` does; values are unrounded means."""
    front = sweep.front
    return {
        "objectives": [{"name": g.name, "direction": g.direction} for g in front.objectives],
        "limits": [
            {
                "name": slider.name,
                "comparison": slider.comparison,
                "loosest": slider.loosest,
                # A merge has no costs of training.
                "merges": slider.name not in COST_METRICS,
            }
            for slider in list_sliders(sweep)
        ],
        "members": [
            {
                "name": member.name,
                "values": {n: e.mean for n, e in member.mean.items() if math.isfinite(e.mean)},
                "keeps": grade_against_untrained(member, front.baselines, front.objectives),
            }
            for member in front.members
        ],
        "chosen": front.chosen.name if front.chosen else None,
    }


def build_choose_panel(sweep: Sweep) -> Markup:
    """Return the controls with their data; empty while the front is empty."""
    if not sweep.front.members:
        return Markup("")
    choices, preferences = embed_data(build_choices(sweep)), list_preferences(sweep.front)
    return get_parts().choose(list_sliders(sweep), preferences, _get_location(sweep), choices)


def _get_location(sweep: Sweep) -> str:
    return quote(str(sweep.spec.address or sweep.spec.directory.absolute()))


# Cards


def build_cards(sweep: Sweep, links: Sequence[str] = ()) -> Markup:
    """Return a card for each member, baseline and the chosen one, with `links` to sections."""
    front = sweep.front
    try:
        ranges = load_task_info(sweep.spec.task, sweep.spec.space.domains).metrics
    except TaskFileError:  # its file is gone, so intervals stay whole
        ranges = {}
    shown = (*front.members, *front.baselines, *([front.chosen] if front.chosen else []))
    cards = (
        get_parts().card(
            build_front_row(front, policy, ties=True),
            policy is not (front.chosen or front.knee),
            _list_values(front, policy, ranges),
            _describe_policy(sweep, policy),
            _list_commands(sweep, policy),
            links,
        )
        for policy in {c.name: c for c in shown}.values()
    )
    return Markup("").join(cards)


def _list_values(
    front: Front, policy: Configuration, ranges: Mapping[str, MetricInfo]
) -> list[tuple[Any, ...]]:
    untrained = find_untrained(front.baselines)
    base = untrained.mean if untrained and untrained is not policy else {}
    goals = [goal.name for goal in front.objectives]
    rows: list[tuple[Any, ...]] = []
    for name in (*goals, *sorted(policy.mean.keys() - set(goals))):
        own, info = policy.mean[name], ranges.get(name)
        low, high = (info.low, info.high) if info else (-math.inf, math.inf)
        compared = (NO_VALUE, None)
        if name in base:
            gain = subtract_estimates(own, base[name], front.comparisons)
            compared = (format_number(base[name].mean), _format_interval(gain, sign="+"))
        rows.append((name, _format_interval(own, low, high), *compared))
    return rows


def _format_interval(
    estimate: Estimate, low: float = -math.inf, high: float = math.inf, sign: str = ""
) -> tuple[str, str]:
    """Return the mean and its interval, which ends where the metric does."""
    ends = max(low, estimate.low), min(high, estimate.high)
    mean = f"{sign * (estimate.mean > 0)}{format_number(estimate.mean, ends[1] - ends[0])}"
    return mean, format_interval(*ends)


def _describe_policy(sweep: Sweep, policy: Configuration) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if policy.role == "merge":
        facts["merge of"] = format_parts(policy.parts)
    if not policy.is_initial:
        facts |= {
            abbreviate_parameter(name): format_parameter(policy.params[name])
            for name in sweep.spec.space.dimensions
            if name in policy.params
        }
        facts["trials" if policy.seeds > 1 else "trial"] = policy.numbers
    if policy.rank >= 0:
        facts["P(front)"] = f"{policy.probability:.2f}"
    checkpoint = next((r.checkpoint for r in sweep.front.records if r.number == policy.first), None)
    return facts | ({"checkpoint": str(checkpoint)} if checkpoint is not None else {})


def _list_commands(sweep: Sweep, policy: Configuration) -> dict[str, str]:
    """Return commands with `{pick}` where the page writes a rule, or the name of the candidate."""
    location = _get_location(sweep)
    export = f"python -m gdpo_tune.export {location} --to {{}} --pick {{pick}}"
    if policy.is_initial:
        return {}
    train = f"python -m gdpo_tune.train --from {location} --pick {{pick}}"
    if policy.role != "merge":
        exports = {"Export": export.replace("{}", "trl")} if sweep.can_export else {}
        return {"Train again": train, **exports}
    weights = ",".join(f"{p.trial}@{p.step}={p.weight!r}" for p in policy.parts)
    return {
        "Merge again": f"python -m gdpo_tune.merge {location} --weights {weights}",
        "Train from its weights": train,
        "Export": export.replace("{}", "mergekit"),
    }


def build_completions(front: Front) -> Markup:
    """Return kept completions: a row per prompt, a column per policy, the untrained one first."""
    directories = {record.number: record.directory for record in front.records}
    first = [p for p in (find_untrained(front.baselines), front.chosen, front.knee) if p]
    shown = (*first, *front.extremes.values(), *front.baselines, *front.members)
    columns: list[tuple[Configuration, bool, str, Mapping[str, Any]]] = []
    missing: list[str] = []
    for policy in {policy.name: policy for policy in shown}.values():
        directory, title = directories[policy.numbers[0]], title_policy(policy)
        kept = {s.prompt: s for s in read_completions(directory)} if directory else {}
        if kept and len(columns) < MAX_POLICIES:
            columns.append((policy, build_front_row(front, policy).stands_out, title, kept))
        else:
            missing.append(title)
    if not columns:
        return Markup("")
    prompts = dict.fromkeys(prompt for *_, kept in columns for prompt in kept)
    return get_parts().completions(prompts, columns, format_first(missing, MAX_NAMED))


# Comparisons


def write_comparison(report: ComparisonReport) -> None:
    """Write the page as `report.file`, in a directory that exists; it appears whole or not."""
    comparison, verdict, parts = report.comparison, report.verdict, get_parts()
    bodies = {"Why": parts.bullets(verdict.reasons)}
    if report.notes:
        bodies["Limitations"] = parts.bullets(report.notes)
    if len(comparison.left.objectives) > 1:
        bodies["Trade-offs"] = embed_figure(draw_sides(comparison), "sides", "Trade-offs")
    if comparison.probability_of_superiority:
        effects = draw_superiority(comparison)
        bodies["Objectives"] = embed_figure(effects, "effects", "Objectives")
    bodies["The two sides"] = parts.sides(comparison)
    title = f"{comparison.left.name} against {comparison.right.name}"
    sections = [parts.section(name, body) for name, body in bodies.items()]
    page = build_page(title, parts.header(title, {}, verdict.headline), sections)
    write_atomically(report.file, page)
