"""Time that tracking costs the driver of a sweep, and losses while the server fails.

    python benchmarks/tracking.py [--small]

Four ways to send the same results to an MLflow server on a SQLite file run one after the other,
each in its own process with its own server:

    ours      the listener of `gdpo_tune.sweep`: a thread that sends what MLflow lacks
    sync      `MlflowClient.log_batch`, a batch for each result
    async     the same with `synchronous=False`, waited for at the end
    ray       `MlflowLoggerCallback` of Ray Tune, called as Ray's loop calls its callbacks

Each way sends twice. `fast`: results without a pause; metrics a second are those stored at the end,
divided by the time from the first result to the end. `away`: a result every `PERIOD` seconds, and
the server is killed for a while in the middle. Ours also runs with a server that hangs, one that
answers 500, and one whose disk is full, for as long.

Blocking is the time that a call takes: the start of a trial, a result, or its end. `lost` counts
metrics that are not in the database at the end, `twice` those that are there more than once. A
trial here has no more steps than a curve keeps, so that nothing is thinned.

The last line is JSON: for each way metrics a second, milliseconds of blocking, lost and twice.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tracking_ways import METRICS, WAYS, Load

from tests.support.mlflow_servers import MlflowServer

LIMIT_MS = 5.0
"""Limit of the 99th percentile of our blocking, in milliseconds."""
PERIOD = 0.02
"""Seconds between two results of `away`."""
DATABASE = "mlflow.db"


def measure(way: str, load: Load) -> dict[str, Any]:
    """Send the load one way to a new server, and count the stored metrics."""
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "1"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        server = MlflowServer(directory, f"sqlite:///{directory / DATABASE}")
        server.start()
        try:
            blocked, seconds, failed = _send(way, load, server, directory)
            stored, twice = _count_stored(directory / DATABASE)
        finally:
            server.kill()
    return {
        "metrics_per_second": round(stored / seconds),
        "blocking_ms": {
            "median": round(float(np.median(blocked)), 3),
            "p99": round(float(np.percentile(blocked, 99)), 3),
            "max": round(max(blocked), 3),
        },
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

    began = time.perf_counter()
    for trial in range(load.trials):
        call(sender.start, trial)
    values = {f"train/m{index:02d}": 0.1 * index for index in range(METRICS)}
    with (
        _simulate_absence(server, load, directory)
        if load.away
        else nullcontext(lambda _: None) as progress
    ):
        for step in range(1, load.steps + 1):
            for trial in range(load.trials):
                call(sender.report, trial, step, values)
                time.sleep(load.period)
            progress(step / load.steps)
    for trial in range(load.trials):
        call(sender.end, trial)
    sender.close()
    return blocked, time.perf_counter() - began, failed


@contextmanager
def _simulate_absence(
    server: MlflowServer, load: Load, directory: Path
) -> Iterator[Callable[[float], None]]:
    """Let the server fail once a third is sent, and work again `away` seconds later."""

    def fail() -> None:
        arguments = [directory / DATABASE] if load.fault == "full" else []
        with getattr(server, f"keep_{load.fault}")(*arguments):
            time.sleep(load.away)

    absence = threading.Thread(target=fail)

    def progress(share: float) -> None:
        if share >= 1 / 3 and absence.ident is None:
            absence.start()

    yield progress
    absence.join()


def _count_stored(database: Path) -> tuple[int, int]:
    """Count the metrics of results in the database, and those that repeat another one."""
    query = """
        select count(*),
            count(*) - count(distinct tags.value || "/" || metrics.key || "/" || metrics.step)
        from metrics join tags on tags.run_uuid = metrics.run_uuid and tags.key = 'mlflow.runName'
        where metrics.key like 'train/m%'
    """
    with sqlite3.connect(database) as connection:
        stored, twice = connection.execute(query).fetchone()
    return stored, twice


def measure_in_process(way: str, load: Load) -> dict[str, Any]:
    """Measure in a new process, so that runs share neither imports nor threads."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (way, load))


def main() -> None:
    """Measure every way and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="few results; a short absence, for ours alone"
    )
    options = parser.parse_args()
    trials, steps, away = (3, 6, 1.0) if options.small else (8, 50, 30.0)
    away_load = Load(trials, steps, PERIOD, away)
    loads = {"fast": Load(trials, steps, 0.0), "away": away_load}
    faults = {name: replace(away_load, fault=name) for name in ("hung", "failing", "full")}
    figures: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        figures[way] = {}
        for name, load in {**loads, **(faults if way == "ours" else {})}.items():
            if options.small and (name in faults or (load.away and way != "ours")):
                continue  # the others block for ten seconds and more
            figures[way][name] = measure_in_process(way, load)
            print(f"{way}, {name}: {figures[way][name]}", flush=True)
    ours = figures["ours"].values()
    result = {
        "benchmark": "tracking",
        "metrics": loads["fast"].metrics,
        "away_seconds": away,
        **figures,
        "limit_p99_ms": LIMIT_MS,
        "ok": all(
            r["lost"] == r["twice"] == 0 and r["blocking_ms"]["p99"] <= LIMIT_MS for r in ours
        ),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
