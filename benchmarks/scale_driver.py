"""Processes of `scale.py`; each measures one thing and writes it to a JSON file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from scale_executor import CLOCK, TALLY, SimulatedActors
from scale_parts import Parts
from scale_trials import generate_flat_results, simulate_results

from gdpo_tune.core.events import Event, TrialFinished, TrialStarted
from gdpo_tune.spec import SweepSpec

SAMPLES = 40
PEER_RESULTS = 30
"""Results of each trial of Ray Tune alone."""


class Watch:
    """Listener that takes samples, and may end this process as `kill -9` does."""

    def __init__(self, output: Path, spec: SweepSpec, parts: Parts, kill_after: int | None) -> None:
        self._output, self._spec, self._parts, self._kill_after = output, spec, parts, kill_after
        self._ended = 0
        self._every = max(1, spec.search.trials // SAMPLES)
        self._began = time.process_time()
        self._back: dict[str, float] = {}
        self.samples: list[dict[str, float]] = []

    def __call__(self, event: Event) -> None:
        """Handle an event."""
        if isinstance(event, TrialStarted) and not self._back:
            self._back = {"cpu_seconds": time.process_time() - self._began, "mib": measure_mib()}
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
                "mib": measure_mib(),
            }
        )

    def write(self) -> None:
        """Write the figures to the output file."""
        self._sample()
        seconds = self._parts.get_seconds()
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
        figures = {
            "ended": self._ended,
            "results": TALLY.results,
            "events": TALLY.events,
            "until_first_trial": round_values(self._back),
            "driver_cpu_seconds": round(driver, 1),
            "driver_us_per_result": round(1e6 * driver / max(1, TALLY.results), 1),
            "driver_ms_per_trial": round(1e3 * driver / max(1, self._ended), 2),
            "simulated_seconds": round(CLOCK.now, 1),
            "all_slots_busy_after": round(TALLY.filled, 1),
            "results_per_simulated_second": round(TALLY.results / CLOCK.now, 1),
            "utilisation": round(TALLY.trained / (slots * CLOCK.now), 3),
            "mean_lateness_seconds": round(TALLY.waited / max(1, TALLY.events), 3),
            "parts": by_part,
            "samples": [round_values(sample) for sample in self.samples],
            "bytes": measure_sizes(self._spec),
        }
        self._output.write_text(json.dumps(figures))


def round_values(values: dict[str, float]) -> dict[str, float]:
    """Round values to two digits."""
    return {name: round(value, 2) for name, value in values.items()}


def measure_mib() -> float:
    """Return the resident memory of this process in MiB."""
    return psutil.Process().memory_info().rss / 2**20


def measure_sizes(spec: SweepSpec) -> dict[str, int]:
    """Return the bytes of the files that a sweep keeps."""
    directory = spec.directory
    steps = sum(file.stat().st_size for file in directory.glob("trials/*/steps.jsonl"))
    sizes = {"step_metrics": steps}
    for name in ("ledger.journal", "spool.jsonl"):
        file = directory / name
        sizes[name] = file.stat().st_size if file.exists() else 0
    return sizes


@contextmanager
def simulate_processes(slots: int, make: Any) -> Generator[None]:
    """Give Ray Tune simulated processes on one node that holds all of them."""
    from ray.tune.execution import tune_controller

    from gdpo_tune.tuning.nodes import Nodes
    from gdpo_tune.tuning.ray import cluster

    real_manager, real_cluster = tune_controller.RayActorManager, cluster.open_cluster
    node = {
        "NodeID": "0" * 56,
        "NodeManagerHostname": "node",
        "Alive": True,
        "Resources": {"CPU": float(slots)},
    }

    @contextmanager
    def open_large_cluster(processes: Path, variables: object) -> Generator[Any]:
        with real_cluster(processes) as ray_up:
            # the cluster's servers are idle here, and on a busy machine they may give up
            yield replace(ray_up, nodes=Nodes(lambda: [node]), is_alive=lambda: True)

    SimulatedActors.slots, SimulatedActors.make = slots, staticmethod(make)
    tune_controller.RayActorManager, cluster.open_cluster = SimulatedActors, open_large_cluster
    try:
        yield
    finally:
        tune_controller.RayActorManager, cluster.open_cluster = real_manager, real_cluster


def run_watched_sweep(output: Path, spec: SweepSpec, slots: int, kill_after: int | None) -> None:
    """Run a sweep as the command does, with tracking and display, and measure it."""
    parts = Parts()
    watch = Watch(output, spec, parts, kill_after)
    from rich.console import Console

    from gdpo_tune.display import LiveDisplay
    from gdpo_tune.tracking import MlflowSink
    from gdpo_tune.tuning.proposals import SamplerView
    from gdpo_tune.tuning.runner import run_sweep

    parts.watch()
    real_propose = SamplerView.propose

    def propose(self: SamplerView) -> Any:
        CLOCK.thinking += 1
        try:
            return real_propose(self)
        finally:
            CLOCK.thinking -= 1

    SamplerView.propose = propose
    with (
        Path(os.devnull).open("w") as null,
        simulate_processes(slots, simulate_results),
        MlflowSink(spec) as sink,
        LiveDisplay(spec, Console(file=null), sink.get_state) as display,
    ):
        run_sweep(spec, listeners=[sink, display, watch])
        watch.write()


def start_ours(output: Path, spec: SweepSpec, slots: int, kill_after: int) -> None:
    """Run the first half of the sweep, then kill the process."""
    run_watched_sweep(output, spec, slots, kill_after)


def resume_ours(output: Path, spec: SweepSpec, slots: int) -> None:
    """Resume the sweep and run its second half."""
    run_watched_sweep(output, spec, slots, None)


def run_peer(output: Path, spec: SweepSpec, slots: int, trials: int) -> None:
    """Measure Ray Tune alone: a searcher that always proposes, first in first out."""
    from ray import tune
    from ray.tune.search import Searcher

    from gdpo_tune.tuning.ray.cluster import open_cluster

    parts = Parts()
    samples: list[dict[str, float]] = []

    class ConstantSearcher(Searcher):
        def __init__(self) -> None:
            super().__init__()
            self._running = self._begun = 0

        def suggest(self, trial_id: str) -> Any:
            if self._begun == trials:
                return self.FINISHED
            if self._running == slots:
                return None
            self._begun, self._running = self._begun + 1, self._running + 1
            return {"results": PEER_RESULTS}

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
    with open_cluster(storage / "processes"), simulate_processes(slots, generate_flat_results):
        tune.Tuner(
            tune.with_resources(do_nothing, {"cpu": 1}),
            tune_config=tune.TuneConfig(
                search_alg=ConstantSearcher(), num_samples=-1, reuse_actors=True
            ),
            run_config=tune.RunConfig(name="alone", storage_path=str(storage), verbose=0),
        ).fit()
    figures = {
        "trials": trials,
        "results": TALLY.results,
        "driver_cpu_seconds": round(CLOCK.driver, 1),
        "driver_us_per_result": round(1e6 * CLOCK.driver / TALLY.results, 1),
        "driver_ms_per_trial": round(1e3 * CLOCK.driver / trials, 2),
        "simulated_seconds": round(CLOCK.now, 1),
        "parts": {part: round(spent, 2) for part, spent in parts.get_seconds().items()},
        "samples": [round_values(sample) for sample in samples],
    }
    output.write_text(json.dumps(figures))


def do_nothing(config: dict[str, Any]) -> None:
    """Do nothing; never called, because its processes are simulated."""
