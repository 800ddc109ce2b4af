"""Merges of trained policies: a model of their values, and the choice of the next candidate.

A merge with weights w of parents with values y_i lies near their weighted mean, and on average a
little above it, the more so the more they differ. With m(w) and v(w) the weighted mean and variance
of the parents' values, each objective divided by the span of the parents, an objective is modelled
as a Gaussian process over the weights:

    f(w) = m(w) + u(w) (MEAN_GAIN + g(w)),        u(w)^2 = 2 v(w) + 2 (mean of v(w) over objectives)
    cov(g(w), g(w')) = COMMON_SD^2 + LOCAL_SD^2 exp(-|w - w'|^2 / (2 LENGTH_SCALE^2))

Half way between two parents that differ equally in all objectives, u is their difference; at a
parent it is 0. The values of parents and merges are known up to the errors of their evaluations, so
every merge measured so far corrects f, and with it the values of its parents.

The constants were chosen on 35 merges of five trainings of `code`. On 247 merges of `code` and 169
of `math`, each predicted from those before it, the error is .060 and .063 of the span; that of the
line between the parents is .105 and .115, and the noise of an evaluation alone .052 and .043.

Two choices use the model: `choose_merge`, of a sweep, takes what is expected to add most
hypervolume; `MergeChooser`, for a wish of a person, maximises under limits. Only validation values
count: test values are left to what is claimed in the end.

Shapes: N merges, F members of a front, M metrics, L limits. All values are losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np
from scipy.special import ndtr

from gdpo_tune.analysis.pareto import (
    Floats,
    compute_contributions,
    compute_loss_hypervolume,
    compute_losses,
    convert_references,
    mark_front,
    select_front,
)
from gdpo_tune.core.metrics import Condition
from gdpo_tune.core.trials import Estimate, Objective, Part, TrialRecord

Policy = tuple[int, int]
"""Number of a trial and steps of its training."""
Mixture = dict[Policy, float]
"""Policy -> weight; the weights sum to 1."""
Rounded = frozenset[tuple[Policy, float]]
"""A mixture by which equal ones are found."""

MEAN_GAIN, COMMON_SD, LOCAL_SD, LENGTH_SCALE = 0.08, 0.1, 0.15, 0.5
"""Constants of the model, as shares of `u` and as a distance."""
TINY = 1e-9
"""Smallest error and span, so that certain values divide nothing by 0."""
MAX_CELLS = 2**15
"""Cells of the objective space; a front with more is rounded to a coarser grid."""
MAX_PARENTS = 24
"""Parents considered, spread evenly over the front: keeps a thousand trials cheap."""
MAX_GROUPS = 400
"""Groups of parents of one size considered, of those that lie farthest apart."""
WORTHWHILE = 0.001
"""Share of the hypervolume that a merge must be expected to add."""
MAX_FAILURES = 2
"""Merges that fail before a policy that they share counts as damaged."""
PARENT_Z = 1.0
"""Standard errors by which a parent may trail the front in every objective."""
FINENESS = {2: 20, 3: 10}
"""Parts of a wished merge -> number of equal shares that its weights are made of."""
LIMIT_Z = 2.0
"""Standard errors by which a prediction may break a limit that its merge may still keep."""


@dataclass(frozen=True)
class Merge:
    """A policy, or a merge of several, with its losses on validation prompts."""

    mixture: Mixture
    losses: Floats
    """`float[M]`, measured or predicted; NaN if neither."""
    errors: Floats
    """Standard errors of `losses`; an unknown one counts as 0."""
    record: TrialRecord | None = None
    """The trial that evaluated it; None for a prediction."""

    @property
    def is_measured(self) -> bool:
        """True if every objective is known."""
        return bool(np.isfinite(self.losses).all())

    @property
    def policy(self) -> Policy:
        """The policy of a parent."""
        return next(iter(self.mixture))

    @property
    def is_allowed(self) -> bool:
        """False if it breaks a constraint of the sweep."""
        return self.record is None or self.record.feasible is not False


def read_merges(records: Sequence[TrialRecord], objectives: Sequence[Objective]) -> list[Merge]:
    """Read the complete trainings and checkpoints, and merges in any state, by trial number."""
    result: list[Merge] = []
    for record in sorted(records, key=lambda record: record.number):
        mixture = {(part.trial, part.step): part.weight for part in record.parts}
        if record.role in ("search", "published") and record.rungs:
            mixture = {(record.number, record.rungs[-1].step): 1.0}
        is_known = record.state == "complete" and record.role != "replicate" and mixture
        if is_known or record.role == "merge":
            result.append(read_merge(record, mixture, objectives))
    return result


def read_merge(record: TrialRecord, mixture: Mixture, objectives: Sequence[Objective]) -> Merge:
    """Read validation values, those of the last rung where a trial has not ended."""
    values = record.validation or (record.rungs[-1].validation if record.rungs else {})
    found = [values.get(goal.name, Estimate(math.nan, math.nan)) for goal in objectives]
    losses = compute_losses([[estimate.mean for estimate in found]], objectives)[0]
    return Merge(mixture, losses, np.nan_to_num([estimate.se for estimate in found]), record)


def _read_rungs(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], known: Sequence[Merge]
) -> list[Merge]:
    """Read the kept checkpoints of trainings that are not `known`."""
    policies = {entry.policy for entry in known}
    return [
        read_merge(replace(record, validation=rung.validation), {policy: 1.0}, objectives)
        for record in records
        if record.state == "complete" and record.replicate_of is None
        for rung in record.rungs
        if (policy := (record.number, rung.step)) not in policies and rung.step in record.kept_steps
    ]


# The model


def predict_losses(
    mixtures: Sequence[Mixture], parents: Sequence[Merge], known: Sequence[Merge]
) -> tuple[Floats, Floats]:
    """Predict means and standard errors of the true losses of mixtures, each `[N, M]`.

    `parents` give the span of each objective. A mixture of a policy that is not `known` is NaN.
    """
    ends = {entry.policy: entry for entry in known if len(entry.mixture) == 1}
    merges = [
        entry
        for entry in known
        if len(entry.mixture) > 1 and entry.is_measured and entry.mixture.keys() <= ends.keys()
    ]
    span = _compute_span(parents)
    used = {policy for m in [*mixtures, *(merge.mixture for merge in merges)] for policy in m}
    columns = {policy: column for column, policy in enumerate(sorted(used & ends.keys()))}
    values = np.array([ends[policy].losses for policy in columns]) / span
    noise = (np.array([ends[policy].errors for policy in columns]) / span) ** 2
    weights = _build_weights(mixtures, columns)
    observed = _build_weights([merge.mixture for merge in merges], columns)
    prior, reach = _compute_prior(weights, values)
    line, extent = _compute_prior(observed, values)
    near, between = _compute_covariance(weights, observed), _compute_covariance(observed, observed)
    means, errors = prior, np.empty_like(prior)
    for column in range(len(span)):
        variance = (weights**2) @ noise[:, column] + reach[:, column] ** 2 * (
            COMMON_SD**2 + LOCAL_SD**2
        )
        if merges:
            cross = (weights * noise[:, column]) @ observed.T
            cross += near * np.outer(reach[:, column], extent[:, column])
            inner = (observed * noise[:, column]) @ observed.T
            inner += between * np.outer(extent[:, column], extent[:, column])
            inner += np.diag([(m.errors[column] / span[column]) ** 2 + TINY for m in merges])
            rest = np.array([m.losses[column] for m in merges]) / span[column] - line[:, column]
            gain = np.linalg.solve(inner, cross.T).T
            means[:, column] += gain @ rest
            variance -= (gain * cross).sum(axis=1)
        errors[:, column] = np.sqrt(np.maximum(variance, 0.0))
    return means * span, errors * span


def _compute_span(parents: Sequence[Merge]) -> Floats:
    return np.maximum(np.ptp([parent.losses for parent in parents], axis=0), TINY)


def _build_weights(mixtures: Sequence[Mixture], columns: Mapping[Policy, int]) -> Floats:
    """Build the weights of mixtures, `float[N, P]`; NaN for one with an unknown policy."""
    weights = np.zeros((len(mixtures), len(columns)))
    for row, mixture in zip(weights, mixtures, strict=True):
        if mixture.keys() <= columns.keys():
            row[[columns[policy] for policy in mixture]] = list(mixture.values())
        else:
            row[:] = np.nan
    return weights


def _compute_prior(weights: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Compute m + u MEAN_GAIN as losses, and u, each `[N, M]`."""
    middle = weights @ values
    variance = np.maximum(weights @ values**2 - middle**2, 0.0)
    reach = np.sqrt(2 * variance + 2 * variance.mean(axis=1, keepdims=True))
    return middle - MEAN_GAIN * reach, reach


def _compute_covariance(left: Floats, right: Floats) -> Floats:
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    return COMMON_SD**2 + LOCAL_SD**2 * np.exp(-squares / (2 * LENGTH_SCALE**2))


def compute_expected_gains(
    means: Floats, errors: Floats, front: Floats, reference: Floats
) -> Floats:
    """Compute the hypervolume that each of N normal points is expected to add, `float[N]`.

    The coordinates of the front `[F, M]` divide the space below the reference `[M]` into cells,
    each dominated by the front or not at all. A point y adds to a cell from l to u the volume of
    what lies in it above y, and objectives are independent, so with psi(u) = E[max(u - y, 0)] the
    expected gain is

        sum over cells that the front leaves free of  prod_m (psi(u_m) - psi(l_m))

    A grid with more than `MAX_CELLS` cells is rounded, so that the result is a little too high. A
    row of `means` with NaN gains 0.
    """
    inside = front[(front < reference).all(axis=1)]
    most = max(2, int(MAX_CELLS ** (1 / len(reference))) - 1)
    edges = [np.unique(column) for column in inside.T]
    # At most `most` of them, evenly, the last one included.
    edges = [e[np.linspace(0, len(e) - 1, min(len(e), most)).round().astype(int)] for e in edges]
    free = np.ones([len(edge) + 1 for edge in edges], dtype=np.bool_)
    # Cell k of an objective reaches from edge k - 1 to edge k; a point on edge k covers k + 1 on.
    corners = [
        np.searchsorted(edge, column) + 1 for edge, column in zip(edges, inside.T, strict=True)
    ]
    free[tuple(corners)] = False
    for axis in range(free.ndim):
        free = np.logical_and.accumulate(free, axis=axis)
    volumes = np.empty(0)
    for column in range(len(reference)):
        uppers = np.append(edges[column], reference[column])
        shortfalls = compute_shortfalls(uppers, means[:, column], errors[:, column])
        widths = np.diff(shortfalls, prepend=0.0)
        if column == 0:  # the largest step by far, as a product of matrices
            volumes = widths @ free.reshape(len(uppers), -1)
        else:
            volumes = np.einsum("nk,nkr->nr", widths, volumes.reshape(len(means), len(uppers), -1))
    return np.nan_to_num(volumes[:, 0])


def compute_shortfalls(bounds: Floats, means: Floats, errors: Floats) -> Floats:
    """Compute E[max(u - y, 0)] for bounds u `[K]` and normal y `[N]`, `float[N, K]`."""
    gaps, spread = bounds - means[:, None], np.maximum(errors, TINY)[:, None]
    z = gaps / spread
    return gaps * ndtr(z) + spread * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)


# The choice of a sweep


def choose_merge(
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    most_parts: int,
    *,
    with_rungs: bool = False,
) -> tuple[Part, ...] | None:
    """Choose the merge that is expected to add most hypervolume on validation prompts.

    Parents are the ends and checkpoints of trainings that were kept, even if they break a
    constraint: a merge of them may meet it. With `with_rungs`, checkpoints that are no candidates
    are parents too, by their values at the rung. Merges in any state count as tried. One that runs
    counts as if it had its predicted values, so that merges that run together differ. None if no
    merge is expected to add `WORTHWHILE`.
    """
    goals = tuple(objectives)
    known = read_merges(records, goals)
    candidates = [entry for entry in known if entry.is_measured and len(entry.mixture) == 1]
    rungs = _read_rungs(records, goals, candidates) if with_rungs else []
    policies = [*candidates, *rungs]
    tried = [entry for entry in known if len(entry.mixture) > 1]
    failed = [p for m in tried if m.record and m.record.state == "failed" for p in m.mixture]
    measured = {policy for merge in tried if merge.is_measured for policy in merge.mixture}
    damaged = {p for p in failed if failed.count(p) >= MAX_FAILURES and p not in measured}
    parents = select_parents([p for p in policies if damaged.isdisjoint(p.mixture)])
    # `keep: front` has deleted policies of a sweep that is extended.
    kept = {p.policy for p in policies if p.record and p.record.checkpoint is not None}
    mixtures = _list_next(parents, tried, kept, most_parts)
    if not mixtures:
        return None
    seen = [
        entry
        for entry in [*candidates, *tried]
        if entry.is_allowed and (entry.is_measured or (entry.record and entry.record.is_open))
    ]
    predicted = [*mixtures, *(entry.mixture for entry in seen)]
    means, errors = predict_losses(predicted, parents, [*policies, *tried])
    front = select_front(means[len(mixtures) :])
    gains = compute_expected_gains(
        means[: len(mixtures)], errors[: len(mixtures)], front, convert_references(goals)
    )
    best = int(np.argmax(np.round(gains, 12)))
    if gains[best] <= WORTHWHILE * compute_loss_hypervolume(front, goals):
        return None
    return tuple(Part(*policy, weight) for policy, weight in sorted(mixtures[best].items()))


def select_parents(policies: Sequence[Merge]) -> list[Merge]:
    """Select at most `MAX_PARENTS` on the front or within an error of it, farthest apart first.

    Only feasible ones form the front.
    """
    kept = [p for p in policies if p.record and p.record.checkpoint is not None]
    if not kept:
        return []
    losses, errors = np.array([p.losses for p in kept]), np.array([p.errors for p in kept])
    near = np.ones(len(kept), dtype=np.bool_)
    feasible = np.array([p.is_allowed for p in kept])
    for member in np.flatnonzero(mark_front(np.where(feasible[:, None], losses, np.nan))):
        margin = PARENT_Z * np.hypot(errors, errors[member])
        near &= ~((losses - losses[member] > margin).all(axis=1))
    kept, losses = [p for p, is_near in zip(kept, near, strict=True) if is_near], losses[near]
    scaled = losses / np.maximum(np.ptp(losses, axis=0), TINY)
    order = [int(np.argmin(scaled[:, 0]))]
    distances = np.full(len(kept), np.inf)
    while len(order) < min(len(kept), MAX_PARENTS):
        distances = np.minimum(distances, np.linalg.norm(scaled - scaled[order[-1]], axis=1))
        distances[order] = -1.0
        order.append(int(np.argmax(distances)))
    return [kept[index] for index in order]


def _list_next(
    parents: Sequence[Merge], tried: Sequence[Merge], kept: set[Policy], most_parts: int
) -> list[Mixture]:
    """List the merges of policies that are `kept` that may come next, none of them tried.

    They are the middles of two parents or of measured merges on the front, which bisects what was
    tried before, and groups of parents with even weights or half of the weight on one.
    """
    known = [*parents, *(merge for merge in tried if merge.is_measured and merge.is_allowed)]
    is_end = mark_front(np.array([entry.losses for entry in known])) if known else np.empty(0)
    is_end[: len(parents)] = True
    ends = [entry.mixture for entry, used in zip(known, is_end, strict=True) if used]
    ends = [mixture for mixture in ends if mixture.keys() <= kept]
    result: dict[Rounded, Mixture] = {}
    for left, right in combinations(ends, 2):
        middle = {p: (left.get(p, 0.0) + right.get(p, 0.0)) / 2 for p in left | right}
        if len(middle) <= most_parts:
            result.setdefault(round_mixture(middle), middle)
    for size in range(3, most_parts + 1):
        for group in _list_groups([parent.policy for parent in parents], size):
            for weights in list_centres(size):
                mixture = dict(zip(group, weights, strict=True))
                result.setdefault(round_mixture(mixture), mixture)
    done = {round_mixture(merge.mixture) for merge in tried}
    return [mixture for key, mixture in result.items() if key not in done]


def _list_groups(policies: Sequence[Policy], size: int) -> Iterator[tuple[Policy, ...]]:
    count = next(n for n in range(len(policies), -1, -1) if math.comb(n, size) <= MAX_GROUPS)
    return combinations(policies[:count], size)


def list_centres(size: int) -> list[tuple[float, ...]]:
    """List weights of a group: even ones, and half of the weight on each in turn."""
    half, rest = 0.5, 0.5 / (size - 1)
    equal = (1 / size,) * size
    return [equal, *(tuple(half if i == j else rest for j in range(size)) for i in range(size))]


def round_mixture(mixture: Mixture) -> Rounded:
    """Return a key for which mixtures count as equal."""
    return frozenset((policy, round(weight, 6)) for policy, weight in mixture.items())


# The choice for a wish


def list_merge_parents(
    records: Sequence[TrialRecord], metrics: Sequence[Objective]
) -> tuple[list[Merge], list[Merge]]:
    """List the policies that a wished merge may consist of, and all that was measured.

    A merge that runs counts as not measured, so that the choice stays the same until it has ended.
    """
    ended = [record for record in records if not record.is_open]
    known = [entry for entry in read_merges(ended, metrics) if entry.is_measured]
    ends = [entry for entry in known if len(entry.mixture) == 1]
    policies = [*ends, *_read_rungs(ended, metrics, ends)]
    measured = [entry for entry in policies if entry.is_measured]
    return select_parents(measured), [*measured, *(e for e in known if len(e.mixture) > 1)]


@dataclass(frozen=True)
class Aim:
    """A wish in numbers."""

    metrics: tuple[Objective, ...]
    """Metrics that are predicted; their references do not count."""
    limits: tuple[Condition, ...]
    preferences: tuple[float, ...]
    """Weight of each of `metrics` in what is maximised, at least 0 and not all 0."""

    @property
    def columns(self) -> list[int]:
        """Metric of each limit."""
        names = [metric.name for metric in self.metrics]
        return [names.index(limit.metric) for limit in self.limits]

    def compute_excess(self, losses: Floats) -> Floats:
        """Compute how far losses `[N, M]` lie beyond each limit, `[N, L]`; 0 or less keeps it."""
        signs = [1.0 if m.direction == "minimize" else -1.0 for m in self.metrics]
        gaps = (losses * signs)[:, self.columns] - [limit.limit for limit in self.limits]
        return gaps * [-1.0 if limit.is_floor else 1.0 for limit in self.limits]


@dataclass(frozen=True)
class MergeChooser:
    """Choice among merges of `parents`, given what is known of policies and merges.

    The wish is the preferred mean

        U(w) = sum_m p_m value_m(w) / span_m / sum_m p_m

    under limits of metrics. The next merge to evaluate has the largest probability of keeping every
    limit times the expected improvement of U over the best policy or merge that keeps them; while
    none does, the largest probability. Metrics count as independent.

    Source: Gardner et al. 2014, Bayesian optimization with inequality constraints, section 3.
    """

    aim: Aim
    parents: Sequence[Merge]
    """Policies that can be merged."""
    known: Sequence[Merge]
    """Measured policies, the parents among them, and measured merges."""

    def choose_next(self, most_parts: int) -> tuple[Merge, bool] | None:
        """Choose and predict the merge to evaluate next; None if every merge is evaluated.

        True with it if it may keep every limit; otherwise it is the closest to the limits.
        """
        merges = [entry for entry in self.known if len(entry.mixture) > 1]
        done = {round_mixture(entry.mixture) for entry in merges}
        mixtures = list_mixtures([parent.policy for parent in self.parents], most_parts, done)
        if not mixtures:
            return None
        count = len(mixtures)
        asked = [*mixtures, *(entry.mixture for entry in [*self.parents, *merges])]
        means, errors = predict_losses(asked, self.parents, self.known)
        excess, columns = self.aim.compute_excess(means), self.aim.columns
        spread = np.maximum(errors[:, columns], TINY)
        hopeful = (excess[:count] <= LIMIT_Z * spread[:count]).all(axis=1)
        if not hopeful.any():
            shares = np.maximum(excess[:count], 0.0) / _compute_span(self.parents)[columns]
            closest = int(np.argmin(np.round(shares.sum(axis=1), 12)))
            return Merge(mixtures[closest], means[closest], errors[closest]), False
        chance = ndtr(-excess[:count] / spread[:count]).prod(axis=1)
        value, error = self._compute_preferred(means, errors)
        kept = value[count:][(excess[count:] <= 0).all(axis=1)]
        if len(kept):
            gains = compute_shortfalls(-kept.max(keepdims=True), -value[:count], error[:count])
            chance = chance * gains[:, 0]
        best = int(np.argmax(np.where(hopeful, chance, -1.0)))
        return Merge(mixtures[best], means[best], errors[best]), True

    def _compute_preferred(self, losses: Floats, errors: Floats) -> tuple[Floats, Floats]:
        """Compute U and its standard error, each `float[N]`."""
        preferences = np.array(self.aim.preferences)
        shares = preferences / sum(self.aim.preferences) / _compute_span(self.parents)
        return -losses @ shares, np.sqrt(errors**2 @ shares**2)


def list_mixtures(
    policies: Sequence[Policy], most_parts: int, done: Collection[Rounded] = ()
) -> list[Mixture]:
    """List the merges of policies that may be chosen, without those that are `done`.

    Pairs in steps of a twentieth, threes in tenths, more with even weights or half of it on one; of
    many policies, groups of the first ones alone.
    """
    result: list[Mixture] = []
    for size in range(2, min(most_parts, len(policies)) + 1):
        shares = list_centres(size)
        if total := FINENESS.get(size):
            edges = ((0, *cuts, total) for cuts in combinations(range(1, total), size - 1))
            shares = [tuple((high - low) / total for low, high in pairwise(e)) for e in edges]
        for group in combinations(policies, 2) if size == 2 else _list_groups(policies, size):
            result += [dict(zip(group, weights, strict=True)) for weights in shares]
    return [mixture for mixture in result if round_mixture(mixture) not in done]


def rank_checkpoints(
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    is_allowed: Callable[[Mapping[str, float]], bool],
) -> list[Part]:
    """Return the kept checkpoints on the validation front, the largest contribution first.

    The contribution is the hypervolume that the front would lose without it. Checkpoints are those
    of `TrialRecord.kept_steps` whose metrics are allowed, that is, meet the constraints; ends and
    other candidates count if they are complete and feasible.
    """
    policies: list[tuple[Mapping[str, Estimate], Part | None]] = [
        (record.validation, None)
        for record in records
        if record.state == "complete" and record.feasible is not False
        if not record.is_initial
    ]
    policies += [
        (rung.validation, Part(record.number, rung.step, 1.0))
        for record in records
        if record.replicate_of is None  # the seeds of a checkpoint follow from the checkpoint
        for rung in record.rungs
        if rung.step in record.kept_steps
        if is_allowed({name: e.mean for name, e in rung.validation.items()})
    ]
    unknown = Estimate(math.nan, math.nan)
    values = np.array([[e.get(g.name, unknown).mean for g in objectives] for e, _ in policies])
    measured = np.flatnonzero(np.isfinite(values).all(axis=1)) if len(values) else []
    if not len(measured):
        return []
    gains = compute_contributions(values[measured], objectives)
    is_on_front = mark_front(compute_losses(values[measured], objectives))
    order = sorted(range(len(gains)), key=lambda index: -gains[index])
    parts = [policies[measured[i]][1] for i in order if is_on_front[i] and gains[i] > 0]
    return [part for part in parts if part is not None]


def choose_checkpoint(
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    is_allowed: Callable[[Mapping[str, float]], bool],
) -> Part | None:
    """Choose the next of `rank_checkpoints` to evaluate; None if none remains."""
    tried = {record.parts for record in records if record.role == "checkpoint"}
    ranked = rank_checkpoints(records, objectives, is_allowed)
    return next((part for part in ranked if (part,) not in tried), None)
