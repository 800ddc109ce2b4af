"""CPU seconds to restart a killed sweep, before any process is started.

    python benchmarks/restart_cost.py [--trials 1000 2000 4000 8000] [--small]

A sweep of `search_spaces/code.yaml` with the real ledger and the real scheduler, in which trials
are evaluated in simulated time on 200 slots. It is killed when `--trials` of twice as many trials
exist. Under `fifo` all others than those on slots have ended by then, under `halving` they wait at
the wide rung. Then the benchmark opens the ledger and rebuilds the lifecycle from it, up to its
first answer.

Printed: seconds of the ledger, of the lifecycle, and of both with the first answer. The
last line is JSON.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from harness import load_space, print_table, run, time_cpu

from gdpo_tune.core import registry
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, first_trials
from gdpo_tune.spec.model import HalvingSettings
from gdpo_tune.tuning.attempts import RunSettings
from gdpo_tune.tuning.lifecycle import Lifecycle
from gdpo_tune.tuning.schedulers import Scheduler

STEPS, WIDE_STEP = 120, 14
"""Steps of a trial, and of the wide rung."""
COMPLETIONS = 64
"""Completions of a step."""


def build_scheduler(ledger: Ledger) -> Scheduler:
    kind = ledger.spec.search.scheduler.type
    return registry.load(registry.SCHEDULERS[kind].target)(ledger)


class KilledSweep:
    """Simulated sweep that fills a ledger until a number of trials exist."""

    def __init__(self, ledger: Ledger, slots: int) -> None:
        self._ledger, self._slots = ledger, slots
        self._scheduler = build_scheduler(ledger)
        self._rng = np.random.default_rng(0)
        self._clock = 0.0
        self._running: list[tuple[float, int, int]] = []
        """Time at which a trial reaches its next rung or its end, its number, and that step."""
        self._worth: list[list[float]] = []

    def run(self, trials: int) -> None:
        """Start and end trials until `trials` exist."""
        while True:
            while len(self._running) < self._slots:
                if len(self._worth) == trials:
                    return
                self._schedule_next_step(self._start_trial())
            self._clock, number, step = heapq.heappop(self._running)
            self._handle_step(number, step)

    def _start_trial(self) -> TrialRecord:
        number, spec = len(self._worth), self._ledger.spec
        self._worth.append(self._rng.uniform(0.1, 1, len(spec.objectives)).tolist())
        params = spec.space.complete(first_trials.draw_point(spec, number))
        return self._ledger.start(params, "search", "startup", seed=number)

    def _schedule_next_step(self, record: TrialRecord) -> None:
        at = record.rungs[-1].step if record.rungs else 0
        every = self._ledger.spec.training.evaluate_every
        steps = (*self._scheduler.list_evaluation_steps(record), *range(every, STEPS, every), STEPS)
        step = min(step for step in steps if step > at)
        due = self._clock + (step - at) * self._rng.uniform(0.8, 1.2)
        heapq.heappush(self._running, (due, record.number, step))

    def _handle_step(self, number: int, step: int) -> None:
        measurement = self._measure(number, step)
        if step == STEPS:
            outcome = Outcome(
                measurement.validation, measurement.validation, measurement.cost, None, {}
            )
            self._ledger.complete(number, outcome)
            return
        self._ledger.record_rung(number, measurement)
        record = self._ledger.get_record(number)
        if self._scheduler.decide(record, record.rungs[-1]) == "pause":
            self._ledger.pause(number)
        else:
            self._schedule_next_step(record)

    def _measure(self, number: int, step: int) -> Measurement:
        means = np.array(self._worth[number]) * (1 + step / STEPS) / 2
        noisy = np.clip(means + self._rng.normal(0, 0.05, len(means)), 0, 1).tolist()
        names = self._ledger.spec.objectives
        estimates = {name: Estimate(mean, 0.01) for name, mean in zip(names, noisy, strict=True)}
        return Measurement(step, {}, Cost(completions=COMPLETIONS * step, seconds=step), estimates)


def start_again(spec: SweepSpec, slots: int) -> dict[str, float]:
    """Restart the sweep and return the CPU seconds of each part."""
    ledger, of_ledger = time_cpu(lambda: Ledger.open(spec))
    with ledger:
        setup = RunSettings("none:none", ledger.directory / SPEC)
        lifecycle, of_lifecycle = time_cpu(
            lambda: Lifecycle(ledger, build_scheduler(ledger), setup, slots, lambda _: None)
        )
        _, of_answer = time_cpu(lambda: lifecycle.next_attempt("first"))
        lifecycle.close()
    return {
        "ledger": of_ledger,
        "lifecycle": of_lifecycle,
        "all": of_ledger + of_lifecycle + of_answer,
    }


def measure(trials: list[int] = [1000, 2000, 4000, 8000], slots: int = 200):
    """Measure every scheduler and size."""
    rows = [
        {"scheduler": scheduler, "trials": count, **measure_sweep(scheduler, count, slots)}
        for scheduler in ("fifo", "halving")
        for count in trials
    ]
    print_table(tuple(rows[0]), *(tuple(row.values()) for row in rows))
    return {"slots": slots, "rows": rows}


def measure_sweep(scheduler: str, trials: int, slots: int) -> dict[str, float]:
    """Return the CPU seconds to restart a sweep that was killed with so many trials."""
    wide = COMPLETIONS * WIDE_STEP * (2 * trials + 1) / HalvingSettings().wide_share
    changes = (
        f"search.scheduler={{type: {scheduler}}}",
        f"search.budget.completions={math.ceil(wide) if scheduler == 'halving' else 0}",
        f"search.trials={2 * trials}",
        "search.sampler=random",
        f"training.steps={STEPS}",
    )
    with load_space("code", *changes) as spec:
        with Ledger.open(spec) as ledger:
            KilledSweep(ledger, slots).run(trials)
        return start_again(spec, slots)


if __name__ == "__main__":
    run(measure, {"trials": [60, 120], "slots": 20})
