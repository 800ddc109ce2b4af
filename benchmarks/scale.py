"""What grows with a large sweep: events of Ray's actor manager, and a finished sweep's files.

    python benchmarks/scale.py [--trials 10000] [--tasks 1 10 100 1000] [--small]

Ray: the driver's CPU time of an event for each number of tasks in flight. One real process answers
all of them, since a thousand processes do not fit on one machine. The manager, its futures,
`ray.wait` over all of them and the unpickling of results are the real ones.

The end: CPU time and memory to read the ledger of `--trials` ended trials, to write its report and
the picture of its front, and to draw the live display once. The sweep is that of `restart_cost.py`,
without step files. `driver.py` measures the running driver, over as many trials.

All costs are CPU seconds of the driver's process, not wall time, so they leave out waits for the
disk. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import call_apart, load_space, measure_memory, run, time_cpu

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


def measure_loop(tasks: list[int]) -> dict[str, float]:
    """Measure the CPU microseconds of an event for each number of tasks in flight."""
    import ray

    # Ray's worker imports the class by this module name, not as `__main__`.
    from scale import Slots

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


def measure_end(trials: int, slots: int) -> dict[str, Any]:
    """Measure reading, drawing and reporting a sweep whose trials have ended."""
    from restart_cost import STEPS, KilledSweep

    from gdpo_tune.figures.front_png import write_front_png
    from gdpo_tune.figures.report_page import write_report
    from gdpo_tune.ledger import Ledger
    from gdpo_tune.results.open_sweep import Sweep

    figures: dict[str, Any] = {}

    def note(part: str, work: Callable[[], Any]) -> Any:
        result, seconds = time_cpu(work)
        memory = round(measure_memory(os.getpid())["rss"])
        figures[part] = {"cpu_seconds": round(seconds, 2), "mib": memory}
        return result

    changes = (
        f"search.trials={2 * trials}",
        "search.budget.completions=0",
        f"training.steps={STEPS}",
        "search.sampler=random",
    )
    with load_space("code", *changes) as spec:
        with Ledger.open(spec) as ledger:
            KilledSweep(ledger, slots).run(trials)
        with note("reading the ledger", lambda: Ledger.open(spec, read_only=True)) as ledger:
            records, sessions = tuple(ledger.get_records()), ledger.get_sessions()
        report = note("report", lambda: write_report(Sweep(spec, records, sessions)))
        note("front.png", lambda: write_front_png(Sweep(spec, records)))
        note("one picture of the live display", lambda: draw_display(spec, records))
        figures["report_megabytes"] = round(report.stat().st_size / 1e6, 1)
        figures["ledger_megabytes"] = round(
            (spec.directory / "ledger.journal").stat().st_size / 1e6, 1
        )
    figures["states"] = dict(Counter(record.state for record in records))
    return figures


def draw_display(spec: Any, records: Any) -> None:
    """Draw the display of a terminal once, with all trials."""
    from rich.console import Console

    from gdpo_tune.core.events import SweepStarted
    from gdpo_tune.display.live_table import LiveDisplay

    with Path(os.devnull).open("w") as null:
        console = Console(file=null, force_terminal=True, width=120)
        display = LiveDisplay(spec, console)
        display(SweepStarted(records))
        console.print(display.render())


def measure(trials: int = 10_000, slots: int = 200, tasks: list[int] = [1, 10, 100, 1000]):
    """Measure both in processes of their own."""
    return {
        "trials": trials,
        "driver_us_per_event_by_tasks": call_apart(measure_loop, tasks),
        "end": call_apart(measure_end, trials, slots),
    }


if __name__ == "__main__":
    run(measure, {"trials": 60, "slots": 20, "tasks": [1, 10]})
