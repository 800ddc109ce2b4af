"""Our projection, samplers and schedulers in simulated time, driven as by a sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from problems import REDUCTION, Estimates, Problem, build_spec
from simulator import Verdict

from gdpo_tune.core.trials import Cost, Params, Rung, State, TrialRecord
from gdpo_tune.ledger import compute_violation
from gdpo_tune.spec import Search, SweepSpec
from gdpo_tune.tuning.schedulers.rungs import Rungs
from gdpo_tune.tuning.search.projection import Projection

Core = Callable[[Problem, SweepSpec], Rungs]


def build_no_rungs(problem: Problem, spec: SweepSpec) -> Rungs:
    """Build no rungs: first in, first out."""
    del problem
    return Rungs(spec.list_objectives(), ())


def build_stopping_rungs(problem: Problem, spec: SweepSpec) -> Rungs:
    """Build rungs at the problem's levels; a trial that does not continue ends there."""
    bounds = len(spec.constraints)
    return Rungs(spec.list_objectives(), problem.rungs, REDUCTION, "stop", bounds)


def build_promoting_rungs(problem: Problem, spec: SweepSpec) -> Rungs:
    """Build rungs at the problem's levels; a trial that does not continue may be promoted later."""
    bounds = len(spec.constraints)
    return Rungs(spec.list_objectives(), problem.rungs, REDUCTION, "promote", bounds)


class Product:
    """Tuner with our projection and sampler, and the core of a scheduler."""

    def __init__(self, problem: Problem, sampler: str, core: Core, trials: int, seed: int) -> None:
        """Create the tuner.

        Args:
            problem: problem to search.
            sampler: name of a sampler in the registry.
            core: builds the scheduler's rungs.
            trials: value of `search.trials`, from which samplers plan their start-up.
            seed: seed of the sweep.
        """
        self._full = problem.levels[-1]
        self._spec = build_spec(problem, Search(trials=trials, sampler=sampler, seed=seed))
        self._projection = Projection(self._spec)
        self._rungs = core(problem, self._spec)
        self._records: dict[int, TrialRecord] = {}

    def start(self, number: int) -> Params:
        """Return the sampler's proposal."""
        suggestion = self._projection.propose()
        record = TrialRecord(
            number=number,
            role="search",
            state="running",
            params=suggestion.params,
            seed=number,
            proposer=suggestion.proposer,
        )
        self._records[number] = record
        self._projection.observe(record, suggestion.sampler_state)
        return suggestion.params

    def judge(self, number: int, level: int, values: Estimates) -> Verdict:
        """Return the scheduler's verdict; the sampler learns from trials that do not continue."""
        means = [values[name].mean for name in self._spec.objectives]
        broken = [
            compute_violation(bound, values[n].mean) for n, bound in self._spec.constraints.items()
        ]
        verdict = self._rungs.record(number, level, means, broken)
        record = self._records[number]
        rung = Rung(step=level, validation=values, cost=Cost(completions=level))
        states: dict[Verdict, State] = {"continue": "running", "stop": "pruned", "pause": "paused"}
        self._change(
            replace(record, state=states[verdict], rungs=(*record.rungs, rung), cost=rung.cost)
        )
        return verdict

    def finish(self, number: int, values: Estimates) -> None:
        """Let the sampler learn from a complete trial."""
        record = self._records[number]
        rung = Rung(step=self._full, validation=values, cost=Cost(completions=self._full))
        self._change(
            replace(
                record,
                state="complete",
                validation=values,
                test=values,
                rungs=(*record.rungs, rung),
                cost=rung.cost,
            )
        )

    def promote(self) -> int | None:
        """Return the trial that the scheduler promotes."""
        number = self._rungs.find_promotable()
        if number is not None:
            self._rungs.promote(number)
            self._change(replace(self._records[number], state="running"))
        return number

    def compute_model_share(self) -> float:
        """Compute the share of the trials that the sampler's model proposed."""
        return sum(r.proposer == "model" for r in self._records.values()) / len(self._records)

    def _change(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        self._projection.observe(record)
