"""The processes of `scale.py`: each measures one thing and writes it down as JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from driver import worth
from scale_executor import CLOCK, TALLY, SimulatedActors
from scale_parts import Parts

from gdpo_tune.events import Event, TrialFinished, TrialStarted
from gdpo_tune.spec import SweepSpec
from gdpo_tune.steps import FILE
from gdpo_tune.trials import Cost, Estimate, Measurement, Outcome, TrialConfig
from gdpo_tune.tuning.trainable import Reporter, Setup

METRICS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "clip_ratio",
    "mean_length",
    *(
        f"reward/{reward}/{kind}"
        for reward in ("correctness", "format", "length")
        for kind in ("share", "mean", "dead_groups", "std")
    ),
)
"""What a step of the shipped sweep reports, without `train/`."""
SAMPLES = 40
LONG = 60
"""Results of a whole trial."""


@cache
def step_of(step: int) -> tuple[dict[str, float], bytes]:
    """What a step measures, in every trial alike, and its line in the trial's file."""
    numbers = np.random.default_rng(step).random(len(METRICS)).tolist()
    metrics = {f"train/{name}": number for name, number in zip(METRICS, numbers, strict=True)}
    cost = {"completions": 64 * step, "seconds": float(step), "cpu_seconds": float(step)}
    line = json.dumps({"step": step, "metrics": metrics, "cost": cost})
    return metrics, line.encode() + b"\n"


def keep(trial: TrialConfig, lines: list[bytes]) -> None:
    """Append what trials write by themselves, as `append_step` does line by line."""
    trial.directory.mkdir(parents=True, exist_ok=True)
    with (trial.directory / FILE).open("ab") as file:
        file.write(b"".join(lines))
    lines.clear()


class Simulated(Reporter):
    """The product's own, with the clock of the simulation."""

    def __init__(self, trial: TrialConfig, setup: Setup, ends_at: Any) -> None:
        super().__init__(trial, setup.stop, ends_at, setup.pace)
        self.seconds = 0.0
        """Of training since the last result."""

    def now(self) -> float:
        """Simulated seconds."""
        return CLOCK.now + self.seconds


def results_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the process of a trial would answer, one `train` of Ray's after the other."""
    trial: TrialConfig = config["trial"]
    rng = np.random.default_rng(trial.seed)
    values, steps = worth(trial), trial.training.steps
    known = {"trial": trial, "setup": config["setup"], "ends_at": config["ends_at"]}
    found: dict[str, Estimate] = {}
    cost = Cost()
    reporter, written = Simulated(trial, config["setup"], config["ends_at"]), []
    for step in range(1, steps + 1) if trial.train else ():
        validated = step == steps or step in trial.evaluate_at
        metrics, line = step_of(step)
        written.append(line)
        cost = Cost(step * trial.training.completions_per_step, float(step), float(step))
        if validated:
            share = (step / steps) ** 0.5
            noise = (0.02 * rng.standard_normal(len(values))).tolist()
            found = {
                name: Estimate(value * share + error, 0.02)
                for (name, value), error in zip(values.items(), noise, strict=True)
            }
            metrics = metrics | {
                f"validation/{name}": estimate.mean for name, estimate in found.items()
            }
        measurement = Measurement(step, metrics, cost, found if validated else {})
        reporter.seconds += 1.0
        stop, due = reporter.decide(measurement)
        if not due:
            reporter.hold(measurement)
            continue
        keep(trial, written)
        result = filled(reporter.result(measurement), step, known)
        yield result | {"time_this_iter_s": reporter.seconds}
        reporter.seconds = 0.0
        if stop or (validated and reporter.halted()):
            yield filled({"interrupted": True}, 0, known)
            yield {"__duplicate__": True}
            return
    found = found or {name: Estimate(0.1, 0.02) for name in values}
    yield filled({"outcome": Outcome(found, found, cost, None)}, 0, known)
    yield {"__duplicate__": True}


def flat_results(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same for a trial of nobody's: as many results, their metrics as Ray wants them."""
    numbers = {f"train/{name}": 0.5 for name in METRICS}
    for step in range(1, config["results"] + 1):
        yield filled(dict(numbers), step, {"results": config["results"]})
    yield {"__duplicate__": True}


def filled(result: dict[str, Any], step: int, config: dict[str, Any]) -> dict[str, Any]:
    """A result with what Ray's `Trainable.train` adds; without a step it takes no time."""
    added = {
        "done": False,
        "date": "2026-01-01_00-00-00",
        "timestamp": 1767225600,
        "time_this_iter_s": 1.0,
        "time_total_s": float(step),
        "pid": 1,
        "hostname": "node",
        "node_ip": "10.0.0.1",
        "config": config,
        "time_since_restore": float(step),
        "iterations_since_restore": step,
    }
    return result | added | ({"training_iteration": step} if step else {})


class Watch:
    """A listener that takes samples, and may end this process as `kill -9` would."""

    def __init__(self, told: Path, spec: SweepSpec, parts: Parts, kill_after: int | None) -> None:
        self._told, self._spec, self._parts, self._kill_after = told, spec, parts, kill_after
        self._ended = 0
        self._every = max(1, spec.search.trials // SAMPLES)
        self._began = time.process_time()
        self._back: dict[str, float] = {}
        self.samples: list[dict[str, float]] = []

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, TrialStarted) and not self._back:
            self._back = {"cpu_seconds": time.process_time() - self._began, "mib": mib()}
        if isinstance(event, TrialFinished):
            self._ended += 1
            if self._ended % self._every == 0:
                self._sample()
            if self._ended == self._kill_after:
                self.write()
                os._exit(0)

    def _sample(self) -> None:
        self.samples.append(
            {
                "ended": self._ended,
                "results": TALLY.results,
                "driver": CLOCK.driver,
                "now": CLOCK.now,
                "mib": mib(),
            }
        )

    def write(self) -> None:
        """Write down what was found."""
        self._sample()
        seconds = self._parts.taken()
        seconds["unpickling results"] = TALLY.decoded
        driver = CLOCK.driver
        slots = SimulatedActors.slots
        by_part = {
            part: {
                "seconds": round(spent, 2),
                "us_per_result": round(1e6 * spent / max(1, TALLY.results), 1),
                "calls": self._parts.calls[part],
            }
            for part, spent in sorted(seconds.items(), key=lambda item: -item[1])
            if not part.startswith("simul")
        }
        found = {
            "ended": self._ended,
            "results": TALLY.results,
            "events": TALLY.events,
            "until_first_trial": rounded(self._back),
            "driver_cpu_seconds": round(driver, 1),
            "driver_us_per_result": round(1e6 * driver / max(1, TALLY.results), 1),
            "driver_ms_per_trial": round(1e3 * driver / max(1, self._ended), 2),
            "simulated_seconds": round(CLOCK.now, 1),
            "all_slots_busy_after": round(TALLY.filled, 1),
            "results_per_simulated_second": round(TALLY.results / CLOCK.now, 1),
            "utilisation": round(TALLY.trained / (slots * CLOCK.now), 3),
            "mean_lateness_seconds": round(TALLY.waited / max(1, TALLY.events), 3),
            "parts": by_part,
            "samples": [rounded(sample) for sample in self.samples],
            "bytes": sizes(self._spec),
        }
        self._told.write_text(json.dumps(found))


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Numbers for a person."""
    return {name: round(value, 2) for name, value in values.items()}


def mib() -> float:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss / 2**20


def sizes(spec: SweepSpec) -> dict[str, int]:
    """Bytes of what a sweep keeps."""
    folder = spec.directory
    steps = sum(file.stat().st_size for file in folder.glob("trials/*/steps.jsonl"))
    found = {"step_metrics": steps}
    for name in ("ledger.journal", "spool.jsonl"):
        file = folder / name
        found[name] = file.stat().st_size if file.exists() else 0
    return found


@contextmanager
def simulated(slots: int, make: Any) -> Generator[None]:
    """Ray Tune with simulated processes on one node that holds all of them."""
    from ray.tune.execution import tune_controller

    from gdpo_tune.tuning import cluster
    from gdpo_tune.tuning.nodes import Nodes

    real_manager, real_cluster = tune_controller.RayActorManager, cluster.ray_cluster
    node = {
        "NodeID": "0" * 56,
        "NodeManagerHostname": "node",
        "Alive": True,
        "Resources": {"CPU": float(slots)},
    }

    @contextmanager
    def large(processes: Path) -> Generator[Any]:
        with real_cluster(processes) as ray_up:
            # its servers do nothing in here, and on a busy machine they may give up
            yield replace(ray_up, nodes=Nodes(lambda: [node]), is_alive=lambda: True)

    SimulatedActors.slots, SimulatedActors.make = slots, staticmethod(make)
    tune_controller.RayActorManager, cluster.ray_cluster = SimulatedActors, large
    try:
        yield
    finally:
        tune_controller.RayActorManager, cluster.ray_cluster = real_manager, real_cluster


def sweep(told: Path, spec: SweepSpec, slots: int, kill_after: int | None) -> None:
    """A sweep as the command runs it, with tracking and display."""
    parts = Parts()
    watch = Watch(told, spec, parts, kill_after)
    from rich.console import Console

    from gdpo_tune.display import LiveDisplay
    from gdpo_tune.tracking import MlflowSink
    from gdpo_tune.tuning import run_sweep
    from gdpo_tune.tuning.projection import Projection

    parts.watch()
    ask = Projection.ask

    def thinking(self: Projection) -> Any:
        CLOCK.thinking += 1
        try:
            return ask(self)
        finally:
            CLOCK.thinking -= 1

    Projection.ask = thinking
    with (
        Path(os.devnull).open("w") as nowhere,
        simulated(slots, results_of),
        MlflowSink(spec) as sink,
        LiveDisplay(spec, Console(file=nowhere), sink.state) as display,
    ):
        run_sweep(spec, listeners=[sink, display, watch])
        watch.write()


def start_ours(told: Path, spec: SweepSpec, slots: int, kill_after: int) -> None:
    """The first half, killed."""
    sweep(told, spec, slots, kill_after)


def resume_ours(told: Path, spec: SweepSpec, slots: int) -> None:
    """The other half."""
    sweep(told, spec, slots, None)


def finish_ours(told: Path, spec: SweepSpec) -> None:
    """What a finished sweep costs to read, to draw and to send."""
    from gdpo_tune.figures import write_front_png, write_report
    from gdpo_tune.ledger import Ledger

    found: dict[str, Any] = {}

    @contextmanager
    def measured(what: str) -> Generator[None]:
        before = time.process_time()
        yield
        found[what] = {"cpu_seconds": round(time.process_time() - before, 2), "mib": round(mib())}

    with measured("reading the ledger"):
        ledger = Ledger.open(spec, read_only=True)
    with ledger:
        records, sessions = tuple(ledger.records()), ledger.sessions()
    with measured("report"):
        path = write_report(spec, records, sessions=sessions)
    with measured("front.png"):
        write_front_png(spec, records)
    found["report_megabytes"] = round(path.stat().st_size / 1e6, 1)
    found["states"] = {
        state: sum(record.state == state for record in records)
        for state in ("complete", "pruned", "failed", "running")
    }
    with measured("one picture of the live display"):
        draw(spec, records)
    found["spool"] = messages(spec)
    told.write_text(json.dumps(found))


def draw(spec: SweepSpec, records: Any) -> None:
    """The display of a terminal, once, with all trials known."""
    from rich.console import Console

    from gdpo_tune.display import LiveDisplay
    from gdpo_tune.events import SweepStarted

    with Path(os.devnull).open("w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=120)
        display = LiveDisplay(spec, console)
        display._progress.update(SweepStarted(records, len(records)))
        console.print(display.picture())


def messages(spec: SweepSpec) -> dict[str, int]:
    """What MLflow would be told."""
    count = metrics = 0
    with (spec.directory / "spool.jsonl").open() as lines:
        for line in lines:
            count += 1
            metrics += len(json.loads(line).get("metrics", ()))
    return {"messages": count, "metrics": metrics}


def run_peer(told: Path, spec: SweepSpec, slots: int, trials: int) -> None:
    """Ray Tune alone: a searcher that always says yes, first in first out."""
    from ray import tune
    from ray.tune.search import Searcher

    from gdpo_tune.tuning.cluster import ray_cluster

    parts = Parts()
    samples: list[dict[str, float]] = []

    class Yes(Searcher):
        def __init__(self) -> None:
            super().__init__()
            self._running = self._begun = 0

        def suggest(self, trial_id: str) -> Any:
            if self._begun == trials:
                return self.FINISHED
            if self._running == slots:
                return None
            self._begun, self._running = self._begun + 1, self._running + 1
            return {"results": LONG // 2}

        def on_trial_complete(
            self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
        ) -> None:
            self._running -= 1
            ended = self._begun - self._running
            if ended % max(1, trials // 10) == 0:
                samples.append({"ended": ended, "results": TALLY.results, "driver": CLOCK.driver})

        def save(self, checkpoint_path: str) -> None:
            pass

    parts.watch()
    storage = spec.directory.parent / "ray"
    storage.mkdir(parents=True)
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(slots)
    with ray_cluster(storage / "processes"), simulated(slots, flat_results):
        tune.Tuner(
            tune.with_resources(nothing, {"cpu": 1}),
            tune_config=tune.TuneConfig(search_alg=Yes(), num_samples=-1, reuse_actors=True),
            run_config=tune.RunConfig(name="alone", storage_path=str(storage), verbose=0),
        ).fit()
    found = {
        "trials": trials,
        "results": TALLY.results,
        "driver_cpu_seconds": round(CLOCK.driver, 1),
        "driver_us_per_result": round(1e6 * CLOCK.driver / TALLY.results, 1),
        "driver_ms_per_trial": round(1e3 * CLOCK.driver / trials, 2),
        "simulated_seconds": round(CLOCK.now, 1),
        "parts": {part: round(spent, 2) for part, spent in parts.taken().items()},
        "samples": [rounded(sample) for sample in samples],
    }
    told.write_text(json.dumps(found))


def nothing(config: dict[str, Any]) -> None:
    """Never called: its processes are simulated."""
