"""Time that tracking costs the driver of a sweep, and losses while the server fails.

    python benchmarks/tracking.py [--small]

Four ways to send the same results to an MLflow server on a SQLite file run one after the other,
each in its own process with its own server:

    ours      the listener of `gdpo_tune.sweep`: a thread that sends what MLflow lacks
    sync      `MlflowClient.log_batch`, a batch for each result
    async     the same with `synchronous=False`, waited for at the end
    ray       `MlflowLoggerCallback` of Ray Tune, called as Ray's loop calls its callbacks

`fast` has no pause between results; metrics a second are those stored, by the time to the end.
`away` has a result every `PERIOD` seconds, and the server is killed for a while in the middle. Ours
also runs with a server that hangs, one that answers 500, and one whose disk is full. Blocking is
the time that a call takes. `lost` counts metrics that are not in the database at the end, `twice`
those that are there more than once. The last line is JSON.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import call_apart, run

from gdpo_tune.core import events
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.core.trials import Cost, Estimate, Measurement, TrialRecord
from tests.support.mlflow_servers import MlflowServer

LIMIT_MS = 5.0
"""Limit of the 99th percentile of our blocking, in milliseconds."""
PERIOD = 0.02
"""Seconds between two results of `away`."""
DATABASE = "mlflow.db"


def measure_way(way: str, load: Load) -> dict[str, Any]:
    """Send the load one way to a new server, and count the stored metrics."""
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "1"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        server = MlflowServer(directory, f"sqlite:///{directory / DATABASE}")
        server.start()
        try:
            blocked, seconds, failed = _send(way, load, server, directory)
            with sqlite3.connect(directory / DATABASE) as connection:
                stored, twice = connection.execute(COUNT).fetchone()
        finally:
            server.kill()
    median, p99 = np.percentile(blocked, [50, 99]).round(3).tolist()
    return {
        "metrics_per_second": round(stored / seconds),
        "blocking_ms": {"median": median, "p99": p99, "max": round(max(blocked), 3)},
        "calls_that_raised": failed,
        "lost": load.metrics - (stored - twice),
        "twice": twice,
    }


def _send(
    way: str, load: Load, server: MlflowServer, directory: Path
) -> tuple[list[float], float, int]:
    """Send the load; return milliseconds of each call, total seconds and number of failed calls."""
    sender = WAYS[way](server.uri, directory, load)
    blocked: list[float] = []
    failed = 0

    def call(work: Callable[..., None], *arguments: Any) -> None:
        nonlocal failed
        began = time.perf_counter()
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001  # a sweep continues after any error of a peer
            failed += 1
            print(f"{way}: {type(error).__name__}", file=sys.stderr)
        blocked.append(1000 * (time.perf_counter() - began))

    def fail() -> None:
        arguments = [directory / DATABASE] if load.fault == "full" else []
        with getattr(server, f"keep_{load.fault}")(*arguments):
            time.sleep(load.away)

    absence = threading.Thread(target=fail)
    began = time.perf_counter()
    for trial in range(load.trials):
        call(sender.start, trial)
    values = {f"train/m{index:02d}": 0.1 * index for index in range(METRICS)}
    for step in range(1, load.steps + 1):
        for trial in range(load.trials):
            measurement = Measurement(step, values, Cost(step, 1.0, 1.0), time=time.time())
            append_step(directory / str(trial), measurement)  # as its process does
            call(sender.report, trial, measurement)
            time.sleep(load.period)
        if load.away and step / load.steps >= 1 / 3 and absence.ident is None:
            absence.start()
    if load.away:
        absence.join()
    for trial in range(load.trials):
        call(sender.end, trial)
    sender.close()
    return blocked, time.perf_counter() - began, failed


COUNT = """
    select count(*),
        count(*) - count(distinct tags.value || "/" || metrics.key || "/" || metrics.step)
    from metrics join tags on tags.run_uuid = metrics.run_uuid and tags.key = 'mlflow.runName'
    where metrics.key like 'train/m%'
"""
"""Counts the metrics of results in the database, and those that repeat another one."""
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
    period: float = 0.0
    """Seconds between two results."""
    away: float = 0.0
    """Seconds for which the server fails, once a third of the results are sent."""
    fault: str = "killed"
    """Kind of failure: `killed`, `hung`, `failing` (answers 500) or `full` (its disk)."""

    @property
    def metrics(self) -> int:
        return self.trials * self.steps * METRICS


class Ours:
    """Our listener, as a sweep has it."""

    def __init__(self, uri: str, directory: Path, load: Load) -> None:
        from gdpo_tune.spec import load_spec
        from gdpo_tune.tracking.mlflow_sink import MlflowTracker

        path = directory / "tracked.yaml"
        path.write_text(SPACE.format(uri=uri, directory=directory, steps=load.steps))
        self._sink = MlflowTracker(load_spec(path))
        self._sink(events.SweepStarted(()))
        # as the other ways do, import mlflow before the first call
        while self._sink.get_state().pending:
            time.sleep(0.1)
        self._records: list[Any] = []
        self._directory = directory

    def start(self, trial: int) -> None:
        self._records.append(_build_record(trial, self._directory))
        self._sink(events.TrialStarted(self._records[trial]))

    def report(self, trial: int, measurement: Measurement) -> None:
        self._sink(events.TrialProgress(trial, measurement))

    def end(self, trial: int) -> None:
        self._records[trial] = _build_record(trial, self._directory, ended=True)
        self._sink(events.TrialFinished(self._records[trial]))

    def close(self) -> None:
        """End the sweep and wait until everything is sent."""
        self._sink(events.SweepFinished(tuple(self._records), interrupted=False))
        if problem := self._sink.close(120.0):
            raise SystemExit(problem)


def _build_record(number: int, directory: Path, *, ended: bool = False) -> TrialRecord:
    draw = np.random.default_rng(number)
    test = {name: Estimate(float(draw.random()), 0.02) for name in ("correctness", "length")}
    done = {"test": test, "validation": test, "feasible": True, "finished": time.time()}
    params = {"normalization": "gdpo", "learning_rate": 1e-4 + number}
    running = {"directory": directory / str(number), "started": time.time()}
    state, fields = ("complete", done) if ended else ("running", {})
    cost = Cost(64, 1.0, 1.0)
    return TrialRecord(
        number, "search", state, params, number, "model", cost=cost, **running, **fields
    )


class Client:
    """MLflow's own client."""

    def __init__(self, uri: str, directory: Path, load: Load, *, synchronous: bool) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(uri)
        self._experiment = self._client.create_experiment("tracked")
        self._runs: list[str] = []
        self._synchronous = synchronous
        self._operations: list[Any] = []

    def start(self, trial: int) -> None:
        run = self._client.create_run(self._experiment, run_name=f"trial-{trial}")
        self._runs.append(run.info.run_id)

    def report(self, trial: int, measurement: Measurement) -> None:
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), measurement.step
        metrics = [Metric(name, value, now, step) for name, value in measurement.metrics.items()]
        done = self._client.log_batch(self._runs[trial], metrics, synchronous=self._synchronous)
        if done is not None:
            self._operations.append(done)

    def end(self, trial: int) -> None:
        self._client.set_terminated(self._runs[trial])

    def close(self) -> None:
        """Wait until everything is sent."""
        from mlflow.exceptions import MlflowException

        for operation in self._operations:
            with suppress(MlflowException):  # losses are counted in the database
                operation.wait()


class Callback:
    """Ray Tune's callback."""

    def __init__(self, uri: str, directory: Path, load: Load) -> None:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        self._callback = MLflowLoggerCallback(tracking_uri=uri, experiment_name="tracked")
        self._callback.setup()
        self._trials: list[Any] = []

    def start(self, trial: int) -> None:
        from ray.tune.experiment import Trial

        config = {"learning_rate": 1e-4 + trial}
        self._trials.append(Trial("tracked", config=config, stub=True, trial_id=f"{trial:08d}"))
        self._callback.log_trial_start(self._trials[trial])

    def report(self, trial: int, measurement: Measurement) -> None:
        result = {**measurement.metrics, "training_iteration": measurement.step}
        self._callback.log_trial_result(measurement.step, self._trials[trial], result)

    def end(self, trial: int) -> None:
        self._callback.log_trial_end(self._trials[trial])

    def close(self) -> None:
        """Do nothing; the callback has sent everything."""


WAYS: dict[str, Callable[[str, Path, Load], Any]] = {
    "ours": Ours,
    "sync": partial(Client, synchronous=True),
    "async": partial(Client, synchronous=False),
    "ray": Callback,
}


def measure(trials: int = 8, steps: int = 50, away: float = 30.0, brief: bool = False):
    """Measure every way; a brief run has an absence for ours alone, because the others block."""
    away_load = Load(trials, steps, PERIOD, away)
    loads = {"fast": Load(trials, steps), "away": away_load}
    faults = {name: replace(away_load, fault=name) for name in ("hung", "failing", "full")}
    figures: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        figures[way] = {}
        for name, load in {**loads, **(faults if way == "ours" else {})}.items():
            if brief and (name in faults or (load.away and way != "ours")):
                continue
            figures[way][name] = call_apart(measure_way, way, load)
            print(f"{way}, {name}: {figures[way][name]}", flush=True)
    ours = figures["ours"].values()
    none_lost = all(r["lost"] == r["twice"] == 0 for r in ours)
    return {
        "metrics": loads["fast"].metrics,
        "away_seconds": away,
        **figures,
        "limit_p99_ms": LIMIT_MS,
        "ok": none_lost and all(r["blocking_ms"]["p99"] <= LIMIT_MS for r in ours),
    }


if __name__ == "__main__":
    run(measure, {"trials": 3, "steps": 6, "away": 1.0, "brief": True})
