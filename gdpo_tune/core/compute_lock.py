"""Lock under which one of the threads of a process that train one trial each computes.

Random generators are global in a process, and so is other state of the libraries. A thread gets a
state of its own with the lock, so that its trial computes as if it were alone. It yields the lock
while it waits for something else, such as the sandbox.

This imports no torch: the caller says what the state is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

State = TypeVar("State")


@dataclass(eq=False)
class _Member(Generic[State]):
    """A thread that computes under the lock."""

    lock: ComputeLock[State]
    state: State
    """Global state that the thread finds when it gets the lock again."""
    may_compute: threading.Event = field(default_factory=threading.Event)
    cpu_seconds: float = 0.0


class _CurrentMember(threading.local):
    """Member whose thread this is; None in every other thread."""

    member: _Member[Any] | None = None


_current = _CurrentMember()


class ComputeLock(Generic[State]):
    """Lock of threads that get it in the order in which they ask for it, each with its own state.

    `read` returns the present state and `restore` makes a state the present one. Each thread begins
    with the state that `read` returned when this object was made. `on_idle` is called whenever a
    thread gives the lock away and none asks for it.
    """

    def __init__(
        self,
        read: Callable[[], State],
        restore: Callable[[State], None],
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._read, self._restore, self._on_idle = read, restore, on_idle
        self._first = read()
        self._mutex = threading.Lock()
        self._holder: _Member[State] | None = None
        self._waiting: deque[_Member[State]] = deque()
        self._yielding: set[_Member[State]] = set()
        self._charged = time.process_time()

    @contextmanager
    def hold(self) -> Generator[None]:
        """Hold the lock in the block, but for where this thread yields it."""
        if _current.member is not None:
            raise RuntimeError("this thread already holds the compute lock")
        member = _Member(self, self._first)
        _current.member = member
        try:
            self.acquire(member)
            try:
                yield
            finally:
                self.release(member)
        finally:
            _current.member = None
            with self._mutex:
                self._yielding.discard(member)

    def acquire(self, member: _Member[State]) -> None:
        """Wait until a member holds the lock, and restore its state."""
        with self._mutex:
            self._charge()
            self._yielding.discard(member)
            self._waiting.append(member)
            self._call_next()
        try:
            member.may_compute.wait()
            self._restore(member.state)
        except BaseException:  # the lock must not stay with a thread that ends
            self.release(member)
            raise

    def release(self, member: _Member[State], *, yields: bool = False) -> None:
        """Keep the state of a member and let the next one compute."""
        try:
            if member is self._holder:
                member.state = self._read()
        finally:  # a GPU that is broken has no state to read, and the others must hear of it
            with self._mutex:
                self._charge()
                if member is self._holder:
                    self._holder = None
                elif member in self._waiting:
                    self._waiting.remove(member)
                member.may_compute.clear()
                if yields:
                    self._yielding.add(member)
                self._call_next()
                is_idle = self._holder is None
            if is_idle:
                self._on_idle()

    def read_cpu_seconds(self, member: _Member[State]) -> float:
        """Return the CPU time of a member; see the function of this name."""
        with self._mutex:
            self._charge()
            return member.cpu_seconds

    def _call_next(self) -> None:
        if self._holder is None and self._waiting:
            self._holder = self._waiting.popleft()
            self._holder.may_compute.set()

    def _charge(self) -> None:
        """Charge the CPU time since the last call: to the holder, else to those that yield."""
        now = time.process_time()
        members = self._yielding if self._holder is None else {self._holder}
        for member in members:
            member.cpu_seconds += (now - self._charged) / len(members)
        self._charged = now


@contextmanager
def yield_lock() -> Generator[None]:
    """Let other threads compute during the block, which must not read or change global state.

    A thread that holds no lock runs the block as it is.
    """
    member = _current.member
    if member is None:
        yield
        return
    member.lock.release(member, yields=True)
    try:
        yield
    finally:
        member.lock.acquire(member)


@contextmanager
def acquire_yielding(lock: threading.Lock) -> Generator[None]:
    """Hold another lock during the block, which may yield; a thread that waits for it yields."""
    with ExitStack() as held:
        with yield_lock():
            held.enter_context(lock)
        yield


def read_cpu_seconds() -> float:
    """Return the CPU time of this thread's trial; of the process in a thread without the lock.

    Under the lock, it is the CPU time of the process meanwhile, and an equal share of that while
    this thread yields and nobody holds the lock.
    """
    member = _current.member
    return time.process_time() if member is None else member.lock.read_cpu_seconds(member)
