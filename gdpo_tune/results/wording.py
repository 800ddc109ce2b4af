"""Phrases about a sweep, and warnings about its result, that the report and the terminal share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gdpo_tune.analysis.effects import MAX_MORE, Contrast, Effects
from gdpo_tune.analysis.front import Front, name_extreme, summarize_origins
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core import trial_files
from gdpo_tune.core.events import Incident
from gdpo_tune.core.text import (
    abbreviate_parameter,
    format_count,
    format_duration,
    format_estimate,
    format_first,
    format_hypervolume,
    format_interval,
    format_list,
    format_number,
    format_parameter,
    format_percent,
)
from gdpo_tune.core.trials import (
    MERGE_PREFIX,
    PROMPTS_LEFT_OUT,
    Params,
    TrialRecord,
    format_parts,
    title_candidate,
)
from gdpo_tune.results.front_table import BASELINES, title_policy
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.space import Uniform, format_domain, get_parameter_info

REPORT_FILE = "report.html"
FRONT_FILE = "front.png"
"""Names of the files in a sweep's directory."""
ORIGINS = {"ends": "final policies", "checkpoints": "earlier checkpoints", "merges": "merges"}
"""Kind of candidates -> its name where a person reads."""
OPEN_STATES = {"running": "unfinished", "paused": "paused at a rung"}
"""State of a trial that has not ended -> its description in a summary."""
EDGE = 0.02
"""Share of a range, on its own scale, within which a value lies at its limit."""
MIN_AT_EDGE = 3
"""Fewest members of a front at a limit that are worth a warning."""
WIDER = 3.0
"""Factor by which a limit on a log scale is widened; others by half of their span."""
DEAD, SILENT = 0.5, 0.9
"""Shares of groups with equal rewards: above the first a group size is too small, and above the
second, at every group size, the reward teaches next to nothing."""
REWARD_METRIC, DEAD_GROUPS = f"train/{trial_files.REWARDS}", f"/{trial_files.ZERO_STD}"
MAX_NAMED = 5
"""Trials that a warning names, and differences that a line of effects does."""
SHOWN = 160
"""Characters of a completion that an explanation shows."""
WAYS_ON = """    ways on, see docs/policies.md:
    - model.instructions: on tells the policy the rewarded format
    - space.partial_credit: true, or a weight on a reward that it sometimes earns
    - easier prompts (data:), larger groups, or a larger training.max_completion_length
    - a supervised start: start: {demonstrations: data} first trains it on the data's solutions
    - training.dead_steps: 0 trains on nevertheless"""


def measure_wall_time(records: Sequence[TrialRecord]) -> float:
    """Return seconds from the first start of a trial to the last end; 0 before anything ended."""
    started = [record.started for record in records if record.started is not None]
    finished = [record.finished for record in records if record.finished is not None]
    return max(finished) - min(started) if started and finished else 0.0


def name_state(state: str) -> str:
    """Return the state of a trial as a person reads it."""
    return "stopped early" if state == "pruned" else state


def describe_work(records: Sequence[TrialRecord], unit: str) -> str:
    """Return the time of all trials as `unit`."""
    return f"{format_duration(sum(record.cost.seconds for record in records))} of {unit}"


def describe_parameters(params: Params, names: Iterable[str]) -> str:
    """Return `group size 8, w format 0.5`: those of `names` that the parameters have."""
    shown = [(name, params[name]) for name in names if name in params]
    return ", ".join(f"{abbreviate_parameter(n)} {format_parameter(v)}" for n, v in shown)


def describe_states(records: Sequence[TrialRecord]) -> tuple[int, str]:
    """Count the complete trials that are no merges or checkpoints, and describe all others.

    The description is such as `2 unfinished, 20 of 34 merges and checkpoints complete`, or empty.
    """
    states = Counter(record.state for record in records if not record.parts)
    others = [
        f"{states[state]} {OPEN_STATES.get(state) or name_state(state)}"
        for state in ("running", "paused", "pruned", "failed")
        if states[state]
    ]
    if candidates := [record.state for record in records if record.parts]:
        done = candidates.count("complete")
        others.append(f"{done} of {len(candidates)} merges and checkpoints complete")
    return states["complete"], ", ".join(others)


def describe_left_out_prompts(records: Sequence[TrialRecord]) -> str:
    """Return each split that lacks prompts, such as `train 12 of 2048`; may be empty."""
    counts = {
        key.removeprefix(PROMPTS_LEFT_OUT): count
        for record in records
        for key, count in record.environment.items()
        if key.startswith(PROMPTS_LEFT_OUT)
    }
    return ", ".join(f"{split} {count}" for split, count in counts.items())


def count_notes(records: Sequence[TrialRecord], key: str) -> str:
    """Return the values of a key of `Outcome.environment`, each with its number of trials."""
    counts = Counter(record.environment.get(key, "") for record in records)
    return "; ".join(f"{count} x {value}" for value, count in counts.items() if value)


def describe_content(records: Sequence[TrialRecord]) -> str:
    """Return how many trials ran before and after accepted changes of content; may be empty."""
    counts = Counter(record.content for record in records if record.content)
    return "; ".join(f"{format_count(n, 'trial')} {content}" for content, n in counts.items())


def describe_origins(front: Front) -> list[str]:
    """Describe each of `summarize_origins`: its share of the hypervolume, and its cost."""
    return [
        f"{ORIGINS[kind]} {'give' if kind == 'ends' else 'add'} {format_percent(share)} of the "
        f"hypervolume ({members} on the front): {format_count(trials, 'trial')}, "
        f"{cost.completions:,} completions in training"
        f"{f' ({continued:,} of them beyond the first rung)' if continued else ''}, "
        f"{cost.evaluation_completions:,} in evaluations, {format_duration(cost.cpu_seconds)} of "
        "CPU time"
        for kind, trials, members, _, share, cost, continued in summarize_origins(front)
    ]


def describe_effects(effects: Effects) -> list[str]:
    """Return up to three lines: what is told apart, what cannot be, and what that would cost."""
    apart = [found for found in effects.contrasts if found.is_told_apart]
    apart.sort(key=lambda found: -abs(found.value) / (found.interval.high - found.interval.low))
    unclear = [found for found in effects.contrasts if not found.is_told_apart]
    trainings = format_count(effects.trainings, "training")
    place = f"At step {effects.step} ({trainings}, {effects.completions:,} completions each)"
    lines: list[str] = []
    if apart:
        sentences = [f"{found.dimension} {describe_contrast(found)}" for found in apart]
        more = f"; {len(apart) - MAX_NAMED} more in the report" if len(apart) > MAX_NAMED else ""
        lines.append(f"{place}: {'; '.join(sentences[:MAX_NAMED])}{more}.")
    if not unclear:
        return lines
    objectives = dict.fromkeys(found.objective for found in effects.contrasts)
    names: dict[str, list[str]] = {}
    for dimension in dict.fromkeys(found.dimension for found in unclear):
        for objective in objectives:
            key = (dimension, objective)
            pairs = [f"{f.before}/{f.after}" for f in unclear if (f.dimension, f.objective) == key]
            count = sum((f.dimension, f.objective) == key for f in effects.contrasts)
            label = dimension if len(pairs) == count else f"{dimension} ({', '.join(pairs)})"
            if pairs:
                names.setdefault(label, []).append(objective)
    together: dict[tuple[str, ...], list[str]] = {}
    for label, own in names.items():
        together.setdefault(tuple(own), []).append(label)
    parts = [
        f"{format_list(labels)} in "
        f"{'all objectives' if len(own) == len(objectives) > 1 else format_list(own)}"
        for own, labels in together.items()
    ]
    where = "Cannot be told apart there" if apart else f"{place} cannot be told apart"
    lines.append(f"{where}: {'; '.join(parts)}.")
    costs = {f.dimension: 0 for f in unclear}
    for found in unclear:
        costs[found.dimension] = max(costs[found.dimension], found.more)
    needed = [
        f"{name} {'over ' if more == MAX_MORE else ''}{more} ({more * effects.completions:,} "
        "completions)"
        for name, more in sorted(costs.items(), key=lambda item: item[1])
        if more
    ]
    if needed:
        lines.append(f"More trainings to step {effects.step} that would tell: {', '.join(needed)}.")
    return lines


def describe_contrast(found: Contrast) -> str:
    """Return `grpo above gdpo in length by 0.120 (0.030 to 0.210)`, the larger value first."""
    above, below, sign = (
        (found.after, found.before, 1) if found.value > 0 else (found.before, found.after, -1)
    )
    low, high = sorted(sign * end for end in found.interval)
    return (
        f"{above} above {below} in {found.objective} by "
        f"{format_number(abs(found.value), high - low)} ({format_interval(low, high)})"
    )


def describe_findings(front: Front, effects: Effects) -> tuple[list[str], list[str]]:
    """Return sentences on the front and on what each dimension changes, and on their limits."""
    lines: list[str] = []
    if front.members:
        volume = format_hypervolume(front.hypervolume, front.hypervolume_interval)
        members = format_count(len(front.members), "configuration")
        lines.append(f"The front has {members} and a hypervolume of {volume}.")
    for goal in front.objectives:
        if goal.name in front.extremes and not front.list_ties(goal.name):
            best = front.extremes[goal.name]
            title = title_candidate(best.name)
            lines.append(
                f"{title[0].upper()}{title[1:]} has the {name_extreme(goal)}, "
                f"{format_estimate(best.mean[goal.name])}. No other configuration is tied with it."
            )
    lines += describe_effects(effects)
    limits: list[str] = []
    if effects.constant:
        limits.append(
            f"Did not vary: {format_list(effects.constant)}. All {effects.trainings} trainings "
            f"have the same value at step {effects.step}."
        )
    provisional = sum(member.is_provisional for member in front.members)
    if provisional:
        limits.append(
            f"Provisional, with only one seed: {provisional} of the "
            f"{format_count(len(front.members), 'configuration')} on the front."
        )
    doubtful = [member.name for member in front.members if member.probability < 0.5]
    if doubtful:
        limits.append(
            "More likely dominated than not, given the standard errors: "
            f"{format_list([title_candidate(name) for name in doubtful])}."
        )
    tied = [n for n in front.extremes if n not in effects.constant and front.list_ties(n)]
    if tied:
        limits.append(f"Top configurations for {format_list(tied)} are statistically tied.")
    return lines, limits


def name_configuration(configuration: Configuration) -> str:
    """Return `trial 7, replicates 20, 23` or `merge-27 (0.5 x 7@60 + 0.5 x 12@60)`."""
    name = title_policy(configuration)
    if configuration.role == "merge":
        name += f" ({format_parts(configuration.parts)})"
    others = [str(number) for number in configuration.numbers if number != configuration.first]
    if others:
        name += f", replicate{'s' if len(others) > 1 else ''} {', '.join(others)}"
    return name + (" (published weights)" if configuration.role == "published" else "")


def describe_role(record: TrialRecord) -> str:
    """Return why a trial was run: `search`, `replicate of 3`, `merge of 0.5 x 7@60 + 0.5 x 12`."""
    if record.role == "replicate":
        kinds = ("", "the checkpoint of trial ", MERGE_PREFIX)
        return f"replicate of {kinds[min(2, len(record.parts))]}{record.replicate_of}"
    if record.role == "checkpoint":
        return title_candidate(record.name)
    if record.role == "merge":
        return f"merge of {format_parts(record.parts)}"
    return BASELINES.get(record.role, record.role)


def describe_last_session(sessions: Sequence[Mapping[str, Any]]) -> str:
    """Return how the newest session stands, as far as the ledger knows; empty without sessions."""
    if not sessions:
        return ""
    if ending := sessions[-1].get("ending"):
        return f"finished ({ending})"
    return "interrupted" if "finished" in sessions[-1] else "running, or killed"


def list_incidents(sessions: Sequence[Mapping[str, Any]]) -> list[Incident]:
    """Return the incidents of all sessions in order; sessions as `Ledger.get_sessions`."""
    return [incident for session in sessions for incident in session.get("incidents", ())]


class ResultWarning(NamedTuple):
    """A finding about a result, and what whoever runs the sweep can do about it."""

    finding: str
    remedy: str

    def __str__(self) -> str:
        """Return both in one line."""
        return f"{self.finding} {self.remedy}"


def list_result_warnings(spec: SweepSpec, front: Front) -> list[ResultWarning]:
    """Return warnings about the result, the one about the knee first.

    Without a front these are only the trainings that left the policy as it was.
    """
    warnings: list[ResultWarning] = []
    if front.knee_shortfall:
        warnings.append(
            ResultWarning(
                "no policy on the front keeps all that the untrained policy has: knee is worse in "
                f"{format_list(front.knee_shortfall)}.",
                "Choose by conditions instead, such as "
                f'--pick "max {front.objectives[0].name} where ...".',
            )
        )
    if front.missed:
        names = format_first([title_candidate(name) for name in front.missed], MAX_NAMED)
        finding = f"on test prompts {names} of the front misses a limit of `constraints:`."
        warnings.append(
            ResultWarning(
                finding, "It held on validation prompts: choose by --pick '... where ...'."
            )
        )
    if front.members and (changes := describe_content(front.records)):
        remedy = "their values are comparable only if the change decides none of them."
        finding = f"what decides results changed during the sweep: {changes};"
        warnings.append(ResultWarning(finding, remedy))
    unchanged = [r for r in front.records if r.is_unchanged and r.is_training]
    if unchanged:
        names = format_first([f"trial {r.number}" for r in unchanged], MAX_NAMED)
        warnings.append(
            ResultWarning(
                f"{format_count(len(unchanged), 'training')} left the policy unchanged: every "
                f"gradient was 0 in {names}. They are on no front.",
                "Give the policy rewards that differ within a group, see docs/policies.md.",
            )
        )
    if not front.members:
        return warnings
    shares, cut = _measure_dead_groups(front.records)
    others = (
        _warn_of_baselines(spec, front),
        _warn_of_seeds(spec, front),
        _warn_of_limits(spec, front),
    )
    return [*warnings, *chain(*others, _warn_of_groups(shares, cut))]


def capitalize_warning(warning: str) -> str:
    """Return a warning as a sentence; the name of a parameter before a colon stays as it is."""
    is_name = warning.split(" ", 1)[0].endswith(":")
    return warning if is_name else warning[0].upper() + warning[1:]


def _warn_of_baselines(spec: SweepSpec, front: Front) -> Iterator[ResultWarning]:
    for baseline in front.baselines:
        if not any(
            front.list_clearly_worse(baseline, member)
            and not front.list_clearly_worse(member, baseline)
            for member in front.members
            if member is not baseline
        ):
            name = BASELINES[baseline.role] if baseline.is_initial else "published setting"
            yield ResultWarning(
                f"no policy is clearly better than the {name} in some objective without being "
                "clearly worse in another.",
                f"An extended sweep may find one: --set {spec.extension}",
            )


def _warn_of_seeds(spec: SweepSpec, front: Front) -> Iterator[ResultWarning]:
    trained = [member for member in front.members if member.is_training]
    single = [member for member in trained if member.is_provisional]
    settings = spec.search.replicates
    if 2 * len(single) > len(trained):
        runs = sum(record.role == "replicate" for record in front.records) + len(single)
        seeds = "" if settings.per_point else " and search.replicates.per_point to 1"
        yield ResultWarning(
            f"Trainings on the front with only one seed, so that part of their lead may be luck: "
            f"{len(single)} of {len(trained)}.",
            f"Raise search.replicates.max_runs to {max(runs, settings.max_runs + 1)}{seeds}, and "
            "run the sweep again.",
        )


def _warn_of_limits(spec: SweepSpec, front: Front) -> Iterator[ResultWarning]:
    members = [m for m in front.members if m.is_training and m.role == "search"]
    tried = [c for c in front.configurations if c.is_training and c.role == "search"]
    for name, domain in spec.space.searched_domains.items():
        if not isinstance(domain, Uniform):
            continue
        for side in ("lower", "upper"):
            on_front = _count_at_limit(members, name, domain, side)
            share = _count_at_limit(tried, name, domain, side) / max(len(tried), 1)
            if on_front < MIN_AT_EDGE or on_front / len(members) <= share:
                continue
            wider = _widen(name, domain, side)
            if wider is None:
                continue
            limit = domain.low if side == "lower" else domain.high
            family, _, leaf = name.rpartition(".")
            line = f"{leaf}: {format_domain(wider)}"
            line = f"{family}: {{{line}}}" if family else line
            yield ResultWarning(
                f"{name}: {on_front} of the {format_count(len(members), 'searched training')} on "
                f"the front lie at its {side} limit {limit:g}, so better ones may lie beyond.",
                f"Search a wider range as another sweep (--name): {line}.",
            )


def _count_at_limit(
    configurations: Sequence[Configuration], name: str, domain: Uniform, side: str
) -> int:
    places = [domain.find_place(float(c.params[name])) for c in configurations if name in c.params]
    return sum(place < EDGE if side == "lower" else place > 1 - EDGE for place in places)


def _widen(name: str, domain: Uniform, side: str) -> Uniform | None:
    info = get_parameter_info(name)
    step = domain.step or (1 if domain.integer else None)
    low, high = float(domain.low), float(domain.high)
    grow = math.ceil((high - low) / 2 / step) * step if step else (high - low) / 2
    lower = float(f"{low / WIDER:.2g}") if domain.log else low - grow
    upper = float(f"{high * WIDER:.2g}") if domain.log else high + grow
    if side == "lower":
        low = max(lower, info.low if info.low is not None else lower)
    else:
        high = min(upper, info.high if info.high is not None else upper)
    if (low, high) == (domain.low, domain.high) or (low == 0 and domain.log):
        return None
    ends = {"low": int(low), "high": int(high)} if domain.integer else {"low": low, "high": high}
    return domain.model_copy(update=ends)


def _measure_dead_groups(
    records: Sequence[TrialRecord],
) -> tuple[dict[str, dict[int, float]], float]:
    """Return reward -> group size -> share of groups with equal rewards, and the share of cut ones.

    The published setting does not count: it weighs rewards that the space may leave out.
    """
    found: dict[str, dict[int, list[float]]] = {}
    cut: list[float] = []
    for record in records:
        searched = record.directory and record.is_training and record.role != "published"
        steps = trial_files.read_steps(record.directory) if record.directory and searched else []
        size = record.params.get("group_size")
        clipped = f"train/{trial_files.CLIPPED}"
        cut += [step.metrics[clipped] for step in steps if clipped in step.metrics]
        # A reward of a rare task may be absent from the first steps.
        for name in dict.fromkeys(name for step in steps for name in step.metrics):
            if not name.startswith(REWARD_METRIC) or not name.endswith(DEAD_GROUPS):
                continue
            reward = name.removeprefix(REWARD_METRIC).removesuffix(DEAD_GROUPS)
            values = [step.metrics[name] for step in steps if name in step.metrics]
            if size is not None and record.params.get(f"reward_weights.{reward}") != 0:
                found.setdefault(reward, {}).setdefault(int(size), []).append(fmean(values))
    shares = {
        reward: {size: fmean(values) for size, values in sorted(sizes.items())}
        for reward, sizes in found.items()
    }
    return shares, fmean(cut) if cut else 0.0


def _warn_of_groups(
    shares: Mapping[str, Mapping[int, float]], cut: float
) -> Iterator[ResultWarning]:
    """Warn of cut completions, and of rewards that are equal in most groups and teach nothing.

    A completion that is cut has no answer, so where most are cut, that explains equal rewards.
    """
    if cut > trial_files.MOST_CUT:
        yield ResultWarning(
            f"{format_percent(cut)} of the completions in training were cut at their longest "
            "length, before they could earn what their end is rewarded for.",
            "Raise training.max_completion_length.",
        )
    for reward, sizes in shares.items():
        name = abbreviate_parameter(reward)
        dead = {size: share for size, share in sizes.items() if share > DEAD}
        if min(sizes.values()) > SILENT:
            least = format_percent(min(sizes.values()))
            groups = "all groups" if least == "100 %" else f"at least {least} of the groups"
            yield ResultWarning(
                f"{name}: equal in {groups} at every group size, so this reward teaches next to "
                "nothing.",
                "Raise training.max_completion_length: most completions are cut."
                if cut > trial_files.MOST_CUT
                else "Make it easier or harder, give partial credit, or leave it out.",
            )
        elif dead:
            shares_of_sizes = [f"{format_percent(dead[k])} at group size {k}" for k in dead]
            larger = max(sizes) * 2 if len(dead) == len(sizes) else max(sizes.keys() - dead.keys())
            yield ResultWarning(
                f"{name}: equal in at least half of the groups, which teach nothing about it: "
                f"{format_list(shares_of_sizes)}.",
                f"Larger groups help: group_size {larger}.",
            )


def explain_dead_start(reason: str, directory: Path) -> str:
    """Explain a training without a signal: its reason, completions of it, and the ways on."""
    lines = [reason]
    for example in trial_files.read_completions(directory):
        text = " ".join(example.completion.split())
        rewards = ", ".join(f"{name} {value}" for name, value in example.metrics.items())
        lines.append(
            f"    {text[:SHOWN]}{trial_files.CUT if len(text) > SHOWN else ''} ({rewards})"
        )
    return "\n".join([*lines, WAYS_ON])
