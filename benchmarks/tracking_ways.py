"""Ways to send results to MLflow that `tracking.py` compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

METRICS = 20
"""Metrics of a result."""
SPACE = """
name: tracked
task: code
objectives:
  correctness: {{direction: maximize, reference: 0}}
  length: {{direction: maximize, reference: 0}}
space: {{learning_rate: {{log: [1.0e-5, 1.0e-3]}}}}
training: {{steps: {steps}, evaluate_every: {steps}}}
tracking: {{experiment: tracked, uri: "{uri}"}}
storage: {directory}
"""


@dataclass(frozen=True)
class Load:
    """Results to send, and the failure of the server meanwhile."""

    trials: int
    steps: int
    period: float
    """Seconds between two results; 0 means no pause."""
    away: float = 0.0
    """Seconds for which the server fails, once a third of the results are sent."""
    fault: str = "killed"
    """Kind of failure: `killed`, `hung`, `failing` (answers 500) or `full` (its disk)."""

    @property
    def metrics(self) -> int:
        """Total number of metrics."""
        return self.trials * self.steps * METRICS


class Ours:
    """Our listener, as a sweep has it."""

    def __init__(self, uri: str, directory: Path, load: Load) -> None:
        from gdpo_tune.core.events import SweepStarted
        from gdpo_tune.spec import load_spec
        from gdpo_tune.tracking import MlflowTracker

        path = directory / "tracked.yaml"
        path.write_text(SPACE.format(uri=uri, directory=directory, steps=load.steps))
        self._sink = MlflowTracker(load_spec(path))
        self._sink(SweepStarted((), load.trials))
        # as the other ways do, import mlflow before the first call
        while self._sink.get_state().pending:
            time.sleep(0.1)
        self._records: list[Any] = []

    def start(self, trial: int) -> None:
        """Record the start of a trial."""
        from gdpo_tune.core.events import TrialStarted

        self._records.append(_build_record(trial))
        self._sink(TrialStarted(self._records[trial]))

    def report(self, trial: int, step: int, values: dict[str, float]) -> None:
        """Record a result of a trial."""
        from gdpo_tune.core.events import TrialProgress
        from gdpo_tune.core.trials import Cost, Measurement

        self._sink(TrialProgress(trial, Measurement(step, values, Cost(step, 1.0, 1.0))))

    def end(self, trial: int) -> None:
        """Record the end of a trial."""
        from gdpo_tune.core.events import TrialFinished

        self._records[trial] = _build_record(trial, ended=True)
        self._sink(TrialFinished(self._records[trial]))

    def close(self) -> None:
        """End the sweep and wait until everything is sent."""
        from gdpo_tune.core.events import SweepFinished

        self._sink(SweepFinished(tuple(self._records), interrupted=False))
        problem = self._sink.close(120.0)
        if problem:
            raise SystemExit(problem)


def _build_record(number: int, *, ended: bool = False) -> Any:
    from gdpo_tune.core.trials import Cost, Estimate, TrialRecord

    draw = np.random.default_rng(number)
    test = {name: Estimate(float(draw.random()), 0.02) for name in ("correctness", "length")}
    done = {"test": test, "validation": test, "feasible": True, "finished": time.time()}
    return TrialRecord(
        number=number,
        role="search",
        state="complete" if ended else "running",
        params={"normalization": "gdpo", "learning_rate": 1e-4 + number},
        seed=number,
        proposer="model",
        cost=Cost(64, 1.0, 1.0),
        started=time.time(),
        **(done if ended else {}),
    )


class Client:
    """MLflow's own client."""

    def __init__(self, uri: str, directory: Path, load: Load, *, synchronous: bool) -> None:
        from mlflow import MlflowClient

        del directory, load
        self._client = MlflowClient(uri)
        self._experiment = self._client.create_experiment("tracked")
        self._runs: list[str] = []
        self._synchronous = synchronous
        self._operations: list[Any] = []

    def start(self, trial: int) -> None:
        """Record the start of a trial."""
        run = self._client.create_run(self._experiment, run_name=f"trial-{trial}")
        self._runs.append(run.info.run_id)

    def report(self, trial: int, step: int, values: dict[str, float]) -> None:
        """Record a result of a trial."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        done = self._client.log_batch(self._runs[trial], metrics, synchronous=self._synchronous)
        if done is not None:
            self._operations.append(done)

    def end(self, trial: int) -> None:
        """Record the end of a trial."""
        self._client.set_terminated(self._runs[trial])

    def close(self) -> None:
        """End the sweep and wait until everything is sent."""
        from mlflow.exceptions import MlflowException

        for operation in self._operations:
            with suppress(MlflowException):  # losses are counted in the database
                operation.wait()


class Callback:
    """Ray Tune's callback."""

    def __init__(self, uri: str, directory: Path, load: Load) -> None:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        del load
        self._callback = MLflowLoggerCallback(tracking_uri=uri, experiment_name="tracked")
        self._callback.setup()
        self._trials: list[Any] = []
        self._directory = directory

    def start(self, trial: int) -> None:
        """Record the start of a trial."""
        from ray.tune.experiment import Trial

        config = {"learning_rate": 1e-4 + trial}
        self._trials.append(Trial("tracked", config=config, stub=True, trial_id=f"{trial:08d}"))
        self._callback.log_trial_start(self._trials[trial])

    def report(self, trial: int, step: int, values: dict[str, float]) -> None:
        """Record a result of a trial."""
        result = {**values, "training_iteration": step}
        self._callback.log_trial_result(step, self._trials[trial], result)

    def end(self, trial: int) -> None:
        """Record the end of a trial."""
        self._callback.log_trial_end(self._trials[trial])

    def close(self) -> None:
        """Do nothing; the callback has sent everything."""


WAYS: dict[str, Callable[[str, Path, Load], Any]] = {
    "ours": Ours,
    "sync": lambda uri, directory, load: Client(uri, directory, load, synchronous=True),
    "async": lambda uri, directory, load: Client(uri, directory, load, synchronous=False),
    "ray": Callback,
}
