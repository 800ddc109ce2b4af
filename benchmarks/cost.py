"""What a sweep costs besides training: its driver, its size, a restart, and its report.

    python benchmarks/cost.py driver  [--trials 10000] [--small]
    python benchmarks/cost.py scale   [--trials 10000] [--tasks 1 10 100 1000] [--small]
    python benchmarks/cost.py restart [--trials 1000 2000 4000 8000] [--small]
    python benchmarks/cost.py report  [--trials 1000] [--small]
    python benchmarks/cost.py utilisation [--read runs] [--small]

Costs are CPU seconds of the driver's process (all of its threads), not wall time, so they leave out
waits for the disk. The sampler is `random`: the time of a model is left out.

driver: two sweeps over `search_spaces/code.yaml` with a number of trials in place of its budget:
`run_sweep` (Ray Tune, ledger, replicates) with instant trials that report where a trial is
evaluated, and Ray Tune alone with trials that report as often. CPU time is that from the call to
its return, by all trials, with imports and the start and end of Ray; samples give it for the first
and the last tenth. Memory is the resident set: growth is the slope of a line through the samples
after the first `WARM_UP` of all trials.

The others need no Ray's trials: in simulated time, trials are evaluated on slots by the real ledger
and scheduler until a number of them exist.

scale: an event of Ray's actor manager, for each number of tasks in flight. One real process answers
all of them, since a thousand do not fit on one machine; the manager, its futures, `ray.wait` and
the unpickling of results are the real ones. Then reading the ledger of ended trials, writing the
report and the picture of the front, and drawing the live display once.

restart: the sweep is killed when `--trials` of twice as many trials exist. Under `fifo` all others
than those on slots have ended by then, under `halving` they wait at the wide rung. The costs are
those of the ledger, the lifecycle, and both with the first answer, before any process is started.

report: as in `scale`, with the metrics of all steps and completions in the directory of each trial.

utilisation: the seconds that trials of the shipped sweep spent in `train()`, by slots x wall time,
or those of a finished sweep in the storage directory `--read`. Wall time includes the start of Ray
and of the trials' processes, imports, proposals, and the end of the sweep, when fewer trials are
left than slots; training time includes held-out evaluation and failed trials. The limit is that of
a whole sweep: a few short trials mostly start and end.

The last line is JSON.
"""

from __future__ import annotations

import asyncio
import heapq
import io
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import call_apart, load_space, print_table, run_parts

from gdpo_tune.core import registry
from gdpo_tune.core.events import Event, SweepStarted, TrialFinished, TrialProgress, TrialStarted
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import Completion, append_step, write_completions
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome, Report, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, first_trials
from gdpo_tune.spec.model import HalvingSettings

LIMIT_MS = 15.0
"""Most CPU milliseconds of the driver for each trial."""
LIMIT_SECONDS, LIMIT_MB = 20.0, 10.0
"""Of a report of 1,000 trials."""
SAMPLES = 50
"""Number of samples of memory and CPU time in a sweep."""
WARM_UP = 0.2
"""Share of a sweep after which memory must be flat."""
PLAIN = ("search.budget.completions=0", "search.sampler=random")


def time_cpu(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `work` and the CPU seconds that it takes."""
    start = time.process_time()
    return work(), time.process_time() - start


def measure_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


# --- the driver of a running sweep ----------------------------------------------------------------


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Run an instant trial: report each evaluation, then return an outcome.

    Reward weights trade objectives off; the learning rate scales all of them.
    """
    del resume
    rng, weights = np.random.default_rng(config.seed), config.get_reward_weights()
    quality = math.exp(-(math.log(float(config.params["learning_rate"]) / 1.0e-4) ** 2))
    last, every = config.training.steps, config.training.evaluate_every
    total = sum(weights.values())
    for step in sorted({*config.evaluate_at, *range(every, last, every), last}):
        share = step / last
        worth = {n: quality * (w / total * share) ** 0.5 for n, w in weights.items()}
        estimates = {n: Estimate(v + 0.02 * rng.standard_normal(), 0.02) for n, v in worth.items()}
        cost = Cost(step * config.training.completions_per_step, share, share)
        flat = {f"validation/{name}": estimate.mean for name, estimate in estimates.items()}
        report(Measurement(step, flat, cost, estimates), None)
    return Outcome(estimates, estimates, cost, None)


@dataclass
class Samples:
    """CPU seconds and memory of this process, by trials that have ended."""

    planned: int
    rows: list[tuple[int, float, float]] = field(default_factory=list)
    """Trials that have ended, CPU seconds, MiB."""
    ended: int = 0

    def start(self) -> None:
        """Take a sample where the first trial starts."""
        if not self.rows:
            self._take()

    def end(self) -> None:
        """Count a trial that has ended, and take a sample if one is due."""
        self.ended += 1
        if self.ended % max(1, self.planned // SAMPLES) == 0:
            self._take()

    def _take(self) -> None:
        self.rows.append((self.ended, time.process_time(), measure_mib()))

    def compute_ms_per_trial(self, start: float, end: float) -> float:
        """Compute the CPU milliseconds of a trial between two shares of the sweep."""
        first, last = (self.rows[round(share * (len(self.rows) - 1))] for share in (start, end))
        return 1000 * (last[1] - first[1]) / (last[0] - first[0])


@dataclass(frozen=True)
class Run:
    """Measurements of one sweep."""

    samples: Samples
    cpu: float
    states: Counter[str]
    results: Counter[int]
    """Trials by the number of their results."""

    def build_figures(self) -> dict[str, Any]:
        trials, samples = self.states.total(), self.samples
        results = sum(count * having for count, having in self.results.items())
        ended, _, mib = zip(*samples.rows[round(WARM_UP * (len(samples.rows) - 1)) :], strict=True)
        return {
            "trials": dict(+self.states),
            "results_per_trial": round(results / trials, 2),
            "cpu_ms_per_trial": round(1000 * self.cpu / trials, 2),
            "cpu_ms_per_trial_of_first_tenth": round(samples.compute_ms_per_trial(0, 0.1), 2),
            "cpu_ms_per_trial_of_last_tenth": round(samples.compute_ms_per_trial(0.9, 1), 2),
            "mib_at_start": round(samples.rows[0][2]),
            "mib_at_end": round(samples.rows[-1][2]),
            "mib_per_1000_trials": round(1000 * float(np.polyfit(ended, mib, 1)[0]), 2),
        }


def run_ours(spec: SweepSpec) -> Run:
    """Run and measure the sweep that users get."""
    cpu = time.process_time()
    from gdpo_tune.tuning.runner import run_sweep

    samples, results = Samples(spec.search.trials), Counter[int]()

    def listen(event: Event) -> None:
        if isinstance(event, TrialStarted):
            samples.start()
        elif isinstance(event, TrialProgress):
            results[event.number] += 1
        elif isinstance(event, TrialFinished):
            samples.end()

    done = run_sweep(spec, listeners=[listen], train="cost:train")
    cpu = time.process_time() - cpu
    states = Counter(record.state for record in done.records)
    return Run(samples, cpu, states, Counter(results.values()))


def run_ray(spec: SweepSpec, counts: Sequence[int]) -> Run:
    """Run and measure Ray Tune alone; `counts` are the numbers of results, one for each trial."""
    cpu = time.process_time()
    # Ray's workers import the trainable by this module name, not as `__main__`.
    from cost import report_only
    from ray import tune

    from gdpo_tune.tuning.ray.cluster import open_cluster

    samples = Samples(spec.search.trials)

    class Count(tune.Callback):
        def on_trial_start(self, iteration, trials, trial, **_) -> None:
            samples.start()

        def on_trial_complete(self, iteration, trials, trial, **_) -> None:
            samples.end()

    spec.directory.mkdir(parents=True)
    with open_cluster(spec.directory / "ray.processes"):
        storage = str(spec.directory.absolute())
        tune.Tuner(
            tune.with_resources(report_only, {"cpu": spec.resources.cpus}),
            param_space={"results": tune.grid_search(list(counts))},
            tune_config=tune.TuneConfig(reuse_actors=True),
            run_config=tune.RunConfig("ray", storage, verbose=0, callbacks=[Count()]),
        ).fit()
    cpu = time.process_time() - cpu
    states = Counter(complete=samples.ended, failed=len(counts) - samples.ended)
    return Run(samples, cpu, states, Counter(counts))


def report_only(config: dict[str, Any]) -> dict[str, float]:
    """Report `config["results"]` results; the trainable for Ray Tune alone."""
    from ray import tune

    for _ in range(config["results"]):
        tune.report({"loss": 0.5})
    return {"loss": 0.5}


def run_apart(measure: Callable[..., Run], trials: int, *arguments: Any) -> Run:
    """Measure a sweep in a process of its own, and print its samples."""
    with load_space("code", f"search.trials={trials}", *PLAIN) as spec:
        run = call_apart(measure, spec, *arguments)
    if run.states["failed"]:
        raise SystemExit(f"{run.states['failed']} trials failed: the figures are not valid")
    print_table((measure.__name__, "CPU s", "MiB"), *run.samples.rows)
    return run


def measure_driver(trials: int = 10_000):
    """Measure our sweep and Ray Tune alone."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the command does
    ours = run_apart(run_ours, trials)
    counts = [count for count, many in ours.results.items() for _ in range(many)]
    ray = run_apart(run_ray, trials, counts)
    return {
        **ours.build_figures(),
        "ray_alone": ray.build_figures(),
        "limit_cpu_ms_per_trial": LIMIT_MS,
        "ok": 1000 * ours.cpu / ours.states.total() <= LIMIT_MS,
    }


# --- a sweep in simulated time --------------------------------------------------------------------

STEPS, WIDE_STEP = 120, 14
"""Steps of a trial, and of the wide rung."""
COMPLETIONS = 64
"""Completions of a step."""


def build_scheduler(ledger: Ledger) -> Any:
    kind = ledger.spec.search.scheduler.type
    return registry.load(registry.SCHEDULERS[kind].target)(ledger)


def fill_ledger(ledger: Ledger, slots: int, trials: int) -> None:
    """Simulate a sweep that starts and ends trials until `trials` exist."""
    spec, scheduler, rng = ledger.spec, build_scheduler(ledger), np.random.default_rng(0)
    running: list[tuple[float, int, int]] = []
    """Time at which a trial reaches its next rung or its end, its number, and that step."""
    worth: list[list[float]] = []
    clock, every = 0.0, spec.training.evaluate_every

    def go_on(record: TrialRecord) -> None:
        at = record.rungs[-1].step if record.rungs else 0
        steps = (*scheduler.list_evaluation_steps(record), *range(every, STEPS, every), STEPS)
        step = min(step for step in steps if step > at)
        heapq.heappush(running, (clock + (step - at) * rng.uniform(0.8, 1.2), record.number, step))

    while True:
        while len(running) < slots:
            number = len(worth)
            if number == trials:
                return
            worth.append(rng.uniform(0.1, 1, len(spec.objectives)).tolist())
            params = spec.space.complete(first_trials.draw_point(spec, number))
            go_on(ledger.start(params, "search", "startup", seed=number))
        clock, number, step = heapq.heappop(running)
        means = np.array(worth[number]) * (1 + step / STEPS) / 2
        noisy = np.clip(means + rng.normal(0, 0.05, len(means)), 0, 1).tolist()
        values = {n: Estimate(v, 0.01) for n, v in zip(spec.objectives, noisy, strict=True)}
        cost = Cost(completions=COMPLETIONS * step, seconds=step)
        if step == STEPS:
            ledger.complete(number, Outcome(values, values, cost, None, {}))
            continue
        ledger.record_rung(number, Measurement(step, {}, cost, values))
        record = ledger.get_record(number)
        if scheduler.decide(record, record.rungs[-1]) == "pause":
            ledger.pause(number)
        else:
            go_on(record)


@contextmanager
def open_killed_sweep(trials: int, slots: int, *changes: str) -> Iterator[SweepSpec]:
    """Fill the ledger of a sweep of twice as many trials, and yield its spec."""
    changes = (f"search.trials={2 * trials}", f"training.steps={STEPS}", *PLAIN, *changes)
    with load_space("code", *changes) as spec:
        with Ledger.open(spec) as ledger:
            fill_ledger(ledger, slots, trials)
        yield spec


def measure_restart(trials: list[int] = [1000, 2000, 4000, 8000], slots: int = 200):
    """Measure every scheduler and size."""
    rows = [
        {"scheduler": scheduler, "trials": count, **restart(scheduler, count, slots)}
        for scheduler, count in product(("fifo", "halving"), trials)
    ]
    print_table(tuple(rows[0]), *(tuple(row.values()) for row in rows))
    return {"slots": slots, "rows": rows}


def restart(scheduler: str, trials: int, slots: int) -> dict[str, float]:
    """Return the CPU seconds of each part of a restart, before any process is started."""
    from gdpo_tune.tuning.attempts import RunSettings
    from gdpo_tune.tuning.lifecycle import Lifecycle

    changes = [f"search.scheduler={{type: {scheduler}}}"]
    if scheduler == "halving":
        wide = COMPLETIONS * WIDE_STEP * (2 * trials + 1) / HalvingSettings().wide_share
        changes.append(f"search.budget.completions={math.ceil(wide)}")
    with open_killed_sweep(trials, slots, *changes) as spec:
        ledger, of_ledger = time_cpu(lambda: Ledger.open(spec))
        with ledger:
            setup = RunSettings("none:none", ledger.directory / SPEC)
            lifecycle, of_lifecycle = time_cpu(
                lambda: Lifecycle(ledger, build_scheduler(ledger), setup, slots, lambda _: None)
            )
            _, of_answer = time_cpu(lambda: lifecycle.next_attempt("first"))
            lifecycle.close()
    parts = {"ledger": of_ledger, "lifecycle": of_lifecycle}
    return {**parts, "all": of_ledger + of_lifecycle + of_answer}


# --- what grows with a large sweep ----------------------------------------------------------------

EVENTS = 2000
PAUSE = 1.0
"""Seconds from a task to its result."""
METRICS = 21
"""Metrics of a result, as many as a step of the shipped sweep has."""


class Slots:
    """Process that answers many tasks at once, each after a pause."""

    async def train(self, seconds: float) -> dict[str, Any]:
        """Return a result after `seconds`."""
        await asyncio.sleep(seconds)
        return {f"train/metric_{number}": 0.5 for number in range(METRICS)}


def measure_events(tasks: list[int]) -> dict[str, float]:
    """Measure the CPU microseconds of an event for each number of tasks in flight."""
    import ray

    # Ray's worker imports the class by this module name, not as `__main__`.
    from cost import Slots

    from gdpo_tune.tuning.ray.cluster import open_cluster

    with tempfile.TemporaryDirectory() as directory, open_cluster(Path(directory) / "processes"):
        handle = ray.remote(Slots).options(max_concurrency=2000, num_cpus=0).remote()
        ray.get(handle.train.remote(0))
        return {str(count): round(measure_event(handle, count), 1) for count in tasks}


def measure_event(handle: Any, slots: int) -> float:
    """Measure the CPU microseconds of an event and the next task of the same slot."""
    from ray.air.execution import FixedResourceManager
    from ray.air.execution._internal import RayActorManager, TrackedActor

    manager = RayActorManager(FixedResourceManager())
    done = 0

    def train(actor: Any, result: Any = None) -> None:
        nonlocal done
        done += result is not None
        pause = PAUSE * min(1.0, slots / 1000)
        manager.schedule_actor_task(actor, "train", (pause,), on_result=train)

    for actor in map(TrackedActor, range(slots)):
        manager._live_actors_to_ray_actors_resources[actor] = (handle, None)
        train(actor)
    events = max(200, min(EVENTS, 4 * slots))
    while done < slots:  # one event of every slot as warm-up
        manager.next(timeout=1)
    start, before = time.process_time(), done
    while done < before + events:
        manager.next(timeout=1)
    return 1e6 * (time.process_time() - start) / (done - before)


def measure_end(trials: int, slots: int, has_steps: bool) -> dict[str, Any]:
    """Measure reading, drawing and reporting a sweep whose trials have ended."""
    from gdpo_tune.figures.front_png import write_front_png
    from gdpo_tune.figures.report_page import write_report
    from gdpo_tune.results.open_sweep import Sweep

    figures: dict[str, Any] = {}

    def note(part: str, work: Callable[[], Any]) -> Any:
        result, seconds = time_cpu(work)
        figures[part] = {"cpu_seconds": round(seconds, 2), "mib": round(measure_mib())}
        return result

    with open_killed_sweep(trials, slots) as spec:
        with note("ledger", lambda: Ledger.open(spec, read_only=True)) as ledger:
            records, sessions = tuple(ledger.get_records()), ledger.get_sessions()
        if has_steps:
            for record in records:
                write_files(spec.directory / "trials" / str(record.number))
        report = note("report", lambda: write_report(Sweep(spec, records, sessions)))
        note("front.png", lambda: write_front_png(Sweep(spec, records)))
        note("display", lambda: draw_display(spec, records))
        files = {"report": report, "ledger": spec.directory / "ledger.journal"}
        sizes = {f"{n}_megabytes": round(f.stat().st_size / 1e6, 1) for n, f in files.items()}
    return {**figures, **sizes, "states": dict(Counter(record.state for record in records))}


def write_files(directory: Path) -> None:
    """Write the metrics of the steps of a trial, and some completions."""
    rng = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        rewards = product(("correctness", "format", "length"), ("mean", "frac_reward_zero_std"))
        metrics = {f"train/rewards/{name}/{kind}": float(rng.random()) for name, kind in rewards}
        append_step(directory, Measurement(step, metrics, Cost(64 * step, step, step)))
    text = ("Write a function.\n" * 8, "<think>x</think>\n" * 20)
    write_completions(directory, [Completion(*text, {"correctness": 1.0})] * 6)


def draw_display(spec: SweepSpec, records: Sequence[TrialRecord]) -> None:
    """Draw the display of a terminal once, with all trials."""
    from rich.console import Console

    from gdpo_tune.display.live_table import LiveDisplay

    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    display = LiveDisplay(spec, console)
    display(SweepStarted(tuple(records)))
    console.print(display.render())


def measure_scale(trials: int = 10_000, slots: int = 200, tasks: list[int] = [1, 10, 100, 1000]):
    """Measure events and the end in processes of their own."""
    events = call_apart(measure_events, tasks)
    end = call_apart(measure_end, trials, slots, False)
    return {"trials": trials, "driver_us_per_event_by_tasks": events, "end": end}


def measure_report(trials: int = 1000, slots: int = 200):
    """Measure the end of a sweep whose trials have files of steps and completions."""
    limits = {"limit_seconds": LIMIT_SECONDS, "limit_megabytes": LIMIT_MB}
    return {"trials": trials, **call_apart(measure_end, trials, slots, True), **limits}


# --- a sweep that trains --------------------------------------------------------------------------

LIMIT_UTILISATION = 0.80
SHORT = [
    "search.trials=2",
    "search.budget.completions=0",
    "search.replicates.max_runs=1",
    "search.merges.budget=0",
    "search.checkpoints.budget=0",
    "training={steps: 10, validation_prompts: 16, test_prompts: 16}",
]


def measure_utilisation(read: str = "", changes: list[str] = [str]):
    """Run the shipped sweep with some changes, or read a finished one in a storage directory."""
    with load_space("code", *(changes or ()), *([f"storage={read}"] if read else [])) as spec:
        if not read:
            from gdpo_tune.tuning.runner import run_sweep

            run_sweep(spec)
        with Ledger.open(spec, read_only=True) as ledger:
            records, sessions = ledger.get_records(), ledger.get_sessions()
    if not all("finished" in session for session in sessions):
        raise SystemExit("this sweep was killed or still runs: its wall time is unknown")
    walls = [(session["slots"], session["finished"] - session["started"]) for session in sessions]
    training = sum(record.cost.seconds for record in records)
    utilisation = training / sum(slots * wall for slots, wall in walls)
    return {
        "trials": len(records),
        "failed": sum(record.state == "failed" for record in records),
        "training_seconds": round(training, 1),
        "slots": [slots for slots, _ in walls],
        "wall_seconds": round(sum(wall for _, wall in walls), 1),
        "utilisation": round(utilisation, 3),
        "limit": LIMIT_UTILISATION,
        "ok": utilisation >= LIMIT_UTILISATION,
    }


PARTS = {
    "driver": (measure_driver, {"trials": 100}),
    "scale": (measure_scale, {"trials": 60, "slots": 20, "tasks": [1, 10]}),
    "restart": (measure_restart, {"trials": [60, 120], "slots": 20}),
    "report": (measure_report, {"trials": 50, "slots": 10}),
    "utilisation": (measure_utilisation, {"changes": SHORT}),
}

if __name__ == "__main__":
    run_parts(PARTS)
