"""Costs of Ray's own actor manager, which the simulation of `scale.py` replaces.

One real process answers for all slots, since a thousand processes do not fit on one machine. The
manager, its futures, `ray.wait` over all of them and the unpickling of results are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

EVENTS = 2000
PAUSE = 1.0
"""Seconds from a task to its result."""


class Slots:
    """Process that answers many tasks at once, each after a pause."""

    def __init__(self, result: dict[str, Any]) -> None:
        self._result = result

    async def train(self, seconds: float) -> dict[str, Any]:
        """Return the result after `seconds`."""
        await asyncio.sleep(seconds)
        return self._result


def measure_loop(output: Path, slots: list[int]) -> None:
    """Measure the driver's CPU time of an event for each number of slots."""
    import ray
    from scale_trials import METRICS, add_ray_fields

    from gdpo_tune.tuning.ray.cluster import open_cluster

    result = add_ray_fields({f"train/{name}": 0.5 for name in METRICS}, 1, {"results": 30})
    with open_cluster(output.with_suffix(".processes")):
        handle = ray.remote(Slots).options(max_concurrency=2000, num_cpus=0).remote(result)
        ray.get(handle.train.remote(0))
        costs = {str(count): round(measure_event(handle, count), 1) for count in slots}
    output.write_text(json.dumps({"driver_us_per_event_by_slots": costs}))


def measure_event(handle: Any, slots: int) -> float:
    """Measure the CPU microseconds of an event and the next task of the same slot."""
    from ray.air.execution import FixedResourceManager
    from ray.air.execution._internal import RayActorManager, TrackedActor

    manager = RayActorManager(FixedResourceManager())
    actors = [TrackedActor(number) for number in range(slots)]
    done = 0

    def train(actor: Any, result: Any = None) -> None:
        nonlocal done
        done += result is not None
        pause = PAUSE * min(1.0, slots / 1000)
        manager.schedule_actor_task(actor, "train", (pause,), on_result=train)

    for actor in actors:
        manager._live_actors_to_ray_actors_resources[actor] = (handle, None)
        train(actor)
    events = max(200, min(EVENTS, 4 * slots))
    while done < slots:  # one event of every slot as warm-up
        manager.next(timeout=1)
    start, before = time.process_time(), done
    while done < before + events:
        manager.next(timeout=1)
    return 1e6 * (time.process_time() - start) / (done - before)
