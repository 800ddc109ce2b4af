"""Population-based training: the last members of each generation take over from the first.

Every member runs up to the next sync step, in turns if there are fewer slots than members. Then its
process ends, and it waits with a checkpoint. Once all wait, the generation is decided and recorded,
checkpoints are copied, and all continue. So decisions depend only on the values, the seed, the step
and the members' numbers: not on the speed of trials, the number of slots, or kills of the driver.

At a sync step the last members (`quantile` of them) each take over the training of one of the first
ones, drawn at random. They continue with new values: each value of the donor is either drawn again
from its domain, or multiplied by one of a few factors and clamped to the domain. Members are
ordered by the constraints, then front by front, and within a front the more crowded one is later.

To take over is to copy the donor's checkpoint. The member's `schedule.json` is written last, so
that a copy that was interrupted is noticed and repeated.

Source: Jaderberg et al. 2017, Population based training of neural networks; Dushatskiy et al. 2023,
Multi-objective population based training; crowding: Deb et al. 2002, NSGA-II, section III.B.

Shapes: T members, M objectives, C constraints.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gdpo_tune.analysis.front import trace_training
from gdpo_tune.analysis.pareto import Floats, compute_losses
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trial_config import MUTABLE_WHILE_TRAINING, Params, ParamValue
from gdpo_tune.core.trial_files import SCHEDULE_FILE
from gdpo_tune.core.trials import Exploit, Generation, Objective, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.sweep_store import SweepStore
from gdpo_tune.spec import Choices, PbtSettings, Uniform
from gdpo_tune.training.checkpoints import adopt_checkpoint, find_newest_checkpoint, remove_all_but
from gdpo_tune.tuning.schedulers import (
    Scheduler,
    Verdict,
    compute_ranks,
    read_values,
    sum_violations,
)
from gdpo_tune.tuning.startup import map_share

MovableDomain = Choices | Uniform


class Pbt(Scheduler):
    """Scheduler whose members wait for one another; baselines and replicates run to their end.

    Once started, a population runs to its end: halfway it has no finished policy.
    """

    promotes_beyond_budget = True
    ends_at_evaluations = True

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._spec, settings = ledger.spec, ledger.spec.search.scheduler
        assert isinstance(settings, PbtSettings)
        self._settings = settings
        self._sync_steps = settings.list_sync_steps(self._spec.training.steps)
        searched = self._spec.space.searched_domains.items()
        self._domains = {
            name: domain for name, domain in searched if name.startswith(MUTABLE_WHILE_TRAINING)
        }

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the sync steps at which a member's generation is not decided yet."""
        if record.role != "member":
            return ()
        last = self._ledger.find_last_sync_step(record.number)
        return tuple(step for step in self._sync_steps if step > last)

    def decide(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Let a member wait at each coming sync step."""
        return "pause" if rung.step in self.list_evaluation_steps(record) else "continue"

    def find_promotable(self, *, alone: bool = False) -> int | None:
        """Return a member of a decided generation; once all members wait, decide the next one."""
        members = [record for record in self._ledger.get_records() if record.role == "member"]
        waits_at: dict[int, int] = {}
        free: list[int] = []
        for record in members:
            if record.state == "paused":
                coming = self.list_evaluation_steps(record)
                step = max((r.step for r in record.rungs if r.step in coming), default=None)
                if step is None:
                    free.append(record.number)
                else:
                    waits_at[record.number] = step
        is_running = any(record.state == "running" for record in members)
        if alone and waits_at and not free and not is_running:
            # at the earliest step: others joined later, or are ahead
            step = min(waits_at.values())
            together = [r for r in members if waits_at.get(r.number) == step]
            free = list(self._decide_generation(step, together).members)
        return min(free, default=None)

    def _decide_generation(self, step: int, members: Sequence[TrialRecord]) -> Generation:
        standings: list[MemberStanding] = []
        for record in members:
            rung = next(rung for rung in record.rungs if rung.step == step)
            values, violations = read_values(self._ledger.spec, rung)
            training = trace_training(self._ledger.get_records(), record.number)
            params = dict(training.params)
            for segment in training.schedule:
                params |= self._spec.space.align(segment.params)
            active = self._spec.space.select_active(training.params)
            movable = {name: params[name] for name in self._domains if name in active}
            standings.append(MemberStanding(record.number, values, movable, violations))
        objectives, seed = self._spec.list_objectives(), self._spec.search.seed
        exploits = decide_exploits(step, standings, objectives, self._domains, self._settings, seed)
        generation = Generation(step, tuple(s.number for s in standings), exploits)
        self._ledger.record_generation(generation)
        for exploit in exploits:
            apply_exploit(self._ledger, exploit)
        return generation


@dataclass(frozen=True)
class MemberStanding:
    """Measurements and parameters of a member at a sync step."""

    number: int
    values: tuple[float, ...]
    """M, in the units and directions of the objectives."""
    params: Params
    """Present values of the movable parameters that are searched and have an effect."""
    violations: tuple[float, ...] = ()
    """C; 0 or less: the constraint is met."""


def decide_exploits(
    step: int,
    members: Sequence[MemberStanding],
    objectives: Sequence[Objective],
    domains: Mapping[str, MovableDomain],
    settings: PbtSettings,
    seed: int,
) -> tuple[Exploit, ...]:
    """Decide which of the T members, in any order, take over from which donors.

    `domains` are those of the movable parameters, and `seed` is the sweep's.

    Returns:
        Exploits by number of the member that takes over. None of these members is a donor. A
        population of one has no exploit; any other has at least one.
    """
    ranked = order_members(members, objectives)
    count = min(len(ranked) // 2, max(1, int(settings.quantile * len(ranked))))
    exploits: list[Exploit] = []
    for member in sorted(ranked[len(ranked) - count :], key=lambda standing: standing.number):
        # a random stream for each member, so that it does not depend on the number of others
        rng = np.random.default_rng([seed, step, member.number])
        donor = ranked[int(rng.integers(count))]
        params = explore(donor.params, domains, settings, rng)
        exploits.append(Exploit(member.number, donor.number, step, params))
    return tuple(exploits)


def order_members(
    members: Sequence[MemberStanding], objectives: Sequence[Objective]
) -> list[MemberStanding]:
    """Order members, whose values are finite, from first donor to last; equal ones by number."""
    if not members:
        return []
    members = sorted(members, key=lambda member: member.number)
    points = compute_losses([member.values for member in members], objectives)
    violations = np.array([member.violations for member in members], dtype=float)
    total = sum_violations(violations.reshape(len(members), -1))
    rank = compute_ranks(points, total)
    distance = np.zeros(len(members))
    feasible = np.flatnonzero(total == 0)
    for front in np.unique(rank[feasible]):
        rows = feasible[rank[feasible] == front]
        distance[rows] = compute_crowding(points[rows])
    return [members[row] for row in np.lexsort((-distance, rank, total))]


def compute_crowding(front: Floats) -> NDArray[np.float64]:
    """Compute the crowding distance of each member of a front, `float[T]`.

    It is the sum over objectives of the distance between the next better and the next worse member,
    as a share of the front's range. The best and the worst of an objective get infinity. An
    objective in which all are equal does not count.
    """
    distance = np.zeros(len(front))
    for column in front.T:
        spread = float(np.ptp(column))
        if not spread:
            continue
        order = np.argsort(column, kind="stable")
        distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / spread
        distance[order[[0, -1]]] = np.inf
    return distance


def explore(
    params: Params,
    domains: Mapping[str, MovableDomain],
    settings: PbtSettings,
    rng: np.random.Generator,
) -> dict[str, ParamValue]:
    """Return new values for the movable parameters, each within its domain."""
    return {
        name: map_share(domains[name], float(rng.random()))
        if rng.random() < settings.resample
        else perturb(float(value), float(rng.choice(settings.factors)), domains[name])
        for name, value in params.items()
    }


def perturb(value: float, factor: float, domain: MovableDomain) -> ParamValue:
    """Return a number times a factor, clamped to its domain.

    In a domain that lists its values, return the next one in the factor's direction.
    """
    listed = domain.list_values()
    if listed is None:
        assert isinstance(domain, Uniform)  # a choice always lists its values
        return min(max(value * factor, float(domain.low)), float(domain.high))
    numbers = sorted(listed, key=float)
    index = bisect_left(numbers, value, key=float)
    if factor > 1:
        index += index < len(numbers) and numbers[index] == value
    elif factor < 1:
        index -= 1
    return numbers[min(max(index, 0), len(numbers) - 1)]


def apply_exploit(ledger: Ledger, exploit: Exploit) -> None:
    """Let a member continue from its donor's checkpoint.

    If the donor's checkpoint of that step is damaged, the one before it is copied, or none: the
    member's schedule leads to the same state.

    Raises:
        DiskFullError: there is no room for the checkpoint.
    """
    directory = ledger.get_trial_directory(exploit.member)
    if ledger.spec.address:
        store = SweepStore(ledger.spec)
        store.copy_checkpoint(exploit.donor, exploit.member)
        store.upload_file(write_schedule(ledger, exploit.member))
        return
    source = find_newest_checkpoint(ledger.get_trial_directory(exploit.donor))
    if source is None:
        remove_all_but(directory, None)
    else:
        adopt_checkpoint(source, directory)
    write_schedule(ledger, exploit.member)


def finish_exploits(ledger: Ledger) -> None:
    """Apply the exploits that were decided but, as the member's schedule shows, interrupted."""
    for record in ledger.get_records():
        if record.state != "paused" or not record.lineage:
            continue
        if record.rungs[-1].step > record.lineage[-1].step:
            continue  # it has trained since
        file = ledger.get_trial_directory(record.number) / SCHEDULE_FILE
        schedule = render_schedule(ledger, record.number)
        if not file.exists() or file.read_text(encoding="utf-8") != schedule:
            apply_exploit(ledger, record.lineage[-1])


def write_schedule(ledger: Ledger, number: int) -> Path:
    """Write the training that a member's policy comes from; return the file."""
    directory = ledger.get_trial_directory(number)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / SCHEDULE_FILE, render_schedule(ledger, number))
    return directory / SCHEDULE_FILE


def render_schedule(ledger: Ledger, number: int) -> str:
    """Render a member's training as JSON, with the donor of each part of it."""
    records = ledger.get_records()
    training = trace_training(records, number)
    lineage = [{"step": e.step, "donor": e.donor} for e in records[number].lineage]
    return json.dumps({"trial": number, **asdict(training), "lineage": lineage}, indent=1)
