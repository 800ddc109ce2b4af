"""Turns: of the threads of a process that train one trial each, a single one computes at a time.

Random generators are global in a process, and so is other state of the libraries. A thread gets a
state of its own with its turn, so that its trial computes as if it were alone. It gives the turn
away with `pause` while it waits for something else, such as the sandbox.

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
    """A thread that takes turns."""

    turns: Turns[State]
    state: State
    """Global state that the thread finds at its next turn."""
    may_compute: threading.Event = field(default_factory=threading.Event)
    cpu_seconds: float = 0.0


class _CurrentMember(threading.local):
    """Member whose thread this is; None in every other thread."""

    member: _Member[Any] | None = None


_current = _CurrentMember()


class Turns(Generic[State]):
    """Turns of threads, in the order in which they ask for one.

    `read` returns the present state and `restore` makes a state the present one. Each thread begins
    with the state that `read` returned when this object was made. `on_idle` is called whenever a
    thread gives its turn away and none asks for it.
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
        self._paused: set[_Member[State]] = set()
        self._charged = time.process_time()

    @contextmanager
    def join(self) -> Generator[None]:
        """Take turns in the block, which begins and ends with the turn of this thread.

        Raises:
            RuntimeError: this thread takes turns already.
        """
        if _current.member is not None:
            raise RuntimeError("a thread takes turns once at a time")
        member = _Member(self, self._first)
        _current.member = member
        try:
            self.take(member)
            try:
                yield
            finally:
                self.give(member)
        finally:
            _current.member = None
            with self._mutex:
                self._paused.discard(member)

    def take(self, member: _Member[State]) -> None:
        """Wait for the turn of a member."""
        with self._mutex:
            self._charge()
            self._paused.discard(member)
            self._waiting.append(member)
            self._call_next()
        try:
            member.may_compute.wait()
            self._restore(member.state)
        except BaseException:  # the turn must not stay with a thread that ends
            self.give(member)
            raise

    def give(self, member: _Member[State], *, pauses: bool = False) -> None:
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
                if pauses:
                    self._paused.add(member)
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
        """Charge the CPU time since the last call: to the holder, else to those that pause."""
        now = time.process_time()
        members = self._paused if self._holder is None else {self._holder}
        for member in members:
            member.cpu_seconds += (now - self._charged) / len(members)
        self._charged = now


@contextmanager
def pause() -> Generator[None]:
    """Let other threads compute during the block, which must not read or change global state.

    A thread that takes no turns runs the block as it is.
    """
    member = _current.member
    if member is None:
        yield
        return
    member.turns.give(member, pauses=True)
    try:
        yield
    finally:
        member.turns.take(member)


@contextmanager
def hold(lock: threading.Lock) -> Generator[None]:
    """Hold a lock during the block, which may pause. A thread that waits for it has no turn."""
    with ExitStack() as held:
        with pause():
            held.enter_context(lock)
        yield


def read_cpu_seconds() -> float:
    """Return the CPU time of this thread's trial; of the process in a thread without turns.

    In turns, it is the CPU time of the process during them, and an equal share of that during
    pauses in which nobody has a turn.
    """
    member = _current.member
    return time.process_time() if member is None else member.turns.read_cpu_seconds(member)
