"""Lock of trials: one thread computes at a time, and finds the global state as it left it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gdpo_tune.core import compute_lock
from gdpo_tune.core.compute_lock import ComputeLock


class Register:
    """A global state, and how many threads compute at this moment."""

    def __init__(self) -> None:
        self.value = 0
        self.computing = 0

    def read(self) -> int:
        return self.value

    def restore(self, value: int) -> None:
        self.value = value

    def add(self, amount: int) -> None:
        self.computing += 1
        assert self.computing == 1
        time.sleep(0.001)
        self.value += amount
        self.computing -= 1


def run_threads(*functions):
    """Run functions in threads and raise the first of their errors."""
    with ThreadPoolExecutor(len(functions)) as threads:
        for future in [threads.submit(function) for function in functions]:
            future.result(30)


def test_each_thread_has_a_state_of_its_own_and_computes_alone():
    register = Register()
    members = ComputeLock(register.read, register.restore)
    results = {}

    def count(step):
        with members.hold():
            for _ in range(10):
                register.add(step)
                with compute_lock.yield_lock():
                    pass
            results[step] = register.value

    run_threads(*(lambda step=step: count(step) for step in (1, 10, 100)))
    assert results == {1: 10, 10: 100, 100: 1000}


def test_turns_pass_in_the_order_of_requests():
    members = ComputeLock(lambda: None, lambda _: None)
    order = []

    def work(name):
        with members.hold():
            for _ in range(3):
                order.append(name)
                with compute_lock.yield_lock():
                    pass

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    with members.hold():
        for number, thread in enumerate(threads, start=1):
            thread.start()
            while len(members._waiting) < number:
                time.sleep(0.001)
    for thread in threads:
        thread.join(timeout=30)
    assert order == list("abcabcabc")


def test_others_compute_while_a_thread_pauses_or_fails():
    register = Register()
    members = ComputeLock(register.read, register.restore)
    paused, done = threading.Event(), threading.Event()

    def wait():
        with members.hold(), compute_lock.yield_lock():
            paused.set()
            assert done.wait(10)

    def fail():
        with members.hold():
            raise ValueError("broken")

    def work():
        paused.wait(10)
        with pytest.raises(ValueError, match="broken"):
            fail()
        with members.hold():
            register.add(1)
            done.set()

    run_threads(wait, work)


def test_a_thread_outside_pauses_at_no_cost_and_none_joins_twice():
    members = ComputeLock(lambda: None, lambda _: None)
    with compute_lock.yield_lock():
        pass
    with members.hold(), pytest.raises(RuntimeError, match="already holds"), members.hold():
        pass
    with members.hold():
        pass


def test_a_thread_that_waits_for_a_lock_has_no_turn():
    members, lock, waits = (
        ComputeLock(lambda: None, lambda _: None),
        threading.Lock(),
        threading.Event(),
    )

    def hold_and_pause():
        with members.hold(), compute_lock.acquire_yielding(lock):
            with compute_lock.yield_lock():
                assert waits.wait(10)
            assert lock.locked()

    def hold():
        with members.hold():
            waits.set()
            with compute_lock.acquire_yielding(lock):
                pass

    run_threads(hold_and_pause, hold)
    assert not lock.locked()


def test_cpu_time_is_charged_to_the_thread_that_has_the_turn():
    members = ComputeLock(lambda: None, lambda _: None)
    seconds = {}
    joined = threading.Barrier(2)

    def burn():
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass

    def work(name):
        with members.hold():
            with compute_lock.yield_lock():
                joined.wait()
            if name == "busy":
                burn()
            seconds[name] = compute_lock.read_cpu_seconds()

    run_threads(lambda: work("busy"), lambda: work("idle"))
    assert seconds["busy"] >= 0.2
    assert seconds["idle"] < 0.1

    def wait_for_engine(name):
        with members.hold():
            with compute_lock.yield_lock():
                joined.wait()
                if name == "one":
                    burn()  # as an engine in a thread of its own
                joined.wait()
            seconds[name] = compute_lock.read_cpu_seconds()

    run_threads(lambda: wait_for_engine("one"), lambda: wait_for_engine("two"))
    assert seconds["one"] == pytest.approx(seconds["two"], abs=0.05)
    assert seconds["one"] + seconds["two"] >= 0.2


@pytest.mark.parametrize("broken", ["read", "restore"])
def test_a_state_that_cannot_be_read_or_restored_keeps_nobody_waiting(broken):
    register, break_now = Register(), threading.Event()

    def fail(value=0):
        if break_now.is_set():
            break_now.clear()
            raise OSError("CUDA error: device-side assert triggered")
        return value

    members = (
        ComputeLock(fail, register.restore)
        if broken == "read"
        else ComputeLock(register.read, fail)
    )

    def pause_and_break():
        with members.hold():
            break_now.set()
            with compute_lock.yield_lock():
                break_now.set()

    with pytest.raises(OSError, match="CUDA error"):
        pause_and_break()
    run_threads(lambda: join_and_add(members, register))
    assert register.value == 1


def join_and_add(members, register):
    with members.hold():
        register.add(1)
