"""Comparison of two sweeps, or of two normalization modes of one sweep."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gdpo_tune.analysis.comparison import ALPHA, Arm, Comparison, Effect, build_arm, compare_arms
from gdpo_tune.analysis.effects import Effects
from gdpo_tune.analysis.uncertainty import format_share
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.core.text import format_count, format_list, format_percent, join_names, suggest
from gdpo_tune.core.trials import Objective
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.wording import describe_effects
from gdpo_tune.spec.model import list_decisive_values, list_differences

ENOUGH = 40
"""Trials of each arm with which a tenth more hypervolume is found: docs/comparison.md."""
LARGE_RATIO = 1.5
"""Ratio of two arms' sizes, or of their costs, above which a note points it out."""
Winner = Literal["left", "right", "mixed", "undecided", "equal", "too few"]
CLOSE = 0.1
"""Ratios within this share of 1, their intervals included, count as equal for practice."""


@dataclass(frozen=True)
class ComparisonReport:
    """Comparison with its verdict and notes."""

    comparison: Comparison
    verdict: Verdict
    notes: tuple[str, ...]
    """Other differences between the arms, and limits of the answer."""
    file: Path
    """File that the page is written to."""


def compare_sweeps(left: Sweep, right: Sweep) -> ComparisonReport:
    """Compare two sweeps; `.verdict` names the better one and the reasons.

    Raises:
        UsageError: tasks or objectives differ, both are one sweep, or one has no configuration yet.
    """
    one, other = left.spec, right.spec
    if one.directory.absolute() == other.directory.absolute():
        raise UsageError(f"{one.name} and {other.name} are the same sweep: name two")
    decisive, goals = [list_decisive_values(spec) for spec in (one, other)], one.list_objectives()
    fixed = ("task", "scoring", "objectives.")
    problems = list_differences(
        *({k: v for k, v in values.items() if k.startswith(fixed)} for values in decisive)
    )
    if not problems and goals != other.list_objectives():
        problems = ["objectives in another order"]
    if problems:
        raise UsageError(
            f"{one.name} cannot be compared with {other.name}: {'; '.join(problems)}. A "
            "comparison needs one task and scoring, and objectives with equal directions and "
            "references"
        )
    names = [spec.location if one.name == other.name else spec.name for spec in (one, other)]
    arms = [build_arm(n, s.records, goals) for n, s in zip(names, (left, right), strict=True)]
    for spec, values in zip((one, other), decisive, strict=True):
        search = spec.search.model_dump(mode="json", include={"sampler", "scheduler", "warm_start"})
        values |= {f"search.{name}": value for name, value in search.items()}
    notes = [f"{names[0]} has {line} as {names[1]}" for line in list_differences(*decisive)]
    changed = _list_changed_content(left, right)
    notes += [f"{names[1]} was run with another {fact}" for fact in changed]
    if notes:
        notes.insert(0, "The result is the effect of all these differences together:")
    if one.constraints != other.constraints:
        notes.append("Their constraints differ, so different trials count for their fronts.")
    file = one.directory / f"comparison_{other.name}.html"
    found = _compare_arms(arms[0], arms[1], notes, file)
    if not changed:
        return found
    text = f"{found.verdict.headline} But {format_list(changed)} changed between them."
    return replace(found, verdict=replace(found.verdict, headline=text))


def _list_changed_content(left: Sweep, right: Sweep) -> list[str]:
    """Return the names of facts in which the latest contents of two sweeps differ."""
    one, other = (
        sweep.contents[-1]["digests"] if sweep.contents else {} for sweep in (left, right)
    )
    return sorted(name for name in one.keys() & other.keys() if one[name] != other[name])


def compare_modes(sweep: Sweep, first: str, second: str) -> ComparisonReport:
    """Compare two normalization modes of one sweep; a UsageError says that it has no such two."""
    trials = [record for record in sweep.records if record.is_training]
    modes = sorted({str(record.params["normalization"]) for record in trials})
    for mode in (first, second):
        if mode not in modes:
            guess = "" if mode in NORMALIZATIONS else suggest(mode, NORMALIZATIONS)
            raise UsageError(
                f"--modes {first} {second}: {guess}{sweep.spec.name} has no trial with "
                f"normalization = {mode}; it has {join_names(modes) or 'none yet'}"
            )
    if first == second:
        raise UsageError(f"--modes {first} {second}: name two different modes")
    left, right = (
        build_arm(
            mode,
            [record for record in trials if record.params["normalization"] == mode],
            sweep.spec.list_objectives(),
            shared=True,
        )
        for mode in (first, second)
    )
    note = (
        "Both modes come from one search, which proposed more of what looked better. Objectives "
        f"are compared over the {len(left.independent)} and {len(right.independent)} "
        "configurations that no model proposed. Two sweeps with one mode each show more."
    )
    file = sweep.spec.directory / f"comparison_{first}_{second}.html"
    effects = _select_effects(sweep.effects, first, second)
    if effects.contrasts and not (left.tried_count and right.tried_count):
        answer = _judge_effects(effects, first, sweep.spec.list_objectives())
        return ComparisonReport(compare_arms(left, right), answer, (), file)
    found = _compare_arms(left, right, [*describe_effects(effects), note], file)
    is_short = found.verdict.winner == "too few" or not (left.trained and right.trained)
    if is_short and effects.contrasts:
        answer = _judge_effects(effects, first, sweep.spec.list_objectives())
        found = replace(found, verdict=answer)
    if found.comparison.probability_of_superiority and not is_short:
        return found
    spec = sweep.spec
    names = {mode: f"{spec.name}_{mode}" for mode in (first, second)}
    more = ["--set", f"search.trials={ENOUGH}", "--set", f"storage={spec.storage}"]
    if spec.search.is_divided:
        more += ["--set", "search.scheduler={type: fifo}"]
    begin = ["sweep", str(spec.directory / SPEC), "--name"]
    commands = [
        [*begin, name, "--set", f"space.normalization={mode}", *more]
        for mode, name in names.items()
    ]
    commands.append(["report", *(f"{spec.storage.rstrip('/')}/{n}" for n in names.values())])
    advice = (
        f"A sweep of {ENOUGH} trials for each mode is enough to find a difference of about 10 %:",
        *("python -m gdpo_tune." + shlex.join(words) for words in commands),
    )
    return replace(found, notes=(*found.notes, *advice))


def _select_effects(effects: Effects, first: str, second: str) -> Effects:
    """Return the effects of one mode against another, none if the data do not tell them."""
    kept = (
        found
        for found in effects.contrasts
        if found.dimension == "normalization" and {found.before, found.after} == {first, second}
        if math.isfinite(found.value)
    )
    return replace(effects, contrasts=tuple(kept))


def _judge_effects(effects: Effects, left: str, objectives: Sequence[Objective]) -> Verdict:
    """Return the verdict on two modes at the step at which most trainings were measured."""
    better: dict[str, list[str]] = {}
    maximized = {goal.name: goal.direction == "maximize" for goal in objectives}
    for found in effects.contrasts:
        if found.is_told_apart:
            is_after = (found.value > 0) == maximized[found.objective]
            better.setdefault(found.after if is_after else found.before, []).append(found.objective)
    parts = [f"{mode} is better in {format_list(names)}" for mode, names in better.items()]
    headline = (
        f"{effects.contrasts[0].before} and {effects.contrasts[0].after} cannot be told apart"
    )
    winner: Winner = "undecided"
    if parts:
        headline = " and ".join(parts)
        winner = "mixed" if len(better) > 1 else "left" if left in better else "right"
    text = f"At step {effects.step}, where most trainings were measured: {headline}."
    return Verdict(winner, text, tuple(describe_effects(effects)))


def _compare_arms(left: Arm, right: Arm, notes: Sequence[str], file: Path) -> ComparisonReport:
    for arm in (left, right):
        if not arm.tried_count:
            raise UsageError(
                f"{arm.name} cannot be compared: no configuration of it has ended yet. The "
                "untrained policy, a start, the published weights and failed trials do not count"
            )
    comparison = compare_arms(left, right)
    notes = (*notes, *_list_limits(left, right))
    return ComparisonReport(comparison, build_verdict(comparison), notes, file)


def _list_limits(left: Arm, right: Arm) -> list[str]:
    notes: list[str] = []
    fewer, more = sorted((left, right), key=lambda arm: arm.tried_count)
    if more.tried_count > LARGE_RATIO * fewer.tried_count:
        notes.append(
            f"{left.name} tried {left.tried_count} configurations, {right.name} "
            f"{right.tried_count}: hypervolumes are at {fewer.tried_count}, "
            "as a mean over random choices of that many."
        )
    if left.stopped or right.stopped:
        notes.append(
            f"{left.stopped} of {left.name} and {right.stopped} of {right.name} were stopped "
            "early: they add nothing to a front. Objectives are compared over those that ran to "
            "their end, which look better than all would."
        )
    cheap, costly = sorted((left, right), key=lambda arm: arm.completions / arm.tried_count)
    low, high = cheap.completions / cheap.tried_count, costly.completions / costly.tried_count
    if high > LARGE_RATIO * low:
        notes.append(
            f"A configuration of {costly.name} took {high:,.0f} completions on average, one of "
            f"{cheap.name} {low:,.0f}: hypervolumes are at equal numbers of configurations, not "
            "at equal cost."
        )
    single = [a.name for a in (left, right) if all(c.seeds < 2 for c in a.configurations)]
    if len(single) == 1:
        notes.append(
            f"{single[0]} has no replicates, so its hypervolume still contains luck and looks "
            "better."
        )
    notes += [
        f"{arm.name} has {format_count(arm.evaluations, 'trial')} of checkpoints and merges, "
        "which count with the trainings that they are made of."
        for arm in (left, right)
        if arm.evaluations
    ]
    failures = [(format_count(arm.failed, "trial"), arm) for arm in (left, right) if arm.failed]
    notes += [f"{trials} of {arm.name} failed and do not count." for trials, arm in failures]
    return notes


@dataclass(frozen=True)
class Verdict:
    """The better arm, and the reasons."""

    winner: Winner
    """`mixed`: each arm is better in something; `equal`: no difference that matters is likely."""
    headline: str
    reasons: tuple[str, ...]


def build_verdict(comparison: Comparison) -> Verdict:
    """Return the verdict; of pairs of equal searches, at most 5 % get a significant difference."""
    left, right = comparison.left.name, comparison.right.name
    if comparison.smallest_p > ALPHA:
        text = (
            f"Too few trials to compare {left} with {right}: {comparison.left.tried_count} and "
            f"{comparison.right.tried_count}. No difference, however large, could be significant. "
            f"It takes at least {comparison.least_size} of each."
        )
        return Verdict("too few", text, ())  # figures would be taken for a finding
    reasons = tuple(_list_reasons(comparison))
    better: dict[str, Literal["left", "right"]] = {
        name: "left" if effect.value > 0.5 else "right"
        for name, effect in comparison.probability_of_superiority.items()
        if _is_significant(effect, 0.5)
    }
    if _is_significant(comparison.ratio, 1.0):
        first, other = (left, right) if comparison.ratio.value > 1 else (right, left)
        winner: Winner = "left" if comparison.ratio.value > 1 else "right"
        against = sorted(name for name, arm in better.items() if arm != winner)
        but = f", but is worse in {format_list(against)}" if against else ""
        text = f"{first} beats {other}: its front covers more{but}."
        return Verdict("mixed" if against else winner, text, reasons)
    if better:
        parts = [
            f"{name} is better in {format_list(sorted(n for n, s in better.items() if s == arm))}"
            for arm, name in (("left", left), ("right", right))
            if arm in better.values()
        ]
        text = f"{' and '.join(parts)}; no significant difference in what the fronts cover."
        arms = set(better.values())
        return Verdict(arms.pop() if len(arms) == 1 else "mixed", text, reasons)
    interval = comparison.ratio.interval
    if interval.low >= 1 - CLOSE and interval.high <= 1 + CLOSE:
        text = (
            f"{left} and {right} are practically equal: their hypervolumes differ by less than "
            f"{format_percent(CLOSE)}."
        )
        return Verdict("equal", text, reasons)
    return Verdict("undecided", f"{left} and {right}: no significant difference.", reasons)


def _is_significant(effect: Effect, null: float) -> bool:
    outside = effect.interval.low > null or effect.interval.high < null
    return effect.corrected <= ALPHA and outside


def _list_reasons(comparison: Comparison) -> list[str]:
    left, right, ratio = comparison.left.name, comparison.right.name, comparison.ratio
    ours, theirs = comparison.hypervolumes
    volumes = f"{left} has {ours:.3g} and {right} {theirs:.3g}"
    if ours > 0 and theirs > 0:
        upper = "any" if math.isinf(ratio.interval.high) else f"{ratio.interval.high:.2f}"
        span = f"{ratio.interval.low:.2f} to {upper}"
        volumes = f"{left} has {ratio.value:.2f} times that of {right} (95 %: {span})"
    lines = [
        f"Hypervolume at {comparison.count} configurations each: {volumes}. "
        f"Corrected p = {ratio.corrected:.3f}."
    ]
    for name, effect in comparison.probability_of_superiority.items():
        better = left if effect.value > 0.5 else right
        result = (
            f"{better} is better" if _is_significant(effect, 0.5) else "no significant difference"
        )
        lines.append(
            f"{name}: {result}. A configuration of {left} beats one of {right} in "
            f"{format_share(effect.value, effect.interval)} of pairs. "
            f"Corrected p = {effect.corrected:.3f}."
        )
    if not comparison.probability_of_superiority:
        sizes = [len(arm.independent) for arm in (comparison.left, comparison.right)]
        names = format_list([goal.name for goal in comparison.left.objectives])
        lines.append(
            f"{names}: nothing to compare. {left} has {sizes[0]} and {right} {sizes[1]} "
            "configurations that can be compared one by one; it takes at least "
            f"{comparison.least_size} of each."
        )
    ours, theirs = comparison.coverage
    if not math.isnan(ours[0]) and not math.isnan(theirs[0]):
        lines.append(
            f"Coverage: {left} matches or beats {format_share(*ours)} of the front of {right}, "
            f"and {right} {format_share(*theirs)} of that of {left}."
        )
    return lines
