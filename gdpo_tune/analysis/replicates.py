"""Configurations: trials with equal parameters, merged over their seeds.

A front is claimed on the mean over seeds of the test objectives. Of one configuration with n
complete trials, means m_i and within-trial standard errors s_i (bootstrap clustered by prompt):

    mean = sum_i m_i / n
    se   = s_1                                                        n = 1: provisional
    se   = max( sqrt(var(m, ddof=1) / n), sqrt(sum_i s_i^2) / n )     n >= 2

The spread between seeds holds both the noise of training and that of sampling completions, so it
alone is the standard error; two or three seeds may agree by luck, so it is never taken for smaller
than what the evaluations' own noise leaves in a mean of n. With one seed the noise of training is
unknown: the error bar is then too short, which is what `provisional` says.

All trials answer the same test prompts. What the choice of prompts contributes to s_i is common to
all of them and does not shrink with more seeds: these errors are for comparing configurations, not
for predicting other prompts.

A front member was chosen because its first trial looked good, and that trial stays in the mean:
with few seeds the mean is a little flattering.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdpo_tune.analysis.pareto import NOT_RANKED, ranks
from gdpo_tune.analysis.probability import front_probability
from gdpo_tune.trials import Estimate, Objective, Params, Replicate, Role, TrialRecord

Key = tuple[object, ...]


@dataclass(frozen=True)
class Configuration:
    """One setting of the parameters and what is known of it over all its seeds."""

    numbers: tuple[int, ...]
    """The complete trials that were merged, in order."""
    first: int
    """Number of the trial that first had these parameters."""
    params: Params
    role: Role
    """`untrained`, `published` or `search`; never `replicate`."""
    mean: Mapping[str, Estimate]
    """Test metric -> mean over seeds and its standard error; every metric that all seeds have."""
    validation: Mapping[str, Estimate]
    """The same on validation prompts."""
    seeds: int
    feasible: bool
    """Whether more than half of the seeds satisfy every constraint on validation."""
    rank: int
    """Non-dominated rank among feasible trained configurations; `NOT_RANKED` for the others."""
    probability: float
    """Probability of being on the front, given means and standard errors; 0 when not ranked."""

    @property
    def on_front(self) -> bool:
        """Whether no other feasible trained configuration dominates this one."""
        return self.rank == 0

    @property
    def provisional(self) -> bool:
        """Whether the noise of training is unknown, because there is one seed only."""
        return self.seeds < 2

    def values(self, objectives: Sequence[Objective]) -> tuple[float, ...]:
        """Test means of the objectives, in their order."""
        return tuple(self.mean[objective.name].mean for objective in objectives)

    def errors(self, objectives: Sequence[Objective]) -> tuple[float, ...]:
        """Standard errors of `values`."""
        return tuple(self.mean[objective.name].se for objective in objectives)


def configurations(
    records: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> list[Configuration]:
    """Every configuration with at least one complete, finite trial, ordered by `first`."""
    merged = [
        _merge(members, objectives)
        for members in grouped(records).values()
        if any(is_measured(record, objectives) for record in members)
    ]
    merged.sort(key=lambda configuration: configuration.first)
    return _ranked(merged, objectives)


def next_replicate(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], per_point: int, max_runs: int
) -> Replicate | None:
    """Which front configuration to train again with a fresh seed; None when there is none.

    The least certain first: fewest seeds (those on their way included), since with one seed the
    noise of training is unknown; then the membership of the front that is most in doubt
    (probability closest to 1/2); then the earlier trial.

    Args:
        records: every trial; replicates in any state count against both limits, failed ones too,
            so that a configuration that keeps crashing does not use up the machine.
        objectives: what the front is over.
        per_point: replicates of one configuration.
        max_runs: replicates of the whole sweep.
    """
    if sum(record.role == "replicate" for record in records) >= max_runs:
        return None
    groups = {_first(members).number: members for members in grouped(records).values()}
    open_to_more = [
        (configuration, groups[configuration.first])
        for configuration in configurations(records, objectives)
        if configuration.on_front and _replicates(groups[configuration.first]) < per_point
    ]
    if not open_to_more:
        return None
    chosen, _ = min(open_to_more, key=lambda pair: _certainty(*pair))
    return Replicate(of=chosen.first, params=chosen.params)


def grouped(records: Iterable[TrialRecord]) -> dict[Key, list[TrialRecord]]:
    """Trials with equal parameters together, a replicate with its original, by trial number.

    The untrained policy stands alone, whatever parameters its record carries.
    """
    ordered = sorted(records, key=lambda record: record.number)
    by_number = {record.number: record for record in ordered}
    groups: dict[Key, list[TrialRecord]] = {}
    for record in ordered:
        original = record if record.replicate_of is None else by_number.get(record.replicate_of)
        groups.setdefault(_key(original or record), []).append(record)
    return groups


def is_measured(record: TrialRecord, objectives: Sequence[Objective]) -> bool:
    """Whether a trial ran its full budget and has a finite test value of every objective."""
    return record.state == "complete" and all(
        objective.name in record.test and _finite(record.test[objective.name])
        for objective in objectives
    )


def pooled(estimates: Sequence[Estimate]) -> Estimate:
    """Mean over seeds and its standard error, by the formula at the head of this module."""
    count = len(estimates)
    means = [estimate.mean for estimate in estimates]
    within = math.sqrt(sum(estimate.se**2 for estimate in estimates)) / count
    between = float(np.std(means, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    # From the first one on, so that equal seeds give exactly their value and ties stay ties.
    mean = means[0] + math.fsum(mean - means[0] for mean in means) / count
    return Estimate(mean=mean, se=max(between, within))


def is_feasible(seeds: Sequence[TrialRecord]) -> bool:
    """Whether more than half of the seeds satisfy the constraints; a tie is not enough.

    The majority and not the mean, because the records carry verdicts and not the constraints. A
    record without a verdict (no constraint was measured) counts as satisfied.
    """
    return 2 * sum(record.feasible is not False for record in seeds) > len(seeds)


def _merge(members: Sequence[TrialRecord], objectives: Sequence[Objective]) -> Configuration:
    seeds = [record for record in members if is_measured(record, objectives)]
    first = _first(members)
    published = any(record.role == "published" for record in members)
    role: Role = "published" if published else "search"
    return Configuration(
        numbers=tuple(record.number for record in seeds),
        first=first.number,
        params=first.params,
        role="untrained" if first.role == "untrained" else role,
        mean=_pooled_metrics([record.test for record in seeds]),
        validation=_pooled_metrics([record.validation for record in seeds]),
        seeds=len(seeds),
        feasible=is_feasible(seeds),
        rank=NOT_RANKED,
        probability=0.0,
    )


def _pooled_metrics(seeds: Sequence[Mapping[str, Estimate]]) -> dict[str, Estimate]:
    shared = [
        name for name in seeds[0] if all(name in seed and _finite(seed[name]) for seed in seeds)
    ]
    return {name: pooled([seed[name] for seed in seeds]) for name in shared}


def _ranked(merged: list[Configuration], objectives: Sequence[Objective]) -> list[Configuration]:
    """The same configurations with their rank and their probability of being on the front."""
    eligible = [c for c in merged if c.feasible and c.role != "untrained"]
    means = np.array([c.values(objectives) for c in eligible])
    errors = np.array([c.errors(objectives) for c in eligible])
    found = zip(ranks(means, objectives), front_probability(means, errors, objectives), strict=True)
    judged = {c.first: verdict for c, verdict in zip(eligible, found, strict=True)}
    return [_judged(c, *judged[c.first]) if c.first in judged else c for c in merged]


def _judged(configuration: Configuration, rank: np.int64, probability: float) -> Configuration:
    return replace(configuration, rank=int(rank), probability=float(probability))


def _certainty(configuration: Configuration, members: Sequence[TrialRecord]) -> tuple[float, ...]:
    """Sort key of `next_replicate`: the smallest is trained again first."""
    coming = sum(record.state in ("waiting", "running") for record in members)
    in_doubt = abs(configuration.probability - 0.5)
    return (configuration.seeds + coming, in_doubt, configuration.first)


def _replicates(members: Sequence[TrialRecord]) -> int:
    return sum(record.role == "replicate" for record in members)


def _first(members: Sequence[TrialRecord]) -> TrialRecord:
    """The trial that the others repeat: the earliest that is not itself a replicate."""
    return next((record for record in members if record.role != "replicate"), members[0])


def _key(record: TrialRecord) -> Key:
    if record.role == "untrained":
        return (record.role,)
    return tuple(sorted(record.params.items()))


def _finite(estimate: Estimate) -> bool:
    return math.isfinite(estimate.mean) and math.isfinite(estimate.se)
