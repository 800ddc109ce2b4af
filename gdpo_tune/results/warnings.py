"""Warnings about the result of a sweep: what a colleague would say before it is trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from gdpo_tune.analysis.front import Front, list_worse
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.selection import CLEAR
from gdpo_tune.core.formatting import (
    abbreviate_parameter,
    format_count,
    format_list,
    format_percent,
)
from gdpo_tune.core.parameters import FAMILIES, PARAMETERS
from gdpo_tune.core.steps import REWARDS, read_steps
from gdpo_tune.core.trial_config import ParamValue
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.spec.space import format_domain
from gdpo_tune.spec.space import Uniform

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

EDGE = 0.02
"""Share of a range, on its own scale, within which a value lies at its limit."""
LEAST_AT_EDGE = 3
"""Fewest members of a front at a limit that are worth a warning."""
WIDER = 3.0
"""Factor by which a limit on a log scale is widened; others by half of their span."""
DEAD, SILENT = 0.5, 0.9
"""Shares of groups with equal rewards: above the first a group size is too small, and above the
second, at every group size, the reward teaches next to nothing."""
REWARD_METRIC, DEAD_GROUPS = f"train/{REWARDS}", "/frac_reward_zero_std"


class ResultWarning(NamedTuple):
    """A finding about a result, and what whoever runs the sweep can do about it."""

    finding: str
    remedy: str

    def __str__(self) -> str:
        """Return both in one line."""
        return f"{self.finding} {self.remedy}"


def list_result_warnings(spec: SweepSpec, front: Front) -> list[ResultWarning]:
    """Return what is to be known before a result is trusted; empty without a front."""
    if not front.members:
        return []
    shares = _measure_dead_groups(front.records)
    return [
        *_warn_of_knee(front),
        *_warn_of_baselines(front),
        *_warn_of_seeds(spec, front),
        *_warn_of_limits(spec, front),
        *_warn_of_groups(shares),
    ]


def capitalize_warning(warning: str) -> str:
    """Return a warning as a sentence; the name of a parameter before a colon stays as it is."""
    is_name = warning.split(" ", 1)[0].endswith(":")
    return warning if is_name else warning[0].upper() + warning[1:]


def _warn_of_knee(front: Front) -> Iterator[ResultWarning]:
    if front.knee_shortfall:
        yield ResultWarning(
            "no policy on the front keeps all that the untrained policy has: knee is worse in "
            f"{format_list(front.knee_shortfall)}.",
            "Choose by conditions instead, such as "
            f'--pick "max {front.objectives[0].name} where ...".',
        )


def _warn_of_baselines(front: Front) -> Iterator[ResultWarning]:
    """Warn of a baseline that no policy improves on without a clear loss elsewhere."""
    for baseline in front.baselines:
        others = [m for m in front.members if m is not baseline]
        if not any(_beats(member, baseline, front) for member in others):
            name = "untrained policy" if baseline.role == "untrained" else "published setting"
            yield ResultWarning(
                f"no policy is clearly better than the {name} in some objective without being "
                "clearly worse in another.",
                "More trials (search.trials) may find one.",
            )


def _beats(member: Configuration, baseline: Configuration, front: Front) -> bool:
    """Return whether a policy is clearly better somewhere and clearly worse nowhere."""
    worse = list_worse(member, baseline, front.objectives, errors=CLEAR)
    return not worse and bool(list_worse(baseline, member, front.objectives, errors=CLEAR))


def _warn_of_seeds(spec: SweepSpec, front: Front) -> Iterator[ResultWarning]:
    """Warn if most trainings on the front have one seed."""
    trained = [member for member in front.members if member.is_training]
    single = [member for member in trained if member.is_provisional]
    settings = spec.search.replicates
    if 2 * len(single) > len(trained):
        runs = sum(record.role == "replicate" for record in front.records) + len(single)
        seeds = "" if settings.per_point else " and search.replicates.per_point to 1"
        yield ResultWarning(
            f"{len(single)} of the {format_count(len(trained), 'training')} on the front have one "
            "seed, so part of their lead may be luck.",
            f"Raise search.replicates.max_runs to {max(runs, settings.max_runs + 1)}{seeds}, and "
            "run the sweep again.",
        )


def _warn_of_limits(spec: SweepSpec, front: Front) -> Iterator[ResultWarning]:
    """Warn of limits at which the front has more of its trainings than the search has."""
    members = [m for m in front.members if m.is_training and m.role == "search"]
    tried = [c for c in front.configurations if c.is_training and c.role == "search"]
    for name, domain in spec.space.searched_domains.items():
        if not isinstance(domain, Uniform):
            continue
        for side in ("lower", "upper"):
            on_front = _count_at_limit(members, name, domain, side)
            share = _count_at_limit(tried, name, domain, side) / max(len(tried), 1)
            if on_front < LEAST_AT_EDGE or on_front / len(members) <= share:
                continue
            wider = _widen(name, domain, side)
            if wider is None:
                continue
            limit = domain.low if side == "lower" else domain.high
            yield ResultWarning(
                f"{name}: {on_front} of the {format_count(len(members), 'searched training')} on "
                f"the front lie at its {side} limit {limit:g}, so better ones may lie beyond.",
                f"Search a wider range as another sweep (--name): {_format_line(name, wider)}.",
            )


def _count_at_limit(
    configurations: Sequence[Configuration], name: str, domain: Uniform, side: str
) -> int:
    """Count the configurations whose value is at a limit, on the scale of the range."""

    def scale(value: ParamValue) -> float:
        kept = min(max(float(value), domain.low), domain.high)  # a person may force others
        return math.log(kept) if domain.log else kept

    low, high = scale(domain.low), scale(domain.high)
    places = [
        (scale(c.params[name]) - low) / (high - low) for c in configurations if name in c.params
    ]
    return sum(place < EDGE if side == "lower" else place > 1 - EDGE for place in places)


def _widen(name: str, domain: Uniform, side: str) -> Uniform | None:
    """Return a range that reaches beyond a limit; None if the parameter allows none."""
    info = PARAMETERS.get(name) or FAMILIES[name.partition(".")[0]]
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


def _format_line(name: str, domain: Uniform) -> str:
    """Return a line of `space:`: `learning_rate: {log: [1.0e-05, 0.001]}`."""
    family, _, leaf = name.rpartition(".")
    line = f"{leaf}: {format_domain(domain)}"
    return f"{family}: {{{line}}}" if family else line


def _measure_dead_groups(records: Sequence[TrialRecord]) -> dict[str, dict[int, float]]:
    """Return reward -> group size -> mean share of groups in which the reward is equal."""
    found: dict[str, dict[int, list[float]]] = {}
    for record in records:
        steps = read_steps(record.directory) if record.directory and record.is_training else []
        size = record.params.get("group_size")
        for name in steps[0].metrics if steps else ():
            if not name.startswith(REWARD_METRIC) or not name.endswith(DEAD_GROUPS):
                continue
            reward = name.removeprefix(REWARD_METRIC).removesuffix(DEAD_GROUPS)
            values = [step.metrics[name] for step in steps if name in step.metrics]
            if size is not None and record.params.get(f"reward_weights.{reward}") != 0:
                found.setdefault(reward, {}).setdefault(int(size), []).append(fmean(values))
    return {
        reward: {size: fmean(values) for size, values in sorted(sizes.items())}
        for reward, sizes in found.items()
    }


def _warn_of_groups(shares: Mapping[str, Mapping[int, float]]) -> Iterator[ResultWarning]:
    """Warn of rewards that are equal in most groups, which then teach nothing."""
    for reward, sizes in shares.items():
        name = abbreviate_parameter(reward)
        dead = {size: share for size, share in sizes.items() if share > DEAD}
        if min(sizes.values()) > SILENT:
            yield ResultWarning(
                f"{name}: equal in at least {format_percent(min(sizes.values()))} of the groups at "
                "every group size, so this reward teaches next to nothing.",
                "Make it easier or harder, give partial credit, or leave it out.",
            )
        elif dead:
            shares_of_sizes = [f"{format_percent(dead[k])} at group size {k}" for k in dead]
            larger = max(sizes) * 2 if len(dead) == len(sizes) else max(sizes.keys() - dead.keys())
            yield ResultWarning(
                f"{name}: equal in at least half of the groups, which teach nothing about it: "
                f"{format_list(shares_of_sizes)}.",
                f"Larger groups help: group_size {larger}.",
            )
