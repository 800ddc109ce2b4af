"""The training to continue: what more steps of each are expected to add to the front.

A training that waits at a rung of s steps was measured there and at rungs before it. After t steps
an objective, as a loss y, is expected at

    y(t) = y(s) + LASTING (y(s) - y(r)) log(t / s) / log(s / r)

where r is the rung before. At the first rung, its next doubling brings half of the change since the
untrained policy. What counts is the hypervolume of the front *with its merges*: a training that is
dominated everywhere may still be the end of a line of merges that are not.

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

LASTING = 0.7
"""Share of the change of one doubling that the next one brings."""
FIRST = 0.5
"""Share of the change since the untrained policy that a doubling after the first rung brings."""
DRAWS = 64
"""Draws of all measurements, for the noise of the hypervolume."""


@dataclass(frozen=True)
class Continuation:
    """A training that may go on."""

    number: int
    step: int
    """Steps at the end of its next part."""
    gain: float
    """Hypervolume that the part is expected to add to the front with its merges."""
    rate: float
    """`gain` a step."""


@dataclass(frozen=True)
class Outlook:
    """What the trainings of a sweep are expected to add by going on."""

    continuations: tuple[Continuation, ...]
    """Those that wait, the largest `rate` first."""
    total: float
    """Hypervolume that all of their next parts together add."""
    noise: float
    """Standard error of the hypervolume of the front with its merges, from its evaluations."""

    @property
    def is_worthwhile(self) -> bool:
        """True if going on moves the front by more than its noise."""
        return bool(self.continuations) and self.total > self.noise


def estimate_outlook(
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    waiting: Mapping[int, int],
    running: Mapping[int, int],
    *,
    merges: bool,
) -> Outlook:
    """Estimate what trainings add: number -> steps at the end of the next part of each.

    Those that are `running` count as if they had ended it. Without `merges`, only trained policies
    join the front. Trainings that failed, were stopped, or are not comparable do not count.
    """
    untrained = next((r for r in records if r.role == "untrained" and r.validation), None)
    start = None if untrained is None else read_merge(untrained, {}, objectives).losses
    now: dict[int, Merge] = {}
    later: dict[int, Merge] = {}
    for record in records:
        if record.role not in ("search", "published") or not record.rungs:
            continue
        if not record.is_comparable or record.state in ("failed", "pruned"):
            continue
        steps = [rung.step for rung in record.rungs]
        measured = [
            read_merge(replace(record, validation=rung.validation), {}, objectives)
            for rung in record.rungs[-2:]
        ]
        entry = Merge({(record.number, steps[-1]): 1.0}, measured[-1].losses, measured[-1].errors)
        if not entry.is_measured:
            continue
        now[record.number] = entry
        target = waiting.get(record.number) or running.get(record.number)
        if target is not None and target > steps[-1]:
            doublings = math.log2(target / steps[-1])
            if len(steps) > 1:
                change = LASTING * (entry.losses - measured[0].losses)
                change = change / math.log2(steps[-1] / steps[-2])
            else:
                change = FIRST * (entry.losses - (entry.losses if start is None else start))
            mixture = {(record.number, target): 1.0}
            later[record.number] = replace(
                entry, mixture=mixture, losses=entry.losses + doublings * change
            )
    if not now:
        return Outlook((), 0.0, 0.0)
    soon = [*now.values(), *(later[n] for n in running if n in later)]
    volume = predict_volume(soon, objectives, merges=merges)
    found: list[Continuation] = []
    for number in waiting.keys() & later.keys():
        gain = predict_volume([*soon, later[number]], objectives, merges=merges) - volume
        steps = waiting[number] - now[number].policy[1]
        found.append(Continuation(number, waiting[number], gain, gain / steps))
    found.sort(key=lambda c: (-c.rate, c.step, c.number))
    everything = [*soon, *(later[c.number] for c in found)]
    return Outlook(
        tuple(found),
        predict_volume(everything, objectives, merges=merges) - volume,
        _estimate_noise(soon, objectives, merges=merges),
    )


def predict_volume(
    policies: Sequence[Merge], objectives: Sequence[Objective], *, merges: bool
) -> float:
    """Predict the hypervolume of policies together with merges of two and three of them."""
    mixtures = _list_blends(policies) if merges else [p.mixture for p in policies]
    means, _ = predict_losses(mixtures, policies, policies)
    return compute_loss_hypervolume(select_front(means), objectives)


def _list_blends(policies: Sequence[Merge]) -> list[dict[tuple[int, int], float]]:
    names = [entry.policy for entry in policies]
    blends = [{name: 1.0} for name in names]
    for left, right in combinations(names, 2):
        blends += [{left: share, right: 1 - share} for share in (0.25, 0.5, 0.75)]
    for group in combinations(names, 3):
        blends += [dict(zip(group, shares, strict=True)) for shares in list_centres(3)]
    return blends


def _estimate_noise(
    policies: Sequence[Merge], objectives: Sequence[Objective], *, merges: bool
) -> float:
    random = np.random.default_rng(0)  # equal records give equal decisions
    volumes: list[float] = []
    for _ in range(DRAWS):
        drawn = [replace(p, losses=_draw(random, p)) for p in policies]
        volumes.append(predict_volume(drawn, objectives, merges=merges))
    return float(np.std(volumes))


def _draw(random: np.random.Generator, entry: Merge) -> Floats:
    return entry.losses + entry.errors * random.standard_normal(len(entry.losses))
