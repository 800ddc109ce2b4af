"""A fake of Ray Tune, for the tests of the search."""

from __future__ import annotations

from typing import Any

from gdpo_tune.core import registry
from gdpo_tune.core.events import Event
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Measurement, Outcome
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning.attempts import (
    FINISHED,
    WAIT,
    Failed,
    Fatal,
    Finished,
    Interrupted,
    RunSettings,
    TrialResult,
)
from gdpo_tune.tuning.lifecycle import Lifecycle
from gdpo_tune.tuning.nodes import Nodes
from tests.support.tuning import build_trade_off


class Driver:
    """A fake of Ray Tune that keeps as many trials in flight as the searcher suggests."""

    def __init__(self, ledger: Ledger, slots: int = 2, nodes: Nodes | None = None) -> None:
        self.events: list[Event] = []
        setup = RunSettings("none:none", ledger.directory / SPEC)
        chosen = registry.SCHEDULERS[ledger.spec.search.scheduler.type]
        self.scheduler = registry.load(chosen.target)(ledger)
        self.searcher: Any = Lifecycle(
            ledger, self.scheduler, setup, slots, self.events.append, nodes
        )
        self.searcher.FINISHED = FINISHED
        self.in_flight: dict[str, TrialConfig] = {}
        self._count = 0

    def ask(self) -> Any:
        """Request a suggestion: a trial's id, None, or FINISHED."""
        trial_id = f"ray{self._count}"
        attempt = self.searcher.next_attempt(trial_id)
        if isinstance(attempt, str):
            return None if attempt == WAIT else attempt
        self._count += 1
        self.in_flight[trial_id] = attempt.trial
        return trial_id

    def end(
        self,
        trial_id: str,
        *,
        outcome: Outcome | None = None,
        failure: str = "",
        fatal: Exception | None = None,
        interrupted: bool = False,
    ) -> None:
        config = self.in_flight.pop(trial_id)
        result: TrialResult = Finished(outcome or build_trade_off(config.params))
        if failure:
            result = Failed(failure)
        elif fatal is not None:
            result = Fatal(fatal)
        elif interrupted:
            result = Interrupted()
        self.searcher.on_end(trial_id, result)

    def report(self, trial_id: str, measurement: Measurement) -> None:
        self.searcher.on_measurement(trial_id, measurement)

    def run(self) -> None:
        """Run trials until the searcher is finished."""
        while True:
            answer = self.ask()
            if answer == self.searcher.FINISHED:
                return
            if answer is None and self.in_flight:  # else a sampler is thinking
                self.advance(next(iter(self.in_flight)))

    def advance(self, trial_id: str) -> None:
        """Run one trial to its end."""
        self.end(trial_id)


class Killed(Exception):
    """Simulated kill of the driver."""


class SteppedDriver(Driver):
    """A driver whose trials advance one at a time, and which is killed after so many writes."""

    def __init__(self, ledger: Ledger, slots: int, dies_after: int) -> None:
        super().__init__(ledger, slots)
        self._writes_left = dies_after

    def advance(self, trial_id: str) -> None:
        """Advance one trial to its next evaluation, or to its end."""
        raise NotImplementedError

    def tick(self) -> None:
        self._writes_left -= 1
        if self._writes_left < 0:
            raise Killed
