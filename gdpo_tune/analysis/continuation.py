"""The training to continue: what more steps of each are expected to add to the front.

A training that waits at a rung was measured there and at rungs before it. The change that the last
doubling of its steps brought is expected of the next one too, but for a part that is lost:
`LASTING` of it remains, and as much of that for the doubling after. At the first rung, the next
doubling brings half of the change since the untrained policy. Evaluations are noisy, so the next to
go on is the one whose gain is largest if every objective gets better by a standard error more than
expected (as in UCB): what was measured poorly is not left behind for long. What counts is the
hypervolume of the front *with its merges*: a training that is dominated everywhere may still be the
end of a line of merges that are not.

All values are losses on validation prompts; M objectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from gdpo_tune.analysis.merge_choice import Merge, list_centres, predict_losses, read_merge
from gdpo_tune.analysis.pareto import Floats, compute_loss_hypervolume, select_front
from gdpo_tune.core.trials import Objective, TrialRecord

GROWING = ("search", "published")
"""Roles of trainings that may be continued."""
LASTING = 0.7
"""Share of the change of one doubling that the next one brings."""
FIRST = 0.5
"""Share of the change since the untrained policy that a doubling after the first rung brings."""
EARLIER = 0.6
"""Largest share of the steps at which an earlier rung tells the course, and not the noise."""
DRAWS = 64
"""Draws of all measurements, for the noise of the hypervolume."""


@dataclass(frozen=True)
class Continuation:
    """A training that may go on."""

    number: int
    step: int
    """Steps at the end of its next part."""
    rate: float
    """Hypervolume a step that the part may add to the front with its merges."""


@dataclass(frozen=True)
class Outlook:
    """Expected gain of continuing the trainings of a sweep."""

    continuations: tuple[Continuation, ...]
    """Those that wait: first what has been measured only once, then the largest `rate`."""
    total: float
    """Hypervolume that they add together with all that the budget has left."""
    noise: float
    """Standard error of the hypervolume of the front with its merges, on test prompts."""
    fits: bool = False
    """True if the budget pays for the next part of any."""
    is_early: bool = False
    """True if one of them has been measured only once: a slow start is no sign of an end."""

    @property
    def is_worthwhile(self) -> bool:
        """True if going on moves the front by more than its noise."""
        return bool(self.continuations) and (self.is_early or self.total > self.noise)

    def explain_end(self) -> str:
        """Explain why no training goes on."""
        if not self.fits:
            return "no next part fits into what is left of the budget"
        return (
            f"more steps are expected to add {self.total:.2g} to the hypervolume of the front with "
            f"its merges, whose noise is {self.noise:.2g}"
        )


def estimate_outlook(
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    waiting: Mapping[int, int],
    running: Mapping[int, int],
    doublings: float,
    *,
    merges: bool,
    precision: float = 1.0,
) -> Outlook:
    """Estimate what trainings add: number -> steps at the end of the next part of each.

    Those that are `running` count as if they had ended it. `doublings` of the steps of all waiting
    ones is what the budget pays for. Without `merges`, only trained policies join the front.
    `precision` is the number of test prompts for each validation prompt.
    Trainings that failed, were stopped, or are not comparable do not count.
    """
    untrained = next((r for r in records if r.role == "untrained" and r.validation), None)
    start = None if untrained is None else read_merge(untrained, {}, objectives)
    courses = {
        record.number: _read_course(record, objectives, start)
        for record in records
        if record.role in GROWING and record.rungs
        if record.is_comparable and record.state not in ("failed", "pruned")
    }
    courses = {number: c for number, c in courses.items() if c.last.is_measured}
    if not courses:
        return Outlook((), 0.0, 0.0)
    soon = [
        course.extend(running[number]) if number in running else course.last
        for number, course in courses.items()
    ]
    growing = {number: courses[number] for number in sorted(waiting.keys() & courses.keys())}
    hoped = {n: course.extend(waiting[n], hopes=True) for n, course in growing.items()}
    farthest = [
        course.extend(max(waiting[number], round(course.step * 2**doublings)))
        for number, course in growing.items()
    ]
    # one scale for all, so that a further policy never makes the others look worse
    scale = [*soon, *hoped.values(), *farthest]

    def measure(*more: Merge) -> tuple[Floats, float]:
        front = predict_front([*soon, *more], scale, merges=merges)
        return front, compute_loss_hypervolume(front, objectives)

    front, volume = measure()
    found: list[Continuation] = []
    for number, course in growing.items():
        gain = measure(hoped[number])[1] - volume
        if gain > 0 or not course.is_known:
            rate = gain / (waiting[number] - course.step)
            found.append(Continuation(number, waiting[number], rate))
    found.sort(key=lambda c: (courses[c.number].is_known, -c.rate, c.step, c.number))
    return Outlook(
        tuple(found),
        measure(*farthest)[1] - volume,
        _estimate_noise(front, soon, objectives, precision),
        bool(waiting),
        any(not courses[c.number].is_known for c in found),
    )


@dataclass(frozen=True)
class _Course:
    """Where a training is, and what the next doubling of its steps is expected to change."""

    last: Merge
    change: Floats
    doubt: Floats
    """Standard error of `change`."""
    is_known: bool
    """False if it was not measured at about half of its steps."""

    @property
    def step(self) -> int:
        return self.last.policy[1]

    def extend(self, step: int, *, hopes: bool = False) -> Merge:
        """Predict the training at more steps; `hopes`: each objective by an error better."""
        doublings = max(0.0, math.log2(step / self.step))
        # 1 + LASTING + LASTING^2 + ..., continued to parts of a doubling
        factor = (1 - LASTING**doublings) / (1 - LASTING)
        mixture = {(self.last.policy[0], step): 1.0}
        change = self.change - self.doubt if hopes else self.change
        return replace(self.last, mixture=mixture, losses=self.last.losses + factor * change)


def _read_course(
    record: TrialRecord, objectives: Sequence[Objective], start: Merge | None
) -> _Course:
    end = record.rungs[-1]
    before = [rung for rung in record.rungs if rung.step <= EARLIER * end.step]
    last = read_merge(
        replace(record, validation=end.validation), {(record.number, end.step): 1.0}, objectives
    )
    if before:
        earlier = read_merge(replace(record, validation=before[-1].validation), {}, objectives)
        share = LASTING / math.log2(end.step / before[-1].step)
    else:
        earlier, share = last if start is None else start, FIRST
    change = share * (last.losses - earlier.losses)
    doubt = share * np.hypot(last.errors, earlier.errors)
    # the published setting is a baseline: it goes on only for what it promises
    return _Course(last, change, doubt, bool(before) or record.role == "published")


def predict_front(policies: Sequence[Merge], scale: Sequence[Merge], *, merges: bool) -> Floats:
    """Predict the front `[F, M]` of policies together with merges of two and three of them.

    The policies of `scale` give the span of each objective.
    """
    mixtures = _list_blends(policies) if merges else [p.mixture for p in policies]
    means, _ = predict_losses(mixtures, scale, policies)
    return select_front(means)


def _list_blends(policies: Sequence[Merge]) -> list[dict[tuple[int, int], float]]:
    names = [entry.policy for entry in policies]
    blends = [{name: 1.0} for name in names]
    for left, right in combinations(names, 2):
        blends += [{left: share, right: 1 - share} for share in (0.25, 0.5, 0.75)]
    for group in combinations(names, 3):
        blends += [dict(zip(group, shares, strict=True)) for shares in list_centres(3)]
    return blends


def _estimate_noise(
    front: Floats, policies: Sequence[Merge], objectives: Sequence[Objective], precision: float
) -> float:
    """Estimate the error of a front whose members are evaluated as precisely as `policies`."""
    random = np.random.default_rng(0)  # equal records give equal decisions
    errors = np.mean([policy.errors for policy in policies], axis=0) / math.sqrt(precision)
    volumes = [
        compute_loss_hypervolume(front + errors * random.standard_normal(front.shape), objectives)
        for _ in range(DRAWS)
    ]
    return float(np.std(volumes))
