"""What the simulation of `scale.py` leaves out: Ray's own actor manager, with real tasks in flight.

One real process answers for all slots, since a thousand of them do not fit on one machine. The
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
    """A process that answers many tasks at once, each after a while."""

    def __init__(self, result: dict[str, Any]) -> None:
        self._result = result

    async def train(self, seconds: float) -> dict[str, Any]:
        """One result."""
        await asyncio.sleep(seconds)
        return self._result


def measure_loop(told: Path, slots: list[int]) -> None:
    """CPU of the driver an event, by slots."""
    import ray
    from scale_trials import METRICS, add_ray_fields

    from gdpo_tune.tuning.ray.cluster import open_cluster

    result = add_ray_fields({f"train/{name}": 0.5 for name in METRICS}, 1, {"results": 30})
    with open_cluster(told.with_suffix(".processes")):
        handle = ray.remote(Slots).options(max_concurrency=2000, num_cpus=0).remote(result)
        ray.get(handle.train.remote(0))
        found = {str(count): round(measure_event(handle, count), 1) for count in slots}
    told.write_text(json.dumps({"driver_us_per_event_by_slots": found}))


def measure_event(handle: Any, slots: int) -> float:
    """CPU microseconds of an event that is followed by the next task of the same slot."""
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
    while done < slots:  # all of them once, to be warm
        manager.next(timeout=1)
    start, before = time.process_time(), done
    while done < before + events:
        manager.next(timeout=1)
    return 1e6 * (time.process_time() - start) / (done - before)
