"""The report of a sweep, and the page of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from markupsafe import Markup

from gdpo_tune.analysis.comparison import Comparison
from gdpo_tune.analysis.convergence import measure_agreements
from gdpo_tune.analysis.front import (
    Front,
    find_untrained,
    grade_against_untrained,
    name_extreme,
    subtract_estimates,
    summarize_origins,
)
from gdpo_tune.analysis.importance import describe_findings
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.errors import TaskFileError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.metrics import COST_METRICS, MetricInfo
from gdpo_tune.core.settings import STRICT
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_duration,
    format_estimate,
    format_first,
    format_hypervolume,
    format_interval,
    format_number,
    format_parameter,
    format_percent,
)
from gdpo_tune.core.trial_files import read_completions
from gdpo_tune.core.trials import Estimate, TrialRecord, format_parts, title_candidate
from gdpo_tune.figures.comparison_figures import draw_sides, draw_superiority
from gdpo_tune.figures.front_png import draw_front_svg
from gdpo_tune.figures.gallery import Gallery, build_gallery
from gdpo_tune.figures.html import build_page, embed_data, embed_figure, get_parts
from gdpo_tune.figures.timeline import describe_utilisation
from gdpo_tune.results.comparison_report import Verdict
from gdpo_tune.results.front_table import build_front_row, list_rows, title_policy
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.wording import (
    ORIGINS,
    REPORT_FILE,
    capitalize_warning,
    describe_content,
    describe_left_out_prompts,
    describe_states,
    describe_work,
    list_incidents,
    measure_wall_time,
)

CHOOSE = "Policies to choose from"
COMPLETIONS = "Sample completions"
CAPTIONS = {
    CHOOSE: (
        "Set limits on what you would accept. Policies that miss them fade in the figure and in "
        "the table, and the card below describes the best one left. Click a point or a name to see "
        "its card."
    ),
    COMPLETIONS: (
        "All policies have the same test prompts, drawn at random. One completion per prompt, "
        "sampled at the temperature of the evaluation, with its scores."
    ),
    "Warnings": "What to check before you trust the result, and what would help.",
    "Front uncertainty": (
        "Attainment surfaces: the front recomputed 200 times, resampling each mean. Each line "
        "bounds what that share of the recomputed fronts attains in these two objectives. Where "
        "the lines are close together, the front is well known. Grey dots: the means."
    ),
    "Which parameters mattered": (
        "Share of the variance between trials that involves a parameter, alone or together with "
        "others, over the whole search space (total Sobol index). Shares of parameters that act "
        "together overlap; the rest is noise. Bars: 95 % intervals. Strong: clear effect. Medium: "
        "unclear. Pale: no detectable effect."
    ),
    "Parameters and objectives": (
        "One line per configuration, coloured by normalization mode. Drag along an axis to keep "
        "the lines that pass there; click the axis to clear."
    ),
    "Each parameter against each objective": (
        "One point per configuration; the other parameters vary too. Large points are on the front."
    ),
    "Progress": (
        "Hypervolume of the front after each trial, against fixed references: by trials, by time "
        "and by compute. It falls where a replicate corrects a lucky first trial."
    ),
    "Training curves": (
        "Running means over five steps. Strong lines: trials on the front. A dead group has equal "
        "rewards throughout, so the policy learns nothing from it."
    ),
    "Validation scores during training": (
        "Strong lines: trials on the front. A cross: stopped early."
    ),
    "Share of the training signal": (
        "How much each reward contributed: |weight * standard deviation|, divided by the sum over "
        "rewards, averaged over the steps. A large front is shown in part."
    ),
    "Population": (
        "Parameters of each member during training, coloured by mode. Strong lines: on the front. "
        "A dot: the member copied the weights and parameters of another one. Tables show the "
        "initial values; schedule.json in a member's directory lists the values that its policy "
        "was trained with."
    ),
    "Origins of the front": (
        "How much final policies, earlier checkpoints and merges each contribute. Hypervolume: of "
        "this row and the rows above. Share: what this row adds to the total. Cost: of all trials "
        "of this kind, on the front or not."
    ),
    "Failures": "Trials that ended without a result. The front and the search ignore them.",
    "Node losses and retries": (
        "Lost nodes and failed attempts. Each trial resumed from its latest checkpoint. A lost "
        "node does not count as a failure of its trials."
    ),
    "All trials": "★: on the front. Click a heading to sort.",
}
"""Title of a section -> its caption, if it has one."""
READING_THE_FIGURE = (
    "Figure: right and up is better. Filled: two or more seeds. Hollow: one seed, provisional. "
    "Faded: dominated, or beyond your limits. Small cross: violates a constraint. Dotted line: a "
    "constraint. Bars: one standard error. A policy on the front can lie below the line of a "
    "panel, because it is better in another objective."
)
READING_THE_TABLE = (
    "Table: means over seeds on test prompts ± one standard error. With one seed the noise of "
    "training is unknown: the policy is provisional, and its error is at least the spread between "
    "seeds elsewhere in the sweep. Card: 95 % intervals. P(front): probability of being on the "
    "front, given means and standard errors."
)
WHY = (
    "A difference is significant if two conditions hold. First, p is at most .04 in a permutation "
    "test, which assigns configurations to the sides at random; it is corrected for all tests on "
    "this page. Second, the 95 % interval excludes equality. Of two equal searches at most one "
    "pair in twenty is called different in anything; docs/comparison.md has the measured rates."
)
SIDES = (
    "Strong: not dominated within its own side in these two objectives. Background: the side whose "
    "front reaches there more often when its configurations are resampled; the more often, the "
    "stronger."
)
SUPERIORITY = (
    "How often a configuration of one side is better than one of the other, over all pairs, with "
    "95 % intervals. The dashed line at one half is no difference."
)
FIGURES = {
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
MIN_WIDTHS = {"pairs": 300, "surfaces": 300, "slices": 700, "progress": 700, "all": 700}
"""Pixels below which a figure with many panels scrolls instead of shrinking."""
STEPS = 50
"""Least steps of a slider."""
MAX_POLICIES = 40
"""Policies with sample completions: baselines, the knee and the extremes first."""
MOST_NAMED = 12
"""Policies that are named where completions are missing."""


def write_report(sweep: Sweep, path: Path | None = None) -> Path:
    """Write the interactive report and return its path; it appears whole or not at all.

    Default of `path`: `report.html` in the sweep's directory.

    Raises:
        OSError: the file cannot be written.
    """
    target = path or sweep.spec.directory / REPORT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, build_report(sweep))
    return target


def build_report(sweep: Sweep) -> str:
    """Return the whole page, plotly.js included once; equal records give an equal page."""
    front, gallery, parts = sweep.front, build_gallery(sweep), get_parts()
    findings, limits = map(parts.bullets, describe_findings(front, sweep.effects))
    warnings = [capitalize_warning(str(each)) for each in sweep.warnings]
    completions = build_completions(front)
    dimensions = [name for name in sweep.spec.space.dimensions if name != "normalization"]
    goals = [goal.name for goal in front.objectives]
    failed = (r for r in front.records if r.state == "failed")
    losses = [
        (f"{datetime.fromtimestamp(incident.time).astimezone():%Y-%m-%d %H:%M:%S}", str(incident))
        for incident in list_incidents(sweep.sessions)
    ]
    bodies = {
        CHOOSE: _build_answer(sweep, gallery, warnings, [COMPLETIONS] if completions else []),
        COMPLETIONS: completions,
        "Warnings": parts.bullets(warnings),
        "Findings": findings,
        "Limits of the data": limits,
        **{title: _embed(gallery, name, title) for name, title in FIGURES.items()},
        "Origins of the front": _build_origins(front),
        "Failures": parts.failures(
            [(title_candidate(r.name), r.reason or "no reason recorded") for r in failed]
        ),
        "Node losses and retries": parts.failures(losses),
        "All trials": parts.trials_table(front.records, dimensions, goals, front.trial_numbers),
        "About this sweep": parts.facts(_describe_sweep(sweep)),
    }
    bodies = {title: body for title, body in bodies.items() if body.strip()}
    captions = {**CAPTIONS, "Timeline": describe_utilisation(sweep.records, sweep.sessions)}
    sections = [parts.section(t, captions.get(t, ""), body) for t, body in bodies.items()]
    answers = [title for title in (CHOOSE, COMPLETIONS) if title in bodies]
    contents = {"": answers, "Evidence": [title for title in bodies if title not in answers]}
    head = Markup("<header><h1>{}</h1>{}</header>").format(
        sweep.spec.name, parts.facts(_describe_head(sweep))
    )
    title = f"{sweep.spec.name}: Pareto front"
    return build_page(title, head, sections, _describe_age(sweep.records), contents)


def _describe_age(records: Sequence[TrialRecord]) -> str:
    """Return the age of the content; the time of drawing would make equal pages differ."""
    times = [time for r in records for time in (r.started, r.finished) if time is not None]
    if not times:
        return "Before the first trial."
    latest = datetime.fromtimestamp(max(times)).astimezone()
    return f"The last trial started or ended at {latest:%Y-%m-%d %H:%M %Z}."


def _describe_head(sweep: Sweep) -> dict[str, str]:
    spec, chosen = sweep.spec, sweep.chosen
    complete, others = describe_states(sweep.records)
    return {
        "task": spec.task,
        "policy": spec.policy,
        "scoring": "" if spec.scoring == STRICT else spec.scoring,
        "constraints": ", ".join(f"{name} {bound}" for name, bound in spec.constraints.items()),
        "trials": f"{complete} complete" + (f", {others}" if others else ""),
        "wall-clock time": format_duration(measure_wall_time(sweep.records)),
        "ended": sweep.ending,
        "chosen": "; ".join(chosen.lines) if chosen else "",
    }


def _describe_sweep(sweep: Sweep) -> dict[str, str]:
    """Return the facts about a sweep that a reader of the front can do without."""
    spec, front = sweep.spec, sweep.front
    work = describe_work(front.records, spec.resources.trials_per_process, "trials")
    completions = sum(record.cost.completions for record in front.records)
    provisional = sum(member.is_provisional for member in front.members)
    points = ", ".join(f"{goal.name} {goal.reference:g}" for goal in front.objectives)
    return {
        "directory": spec.address or str(spec.directory.absolute()),
        "identity": spec.compute_identity(),
        "on the front": f"{len(front.members)}, {provisional} provisional",
        "hypervolume": format_hypervolume(front.hypervolume, front.hypervolume_interval, points),
        "cost": f"{work}, {completions:,} completions",
        "do early scores predict final ones?": "; ".join(
            map(str, measure_agreements(front.records, front.objectives))
        ),
        "changes": describe_content(front.records),
        "prompts too long, left out": describe_left_out_prompts(front.records),
    }


def _build_answer(
    sweep: Sweep, gallery: Gallery, warnings: Sequence[str], links: Sequence[str]
) -> Markup:
    """Return the first screen: figure, controls, table, and the cards with their `links`."""
    front, parts, answer = sweep.front, get_parts(), Markup("")
    if front.knee_shortfall:  # the first warning is about the knee, which the page selects
        answer += Markup('<p class="warning">{}</p>').format(warnings[0])
    names = [abbreviate_parameter(goal.name) for goal in front.objectives]
    table = parts.front_table(names, list_rows(front), len(front.members))
    if front.members:
        table += Markup(
            "<details><summary>How to read this</summary><p>{}</p><p>{}</p></details>"
        ).format(READING_THE_FIGURE, READING_THE_TABLE)
    table = Markup("<div>{}</div>").format(table)
    if panel := build_choose_panel(sweep):
        table = Markup('<div class="choice">{}{}</div>').format(panel, table)
    still = draw_front_svg(front, sweep.spec.name) if "pairs" in gallery else ""
    return answer + _embed(gallery, "pairs", CHOOSE, still) + table + build_cards(sweep, links)


def _embed(gallery: Gallery, name: str, title: str, still: str = "") -> Markup:
    """Return a figure as HTML; empty if there is no data for it."""
    if name not in gallery:
        return Markup("")
    return embed_figure(
        gallery[name](),
        name,
        title,
        buttons=name != "all",
        min_width=MIN_WIDTHS.get(name, 560),
        stacks=name in ("pairs", "surfaces"),
        still=still,
    )


def _build_origins(front: Front) -> Markup:
    """Return one row per kind of candidates; empty for a sweep with final policies alone."""
    heads = ["candidates", "trials", "on the front", "hypervolume", "share"]
    heads += ["completions in training", "completions in evaluations", "CPU time"]
    rows = [
        [
            *(ORIGINS[origin.kind], origin.trials, origin.members),
            *(format_number(origin.hypervolume), format_percent(origin.share)),
            *(f"{origin.cost.completions:,}", f"{origin.cost.evaluation_completions:,}"),
            format_duration(origin.cost.cpu_seconds),
        ]
        for origin in summarize_origins(front)
    ]
    parts = get_parts()
    return parts.plain_table("origins", heads, "Origins of the front", rows) if rows else Markup("")


# The panel that chooses a policy. The page applies it as `--pick` does: `results.picks` and
# assets/choice.js follow the same rules.


@dataclass(frozen=True)
class Slider:
    """Acceptable values of one metric."""

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
    extremes = {
        f"{'max' if goal.direction == 'maximize' else 'min'} {goal.name}": name_extreme(goal)
        for goal in front.objectives
    }
    return {"knee": "knee (best compromise)", **extremes}


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
    """Return a card for each member, baseline and the chosen one; the page shows the selected one.

    `links` are titles of sections that tell more about it.
    """
    front = sweep.front
    try:
        ranges = load_task_info(sweep.spec.task, sweep.spec.space.domains).metrics
    except TaskFileError:  # its file is gone, so intervals stay whole
        ranges = {}
    shown = (*front.members, *front.baselines, *([front.chosen] if front.chosen else []))
    cards = [
        get_parts().card(
            build_front_row(front, policy, ties=True),
            policy is not (front.chosen or front.knee),
            _list_values(front, policy, ranges),
            _describe_policy(sweep, policy),
            policy.numbers,
            _list_commands(_get_location(sweep), policy),
            links,
        )
        for policy in {c.name: c for c in shown}.values()
    ]
    return (
        Markup('<div id="cards">{}</div>').format(Markup("").join(cards)) if cards else Markup("")
    )


def _list_values(
    front: Front, policy: Configuration, ranges: Mapping[str, MetricInfo]
) -> list[tuple[Any, ...]]:
    """Return each metric with its 95 % interval, and the difference to the untrained policy."""
    untrained = find_untrained(front.baselines)
    goals = [goal.name for goal in front.objectives]
    rows: list[tuple[Any, ...]] = []
    for name in (*goals, *sorted(policy.mean.keys() - set(goals))):
        own, info = policy.mean[name], ranges.get(name)
        base = untrained.mean.get(name) if untrained and untrained is not policy else None
        low, high = (info.low, info.high) if info else (-math.inf, math.inf)
        row = (name, _format_interval(own, low, high), NO_VALUE, None)
        if base is not None:
            gain = _format_interval(subtract_estimates(own, base), sign="+")
            row = (*row[:2], format_number(base.mean), gain)
        rows.append(row)
    return rows


def _format_interval(
    estimate: Estimate, low: float = -math.inf, high: float = math.inf, sign: str = ""
) -> tuple[str, str]:
    """Return the mean and its interval, which ends where the metric does."""
    ends = max(low, estimate.low), min(high, estimate.high)
    mean = f"{sign * (estimate.mean > 0)}{format_number(estimate.mean, ends[1] - ends[0])}"
    return mean, format_interval(*ends)


def _describe_policy(sweep: Sweep, policy: Configuration) -> dict[str, Any]:
    """Return the trials, the searched parameters or the parts, and the checkpoint."""
    facts: dict[str, Any] = {}
    if policy.role == "merge":
        facts["merge of"] = format_parts(policy.parts)
    if policy.role != "untrained":
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


def _list_commands(location: str, policy: Configuration) -> dict[str, str]:
    """Return the commands that train, export or merge a policy again.

    Each has `{pick}` where the page writes the choice: a rule, or the name of the candidate.
    """
    export = f"python -m gdpo_tune.export {location} --to {{}} --pick {{pick}}"
    if policy.role == "untrained":
        return {}
    if policy.role != "merge":
        train = f"python -m gdpo_tune.train --from {location} --pick {{pick}}"
        return {"Train again": train, "Export": export.replace("{}", "trl")}
    weights = ",".join(f"{p.trial}@{p.step}={p.weight!r}" for p in policy.parts)
    heaviest = max(policy.parts, key=lambda part: part.weight)
    parent = f"{location} --pick {heaviest.trial}@{heaviest.step}"
    return {
        "Merge again": f"python -m gdpo_tune.merge {location} --weights {weights}",
        "Train its main parent": f"python -m gdpo_tune.train --from {parent}",
        "Export": export.replace("{}", "mergekit"),
    }


def build_completions(front: Front) -> Markup:
    """Return sample completions: a row per prompt, a column per policy, the untrained one first.

    Every trial keeps completions of the same prompts. Empty if none were kept.
    """
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
    return get_parts().completions(columns, format_first(missing, MOST_NAMED))


# Comparisons


def write_comparison(
    comparison: Comparison, verdict: Verdict, notes: Sequence[str], path: Path
) -> Path:
    """Write the page and return its path, in a directory that exists; it appears whole or not."""
    parts = get_parts()
    title = f"{comparison.left.name} against {comparison.right.name}"
    head = Markup('<header><h1>{}</h1><p class="verdict">{}</p></header>')
    sections = [parts.section("Why", WHY, parts.bullets(verdict.reasons))]
    if notes:
        sections.append(parts.section("Limitations", "", parts.bullets(notes)))
    if len(comparison.left.objectives) > 1:
        figure = draw_sides(comparison)
        sides = embed_figure(figure, "sides", "Trade-offs", stacks=True, min_width=300)
        sections.append(parts.section("Trade-offs", SIDES, sides))
    if comparison.probability_of_superiority:
        effects = embed_figure(draw_superiority(comparison), "effects", "Objectives")
        sections.append(parts.section("Objectives", SUPERIORITY, effects))
    heads = ["side", "configurations", "stopped early", "failed trials", "on its front", "time"]
    heads.append(f"hypervolume of {comparison.count}")
    heads += [f"best {abbreviate_parameter(name)}" for name in comparison.best]
    volumes = comparison.hypervolumes
    rows = [
        [
            *(side.name, side.tried_count, side.stopped, side.failed, len(side.front)),
            *(
                format_duration(side.seconds),
                format_number(volumes[index], abs(volumes[0] - volumes[1])),
            ),
            *(format_estimate(pair[index]) for pair in comparison.best.values()),
        ]
        for index, side in enumerate((comparison.left, comparison.right))
    ]
    table = parts.plain_table("sides", heads, "The two sides", rows)
    sections.append(parts.section("The two sides", "", table))
    write_atomically(path, build_page(title, head.format(title, verdict.headline), sections))
    return path
