"""The first configurations of a sweep, and how a budget is divided between many and few.

Without merges the first configurations cover the space evenly. With merges they span it: a merge is
about as good as what lies between its parents, so the parents have to lie at the corners of what
can be traded. First all searched reward weights have the largest value of their range. The centre
comes next, then each weight in turn, from the last one on, has its largest and the others their
least.

A merge moves no further from the initial policy than its parents did. So these points have a
learning rate near the upper end of its range, and, if it is searched, a normalization mode that
normalises every reward by itself: else a reward with a wide range outweighs any weight.

Where a budget is divided (`halving`), the wide rung has to answer for every choice. So further
points follow until each choice of each dimension has begun twice; the sampler's model proposes the
others. All train to one short first rung, together for `wide_share` of the budget.

Source: Rame et al. 2023, Rewarded soups, arXiv 2306.04488; docs/search.md compares designs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from gdpo_tune.core import registry
from gdpo_tune.core.metrics import HOUR
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trials import Params, ParamValue, Rung, TrialRecord
from gdpo_tune.spec.model import FULL_TRAININGS, HalvingSettings, SweepSpec
from gdpo_tune.spec.space import Choices, Uniform

WEIGHTS = "reward_weights."
UNKNOWN_BUDGET = 8
"""Part of the bound at which trainings first wait where the budget is not in completions."""
EVALUATED = 0.3
"""Share of the first rung's completions that its evaluation may cost, where a budget allows it."""
TRAININGS_PER_CHOICE = 2
"""Least number of times that each choice begins in the wide rung."""
FROM_MODEL = 4
"""Least number of configurations of a whole wide rung that a model proposes."""
MOST_COVERING = 64
"""Most points that cover choices: conditions may forbid some combinations."""
RATE = "learning_rate"
MODE = "normalization"
SPANNED = 3
"""Spanning points of one searched weight, which all train long."""
GROWING = ("search", "published")
"""Roles of the trainings that wait at the wide rung, and may go on from there."""
UPPER_SHARE = 0.1
"""Upper part of the learning rate's range, on its own scale, from which corners take it."""
GOLDEN = 0.6180339887498949
"""Its multiples, without their whole parts, are spread evenly, however many there are."""


def draw_startup_point(spec: SweepSpec, index: int) -> dict[str, ParamValue]:
    """Draw start-up point `index`: a value for every dimension, without conditions."""
    point, spanning = draw_point(spec, index), list_spanning_weights(spec)
    if spec.search.is_divided:
        points = list_startup_choices(spec)
        point.update(points[index] if index < len(points) else {})
    if index >= len(spanning):
        return point
    rate = spec.space.searched_domains.get(RATE)
    if isinstance(rate, Uniform):
        point[RATE] = map_share(rate, 1 - UPPER_SHARE * (index * GOLDEN % 1))
    return {**point, **choose_spanning_mode(spec), **spanning[index]}


def choose_spanning_mode(spec: SweepSpec) -> dict[str, ParamValue]:
    """Return the first searched mode that normalises each reward by itself; empty without one."""
    modes = spec.space.searched_domains.get(MODE)
    for mode in modes.choices if isinstance(modes, Choices) else ():
        info = registry.NORMALIZATIONS[str(mode)]
        if info.divides_by_group_std and not info.sums_first:
            return {MODE: mode}
    return {}


@lru_cache(maxsize=4)  # the plan asks again and again
def list_startup_choices(spec: SweepSpec) -> tuple[dict[str, ParamValue], ...]:
    """Return the choices of the start-up points of a divided budget, from the first on.

    The points that span what can be traded come first, then as many as each choice of each
    dimension needs to begin `TRAININGS_PER_CHOICE` times, the published setting and `enqueue:`
    counted. Each point takes the choices that are short, of these the ones that met least often.
    """
    space, begun = spec.space, Counter[tuple[str, ParamValue]]()
    met, points = Counter[frozenset[tuple[str, ParamValue]]](), list[dict[str, ParamValue]]()
    dimensions = {n: d for n, d in space.searched_domains.items() if isinstance(d, Choices)}

    def count(point: Params) -> None:
        active = space.select_active(point)
        taken = [(n, point[n]) for n in dimensions if n in active and n in point]
        begun.update(taken)
        met.update(frozenset((one, other)) for one in taken for other in taken)

    count(space.complete_baseline(load_task_info(spec.task, space.domains).published))
    for enqueued in spec.enqueue:
        count(enqueued)
    spanning = list_spanning_weights(spec)
    while len(points) < max(len(spanning), MOST_COVERING):
        if (
            len(points) >= len(spanning)
            and min(
                (begun[n, c] for n, d in dimensions.items() for c in d.choices),
                default=TRAININGS_PER_CHOICE,
            )
            >= TRAININGS_PER_CHOICE
        ):
            break
        point: dict[str, ParamValue] = {}
        if len(points) < len(spanning):
            point = {**choose_spanning_mode(spec), **spanning[len(points)]}
        for name, domain in dimensions.items():
            if name in point or name not in space.select_active(point):
                continue
            ranks = [
                (
                    min(begun[name, choice] - TRAININGS_PER_CHOICE, 0),
                    sum(met[frozenset(((name, choice), taken))] for taken in point.items()),
                    begun[name, choice],
                    index,
                )
                for index, choice in enumerate(domain.choices)
            ]
            point[name] = domain.choices[min(ranks)[-1]]
        points.append(point)
        count(point)
    return tuple(points)


def draw_point(spec: SweepSpec, index: int) -> dict[str, ParamValue]:
    """Draw point `index` of the sweep's Sobol sequence, as `draw_startup_point`."""
    # not at the top: these take a second, and refusing a spec needs no point
    import numpy as np
    from scipy.stats import qmc

    domains = spec.space.searched_domains
    sequence = qmc.Sobol(len(domains), rng=np.random.default_rng(spec.search.seed))
    if index:
        sequence.fast_forward(index)
    shares = sequence.random(1)[0]
    return {
        name: map_share(domain, float(share))
        for (name, domain), share in zip(domains.items(), shares, strict=True)
    }


def map_share(domain: Choices | Uniform, share: float) -> ParamValue:
    """Return the value at `share` (from 0 to 1) of a domain, on the domain's own scale."""
    values = domain.list_values()
    if values is not None and not (isinstance(domain, Uniform) and domain.log):
        return values[min(len(values) - 1, int(share * len(values)))]
    assert isinstance(domain, Uniform)  # a choice always lists its values
    if not domain.log:
        return min(domain.high, domain.low + share * (domain.high - domain.low))
    if not domain.integer:  # rounding may lead past the end of the range
        return min(domain.high, domain.low * math.exp(share * math.log(domain.high / domain.low)))
    low, high = domain.low - 0.5, domain.high + 0.5  # so that each integer owns its rounding range
    return min(int(domain.high), max(int(domain.low), round(low * (high / low) ** share)))


def list_spanning_weights(spec: SweepSpec) -> list[dict[str, ParamValue]]:
    """Return the reward weights of the first points: the corners, with the centre as second."""
    corners = list_corners(spec)
    if not corners:
        return []
    centre = {name: spec.space.searched_domains[name].find_middle() for name in corners[0]}
    return [corners[0], centre, *corners[1:]]


def list_long_weights(spec: SweepSpec) -> list[dict[str, ParamValue]]:
    """Return the reward weights that train long beside the published setting.

    Of several searched weights the last corner is left out: the published setting takes its place.
    """
    spanning = list_spanning_weights(spec)
    return spanning[:-1] if len(spanning) > SPANNED else spanning


def list_corners(spec: SweepSpec) -> list[dict[str, ParamValue]]:
    """Return the corners of the searched reward weights; none without merges.

    If every one of several weights is searched, the point with all weights at their maximum is left
    out: only ratios matter.
    """
    weights = {n: d for n, d in spec.space.searched_domains.items() if n.startswith(WEIGHTS)}
    if not weights or not spec.has_candidates or not spec.search.merges.budget:
        return []
    least: dict[str, ParamValue] = {}
    largest: dict[str, ParamValue] = {}
    for name, domain in weights.items():
        if isinstance(domain, Uniform):
            least[name], largest[name] = domain.low, domain.high
        else:
            values = sorted(domain.choices, key=float)
            least[name], largest[name] = values[0], values[-1]
    if len(weights) == 1:
        return [largest, least]
    singles = [{**least, name: high} for name, high in reversed(largest.items())]
    has_anchor = any(n.startswith(WEIGHTS) and n not in weights for n in spec.space.domains)
    return [largest, *singles] if has_anchor else singles


def count_least_wide(spec: SweepSpec) -> int:
    """Count the configurations that the wide rung needs, without the published setting."""
    enqueued = len({tuple(sorted(point.items())) for point in spec.enqueue})
    return enqueued + max(1, len(list_startup_choices(spec)))


def count_wide(spec: SweepSpec, records: Sequence[TrialRecord] = ()) -> int:
    """Count the configurations of the wide rung, without the published setting.

    They are twice as many as effects are asked for, one of each further choice and of each range,
    or fewer where the budget would make their rungs shorter than their evaluations allow. What a
    rung costs in hours is known from the one of the published setting among the records.
    """
    if spec.search.trials:
        return spec.search.trials
    least, domains = count_least_wide(spec), spec.space.searched_domains.values()
    effects = sum(len(d.choices) - 1 if isinstance(d, Choices) else 1 for d in domains)
    values = [domain.list_values() for domain in domains]
    distinct = math.prod(math.inf if each is None else len(each) for each in values)
    whole = int(max(least, min(distinct, max(least + FROM_MODEL, 2 * effects))))
    settings, budget, training = spec.search.scheduler, spec.search.budget, spec.training
    assert isinstance(settings, HalvingSettings)
    affordable = float(whole)
    if spec.search_completions:
        shortest = training.validation_completions / EVALUATED
        affordable = settings.wide_share * spec.search_completions / shortest - 1
    published = (r for r in records if r.role == "published" and r.paused_at)
    if (first := next(published, None)) and (rung := find_wide_rung(spec, records, first)):
        hours = rung.cost.seconds / HOUR
        for limit, each in (
            (budget.hours, hours),
            (budget.gpu_hours, hours * spec.resources.total_gpus),
        ):
            if limit and each:
                affordable = min(affordable, settings.wide_share * limit / each - 1)
    return max(least, min(whole, int(affordable)))


def find_wide_step(spec: SweepSpec, records: Sequence[TrialRecord] = ()) -> int:
    """Return the steps of the wide rung: those at which the first trials wait, if any do."""
    growing = [r for r in records if r.role in GROWING and r.paused_at]
    first = min((record.paused_at for record in growing), default=0)  # evaluations may come before
    for rung in (rung for record in growing for rung in record.rungs):
        if rung.completions == first:
            return rung.step
    settings, budget = spec.search.scheduler, spec.search_completions
    assert isinstance(settings, HalvingSettings)
    if not budget:
        return max(1, spec.training.steps // UNKNOWN_BUDGET)
    affordable = settings.wide_share * budget / spec.training.completions_per_step
    return max(1, min(spec.training.steps, int(affordable / (count_wide(spec) + 1))))


def find_wide_rung(
    spec: SweepSpec, records: Sequence[TrialRecord], record: TrialRecord
) -> Rung | None:
    """Return the wide rung of a trial; None if it was not measured there."""
    step = find_wide_step(spec, records)
    return next((rung for rung in record.rungs if rung.step == step), None)


def divide_budget(
    spec: SweepSpec, measured: int, begun: int = 0, records: Sequence[TrialRecord] = ()
) -> tuple[int, int]:
    """Return how many trainings are long, and the steps that the budget pays for of each.

    `measured` trainings have been at the wide rung, and `begun` of the long ones are new. They are
    more than the published setting and the corners where the budget would pay for more than
    `training.steps` of each.
    """
    first, longest = find_wide_step(spec, records), spec.training.steps
    least = min(measured + begun, max(FULL_TRAININGS - 1, len(list_long_weights(spec)) + 1))
    if not spec.search_completions:
        return least, longest
    left = spec.search_completions // spec.training.completions_per_step - measured * first
    count = max(least, min(measured + begun, left // max(1, longest - first)))
    ended = [r.last_step or 0 for r in records if r.role in GROWING and r.state == "complete"]
    if ended:  # what an extended budget adds has the length of what is there
        return count, max(ended)
    return count, max(first + 1, min(longest, (left + (count - begun) * first) // count))
