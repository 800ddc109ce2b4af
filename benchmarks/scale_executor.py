"""Simulated Ray processes, in simulated time, behind the interface of Ray Tune's actor manager.

`SimulatedActors` replaces `RayActorManager`, from which Ray Tune's loop gets processes and their
next event; the loop itself, its searcher, scheduler and callbacks are the real ones. A process
takes `START` seconds to start and a step of a trial about a second. As with Ray, a trial waits
until the driver has handled its last result.

CPU time that this process spends between two events also passes in the simulation. So trials wait
for a slow driver, and the benchmark measures how long.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import pickle
import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

START = 5.0
"""Seconds in which a process of Ray starts and imports its modules."""
SPREAD = 0.1
"""Largest relative deviation of the time of a step."""
NAP = 0.005
"""Real seconds between two polls while a sampler computes a proposal."""

Make = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]
"""Generator of a trial's results from its config; each starts after the driver handled the last."""


@dataclass
class Clock:
    """Simulated time, and the share of it that the driver has spent."""

    now: float = 0.0
    driver: float = 0.0
    """CPU seconds of the driver."""
    thinking: int = 0
    """Number of proposals in progress; the clock must not jump ahead until they are done."""
    _mark: float = 0.0

    def advance(self) -> None:
        """Advance the simulation by the CPU time since `resume`."""
        spent = time.process_time() - self._mark
        self.now += spent
        self.driver += spent
        self._mark += spent

    def resume(self) -> None:
        """Start to count CPU time for the driver; time since `advance` is left out."""
        self._mark = time.process_time()

    @contextmanager
    def pause(self) -> Generator[None]:
        """Leave the CPU time of a `with` block out of the driver's time."""
        self.advance()
        yield
        self.resume()

    def wait_until(self, due: float) -> None:
        """Advance to `due`; a sampler that computes a proposal uses real time until then."""
        while self.thinking and self.now < due:
            time.sleep(NAP)
            self.advance()
        self.now = max(self.now, due)


@dataclass
class Tally:
    """Counts and times of all events so far."""

    events: int = 0
    results: int = 0
    waited: float = 0.0
    """Total simulated seconds by which results were handled late."""
    trained: float = 0.0
    """Total simulated seconds in which trials trained."""
    filled: float = math.nan
    """Simulated second at which every slot had its first trial."""
    decoded: float = 0.0
    """CPU seconds in which results were unpickled, as Ray does in the driver."""


class Method:
    """Method of an actor with a fixed answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, **_: Any) -> Any:
        """Return the answer."""
        return self._answer


class Handle:
    """Handle of an actor, with the attributes that Ray Tune uses."""

    def __init__(self) -> None:
        import ray

        self._actor_id = ray.ActorID(os.urandom(ray.ActorID.size()))
        self.get_auto_filled_metrics = Method({"node_ip": "10.0.0.1", "pid": 1})

    def __repr__(self) -> str:
        return f"Actor({self._actor_id.hex()})"


class SimulatedActors:
    """Up to `slots` simulated processes; public names are those that Ray Tune uses."""

    slots = 1000
    make: Make
    """Generates the results of a trial; set it before use."""

    def __init__(self, resource_manager: Any) -> None:
        del resource_manager
        self.clock, self.tally = CLOCK, TALLY
        self._events: list[tuple[float, int, Any, Callable[[], None]]] = []
        self._order = itertools.count()
        self._cancelled: set[int] = set()
        self._tasks: dict[Any, set[int]] = {}
        self._pending: dict[Any, list[tuple[str, tuple[Any, ...], Any]]] = {}
        self._starting: set[Any] = set()
        self._live_actors_to_ray_actors_resources: dict[Any, tuple[Handle, None]] = {}
        self._results: dict[Any, Iterator[dict[str, Any]]] = {}
        self._configs: dict[Any, dict[str, Any]] = {}
        self._random = random.Random(0)
        self._busy: set[Any] = set()
        self.clock.resume()

    @property
    def num_live_actors(self) -> int:
        """Number of processes that have been started and not removed."""
        return len(self._live_actors_to_ray_actors_resources)

    @property
    def num_pending_actors(self) -> int:
        """Number of processes that wait for a slot."""
        return len(self._pending)

    @property
    def num_total_actors(self) -> int:
        """Number of live and pending processes."""
        return self.num_live_actors + self.num_pending_actors

    @property
    def num_actor_tasks(self) -> int:
        """Number of scheduled events."""
        return len(self._events)

    def get_live_actors_resources(self) -> dict[str, float]:
        """Return the resources of all live processes."""
        return {"CPU": float(self.num_live_actors)}

    def add_actor(self, cls: Any, kwargs: dict[str, Any], resource_request: Any, **on: Any) -> Any:
        """Request a process."""
        from ray.air.execution._internal import TrackedActor

        with self.clock.pause():
            actor = TrackedActor(next(self._order), **on)
            self._configs[actor] = kwargs["config"]
            self._pending[actor] = []
            self._start()
        return actor

    def _start(self) -> None:
        for actor in [a for a in self._pending if self.num_live_actors < self.slots]:
            if self.num_live_actors >= self.slots:
                return
            tasks = self._pending.pop(actor)
            self._live_actors_to_ray_actors_resources[actor] = (Handle(), None)
            self._schedule(START, actor, lambda actor=actor: self._finish_start(actor))
            self._starting.add(actor)
            for method, arguments, on_result in tasks:
                self._start_task(actor, method, arguments, on_result)

    def _finish_start(self, actor: Any) -> None:
        self._starting.discard(actor)
        actor._on_start(actor)

    def schedule_actor_task(
        self,
        tracked_actor: Any,
        method_name: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        on_result: Any = None,
        on_error: Any = None,
        _return_future: bool = False,
    ) -> None:
        """Schedule a task on a process, once it has started."""
        with self.clock.pause():
            if tracked_actor in self._pending:
                self._pending[tracked_actor].append((method_name, args, on_result))
            else:
                self._start_task(tracked_actor, method_name, args, on_result)

    def _start_task(
        self, actor: Any, method: str, arguments: tuple[Any, ...], on_result: Any
    ) -> None:
        if method == "reset":
            self._configs[actor] = arguments[0]
            self._results.pop(actor, None)
            self._schedule(0.01, actor, lambda: on_result(actor, True))
        elif method == "train":
            self._train(actor, on_result)
        else:
            assert method == "stop", method  # Ray Tune then removes the actor

    def _train(self, actor: Any, on_result: Any) -> None:
        """Schedule the next result of the trial, a step from now."""
        if actor not in self._results:
            self._results[actor] = self.make(self._configs[actor])
            self._busy.add(actor)
            if len(self._busy) == self.slots and math.isnan(self.tally.filled):
                self.tally.filled = self.clock.now
        result = next(self._results[actor])
        packed = pickle.dumps(result)
        # a step takes a second; messages after the last step take no time
        seconds = result["time_this_iter_s"] if "training_iteration" in result else 0.0
        seconds *= 1 + SPREAD * (2 * self._random.random() - 1)
        self.tally.trained += seconds

        def deliver() -> None:
            self.tally.results += 1
            before = time.thread_time()
            result = pickle.loads(packed)
            self.tally.decoded += time.thread_time() - before
            on_result(actor, result)

        self._schedule(seconds, actor, deliver)

    def _schedule(self, seconds: float, actor: Any, then: Callable[[], None]) -> None:
        number = next(self._order)
        heapq.heappush(self._events, (self.clock.now + seconds, number, actor, then))
        self._tasks.setdefault(actor, set()).add(number)

    def next(self, timeout: float | None = None) -> bool:
        """Process the next event; return False if there is none within `timeout` seconds."""
        self.clock.advance()
        while self._events and self._events[0][1] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._events)[1])
        limit = self.clock.now + (math.inf if timeout is None else timeout)
        if not self._events or self._events[0][0] > limit:
            self.clock.wait_until(limit if self._events or self.clock.thinking else self.clock.now)
            self.clock.resume()
            return False
        due, number, actor, then = heapq.heappop(self._events)
        self._tasks.get(actor, set()).discard(number)
        self.clock.wait_until(due)
        self.tally.waited += self.clock.now - due
        self.tally.events += 1
        self.clock.resume()
        then()
        return True

    def clear_actor_task_futures(self, tracked_actor: Any) -> None:
        """Cancel all scheduled tasks of a process."""
        self._cancelled |= self._tasks.pop(tracked_actor, set())

    def remove_actor(self, tracked_actor: Any, kill: bool = False, stop_future: Any = None) -> bool:
        """Remove a process; return whether it had been started."""
        if self._pending.pop(tracked_actor, None) is not None:
            return False
        self.clear_actor_task_futures(tracked_actor)
        if tracked_actor in self._starting:  # Ray Tune reuses a warm process instead
            self._starting.discard(tracked_actor)
            tracked_actor.set_on_stop(None)

        def finish_stop() -> None:
            del self._live_actors_to_ray_actors_resources[tracked_actor]
            self._results.pop(tracked_actor, None)
            self._busy.discard(tracked_actor)
            if tracked_actor._on_stop:
                tracked_actor._on_stop(tracked_actor)
            self._start()

        self._schedule(0.0, tracked_actor, finish_stop)
        self._tasks.pop(tracked_actor)  # so that the stop cannot be cancelled
        return True

    def is_actor_started(self, tracked_actor: Any) -> bool:
        """Return whether a process has been started."""
        return tracked_actor in self._live_actors_to_ray_actors_resources

    def is_actor_failed(self, tracked_actor: Any) -> bool:
        """Return False: simulated processes do not fail."""
        return False

    def cleanup(self) -> None:
        """Remove all processes and events."""
        self._live_actors_to_ray_actors_resources.clear()
        self._events.clear()


CLOCK = Clock()
TALLY = Tally()
