"""Processes of Ray that exist in simulated time only, behind the interface of Ray Tune's own.

`SimulatedActors` stands in for `RayActorManager`, which Ray Tune's loop asks for processes and for
the next thing that happens in one; the loop itself, its searcher, scheduler and callbacks are the
real ones. A process takes `START` seconds to come up, a step of a trial about a second, and a trial
waits until the driver has dealt with its last result, as Ray's do.

The clock is fair to the driver: whatever CPU time this process spends between two events passes in
the simulation, too. So trials wait for a driver that does not keep up, and how long is measured.
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
"""Seconds in which a process of Ray comes up and imports what it needs."""
SPREAD = 0.1
"""Share by which a step takes longer or shorter."""
NAP = 0.005
"""Real seconds between two looks at a sampler that is thinking."""

Make = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]
"""From a trial's config, its results; each is asked for once the driver has dealt with the last."""


@dataclass
class Clock:
    """Simulated seconds, and what the driver has spent of them."""

    now: float = 0.0
    driver: float = 0.0
    """CPU seconds of the driver."""
    thinking: int = 0
    """Proposals that are being thought about: meanwhile nobody may jump ahead in time."""
    _mark: float = 0.0

    def advance(self) -> None:
        """What was spent since `resume` has passed in the simulation, too."""
        spent = time.process_time() - self._mark
        self.now += spent
        self.driver += spent
        self._mark += spent

    def resume(self) -> None:
        """From here on the driver works; what was spent since `advance` is the simulation's own."""
        self._mark = time.process_time()

    @contextmanager
    def pause(self) -> Generator[None]:
        """What is spent in here is the simulation's own."""
        self.advance()
        yield
        self.resume()

    def wait_until(self, due: float) -> None:
        """Nothing happens before `due`; a sampler uses the time."""
        while self.thinking and self.now < due:
            time.sleep(NAP)
            self.advance()
        self.now = max(self.now, due)


@dataclass
class Tally:
    """What has happened."""

    events: int = 0
    results: int = 0
    waited: float = 0.0
    """Simulated seconds by which results were dealt with late, in all."""
    trained: float = 0.0
    """Simulated seconds in which trials trained."""
    filled: float = math.nan
    """Simulated second at which every slot had its first trial."""
    decoded: float = 0.0
    """CPU seconds in which results were unpickled, as Ray does in the driver."""


class Method:
    """A method of an actor, of which the answer is known."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, **_: Any) -> Any:
        """The answer."""
        return self._answer


class Handle:
    """What Ray Tune knows of an actor."""

    def __init__(self) -> None:
        import ray

        self._actor_id = ray.ActorID(os.urandom(ray.ActorID.size()))
        self.get_auto_filled_metrics = Method({"node_ip": "10.0.0.1", "pid": 1})

    def __repr__(self) -> str:
        return f"Actor({self._actor_id.hex()})"


class SimulatedActors:
    """Up to `slots` processes. Named methods and attributes are those that Ray Tune uses."""

    slots = 1000
    make: Make
    """Results of a trial; set it first."""

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
        """Processes that have been asked for, and are not gone."""
        return len(self._live_actors_to_ray_actors_resources)

    @property
    def num_pending_actors(self) -> int:
        """Processes that wait for a slot."""
        return len(self._pending)

    @property
    def num_total_actors(self) -> int:
        """Both."""
        return self.num_live_actors + self.num_pending_actors

    @property
    def num_actor_tasks(self) -> int:
        """What is to happen."""
        return len(self._events)

    def get_live_actors_resources(self) -> dict[str, float]:
        """What they take."""
        return {"CPU": float(self.num_live_actors)}

    def add_actor(self, cls: Any, kwargs: dict[str, Any], resource_request: Any, **on: Any) -> Any:
        """Ask for a process."""
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
        """Ask something of a process, once it is up."""
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
            assert method == "stop", method  # who removes the actor goes on from there

    def _train(self, actor: Any, on_result: Any) -> None:
        """The next result of the trial, a step from now."""
        if actor not in self._results:
            self._results[actor] = self.make(self._configs[actor])
            self._busy.add(actor)
            if len(self._busy) == self.slots and math.isnan(self.tally.filled):
                self.tally.filled = self.clock.now
        result = next(self._results[actor])
        packed = pickle.dumps(result)
        # a step takes a second; what follows the last one takes no time
        seconds = result["time_this_iter_s"] if "training_iteration" in result else 0.0
        seconds *= 1 + SPREAD * (2 * self._random.random() - 1)
        self.tally.trained += seconds

        def told() -> None:
            self.tally.results += 1
            before = time.thread_time()
            result = pickle.loads(packed)
            self.tally.decoded += time.thread_time() - before
            on_result(actor, result)

        self._schedule(seconds, actor, told)

    def _schedule(self, seconds: float, actor: Any, then: Callable[[], None]) -> None:
        number = next(self._order)
        heapq.heappush(self._events, (self.clock.now + seconds, number, actor, then))
        self._tasks.setdefault(actor, set()).add(number)

    def next(self, timeout: float | None = None) -> bool:
        """Let the next thing happen; False if nothing does within `timeout` seconds."""
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
        """Nothing that was asked of a process will happen."""
        self._cancelled |= self._tasks.pop(tracked_actor, set())

    def remove_actor(self, tracked_actor: Any, kill: bool = False, stop_future: Any = None) -> bool:
        """End a process; return whether it had been started."""
        if self._pending.pop(tracked_actor, None) is not None:
            return False
        self.clear_actor_task_futures(tracked_actor)
        if tracked_actor in self._starting:  # it got a warm process instead, and tells nobody
            self._starting.discard(tracked_actor)
            tracked_actor.set_on_stop(None)

        def stopped() -> None:
            del self._live_actors_to_ray_actors_resources[tracked_actor]
            self._results.pop(tracked_actor, None)
            self._busy.discard(tracked_actor)
            if tracked_actor._on_stop:
                tracked_actor._on_stop(tracked_actor)
            self._start()

        self._schedule(0.0, tracked_actor, stopped)
        self._tasks.pop(tracked_actor)  # nothing takes that back
        return True

    def is_actor_started(self, tracked_actor: Any) -> bool:
        """Whether a process has been started."""
        return tracked_actor in self._live_actors_to_ray_actors_resources

    def is_actor_failed(self, tracked_actor: Any) -> bool:
        """Never: nothing fails in here."""
        return False

    def cleanup(self) -> None:
        """End everything."""
        self._live_actors_to_ray_actors_resources.clear()
        self._events.clear()


CLOCK = Clock()
TALLY = Tally()
