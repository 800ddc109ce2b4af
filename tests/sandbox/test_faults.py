"""Processes of the sandbox are killed: jobs keep their verdicts, and nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from gdpo_tune.core.errors import SandboxInfraError
from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits, local_sandbox
from gdpo_tune.sandbox.guest.grading import CandidateReport
from gdpo_tune.sandbox.guest.protocol import HEADER, READY, pack_frame
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

GOOD = Job("def f(x): return x + 1", (Call("f", (1,), 2),))
CHECKED = Job(GOOD.code, asserts=("assert f(1) > 1",))
ENDING = Job("import os\ndef f(x): os._exit(0)", GOOD.calls)
PATIENT = Limits(cpu_seconds=500, wall_seconds=1000)
SLOW = Job("import time\ndef f(x):\n    time.sleep(0.3)\n    return x + 1", GOOD.calls)
SLEEPER = Job("import time\ndef f(x): time.sleep(100)", GOOD.calls, limits=PATIENT)


def descendants(pid=None):
    """Processes that live below this one, or below `pid`."""
    found = psutil.Process(pid).children(recursive=True)
    return {process for process in found if is_alive(process)}


def is_alive(process):
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def zygotes():
    """Zygotes below this process, and their forks, which carry the same command line."""
    found = set()
    for process in descendants():
        with suppress(psutil.NoSuchProcess):
            if any(part.endswith("sandbox/launch.py") for part in process.cmdline()):
                found.add(process)
    return found


def locked():
    """Forks that a filter locks: candidates, and for an instant the trial of the filter."""
    found = set()
    for process in zygotes():
        with suppress(FileNotFoundError, ProcessLookupError):
            if "Seccomp:\t2" in Path(f"/proc/{process.pid}/status").read_text():
                found.add(process)
    return found


def kill(processes):
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def statuses(sandbox, *jobs):
    return [result.status for result in sandbox.run_batch(jobs)]


def test_a_process_killed_between_batches_is_replaced():
    with CodeSandbox() as sandbox:
        assert sandbox.run_batch([GOOD])[0].passed
        kill(zygotes())
        assert statuses(sandbox, *[GOOD] * 3) == ["passed"] * 3


def test_a_job_whose_process_is_killed_under_it_is_retried():
    with CodeSandbox() as sandbox:
        idle = zygotes()

        def kill_when_busy():
            wait_until(lambda: zygotes() - idle)
            kill(idle)

        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(kill_when_busy)
            assert statuses(sandbox, SLOW, GOOD, GOOD) == ["passed"] * 3
        killing.result()
        assert not zygotes() & idle


def test_a_candidate_killed_from_outside_is_retried_and_then_raises():
    done = threading.Event()

    def keep_killing():
        while not done.is_set():
            early = locked()
            time.sleep(0.3)
            kill(early & locked())

    with CodeSandbox() as sandbox, ThreadPoolExecutor(1) as pool:
        killing = pool.submit(keep_killing)
        try:
            with pytest.raises(SandboxInfraError, match=r"3 attempts: .* killed from outside"):
                sandbox.run_batch([SLEEPER])
        finally:
            done.set()
        killing.result()


def test_a_failed_batch_leaves_the_sandbox_usable(monkeypatch):
    with CodeSandbox() as sandbox:
        monkeypatch.setattr("gdpo_tune.sandbox.local_sandbox._GRACE_SECONDS", -7.9)
        # The job sleeps longer than the trainer waits: 2 * 4 - 7.9 seconds.
        with pytest.raises(SandboxInfraError, match="does not answer"):
            sandbox.run_batch([SLOW, GOOD])
        monkeypatch.undo()
        assert sandbox.run_batch([GOOD])[0].passed


def test_an_unforeseen_error_leaves_no_answers_to_the_next_batch(monkeypatch):
    def broken(*arguments):
        raise KeyError("verdict")

    with CodeSandbox() as sandbox:
        monkeypatch.setattr("gdpo_tune.sandbox.local_sandbox.conclude", broken)
        with pytest.raises(SandboxInfraError, match="KeyError"):
            sandbox.run_batch([GOOD] * 3)
        monkeypatch.undo()
        wrong = Job("def f(x): return x", GOOD.calls)
        assert statuses(sandbox, wrong, GOOD) == ["failed", "passed"]


def test_close_ends_every_process():
    before = descendants()
    with CodeSandbox(workers=2) as sandbox:
        sandbox.run_batch([GOOD] * 4)
        assert len(descendants() - before) >= 2
    sandbox.close()
    assert descendants() <= before


def test_close_does_not_wait_for_jobs_under_way():
    check = Job(SLEEPER.code, asserts=("assert f(1) is 1",), limits=PATIENT)
    before = descendants()
    with ThreadPoolExecutor(1) as pool, CodeSandbox(workers=2) as sandbox:
        batch = pool.submit(sandbox.run_batch, [SLEEPER, check] * 2)
        wait_until(lambda: len(locked()) >= 2)
    reason = "^the sandbox was closed before a job had its verdict$"
    with pytest.raises(SandboxInfraError, match=reason):
        batch.result()
    assert descendants() <= before


def test_a_fork_of_the_trainer_does_not_keep_the_processes_of_a_closed_sandbox():
    before = descendants()
    with CodeSandbox() as sandbox:
        assert sandbox.run_batch([GOOD])[0].passed
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        ended = zygotes()
    try:
        assert not any(map(is_alive, ended))
        assert {process.pid for process in descendants() - before} == {child}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_busy_machine_has_twice_the_seconds_of_a_job_and_thirty_more(monkeypatch):
    opened = Mock(side_effect=local_sandbox._open_pair)
    monkeypatch.setattr(local_sandbox, "_open_pair", opened)
    with CodeSandbox() as sandbox:
        assert statuses(sandbox, replace(GOOD, limits=Limits(1, 7))) == ["passed"]
    assert [call.args[1] for call in opened.call_args_list] == [2 * 7 + 30]


def test_verdicts_do_not_depend_on_forks_that_hold_the_connections(monkeypatch):
    open_pair, held = local_sandbox._open_pair, []

    def open_and_hold(*arguments):
        pair = open_pair(*arguments)
        held.extend(end.dup() for end in pair)  # as a fork at this instant would
        return pair

    monkeypatch.setattr(local_sandbox, "_open_pair", open_and_hold)
    ending = Job(ENDING.code, asserts=CHECKED.asserts)
    with CodeSandbox() as sandbox:
        found = statuses(sandbox, GOOD, ENDING, CHECKED, ending)
    for end in held:
        end.close()
    assert found == ["passed", "crash"] * 2


FORGED_VERDICTS = [
    b"7", b'["test","perfect","",""]', b'["test","passed",1,""]', b'["test","passed"]', b"\xff",
    b"[" * 5000, b'["stop","ended",null,""]',
]  # fmt: skip


@pytest.mark.parametrize("frame", [*map(pack_frame, FORGED_VERDICTS), HEADER.pack(1 << 30)])
def test_a_checker_that_forges_its_verdicts_gives_none(frame):
    ours, theirs = socket.socketpair()
    report = CandidateReport()
    with ours, theirs:
        theirs.sendall(READY + frame)
        local_sandbox._collect_verdicts(ours, local_sandbox.encode_job(0, CHECKED), report)
    assert (report.verdicts, report.stop) == ([], "malformed")


def test_clocks_that_end_before_a_candidate_starts_are_a_timeout():
    limits = Limits(cpu_seconds=0.01, wall_seconds=0.01)
    jobs = [Job(job.code, job.calls, job.asserts, limits=limits) for job in (GOOD, CHECKED)]
    with CodeSandbox() as sandbox:
        assert set(statuses(sandbox, *jobs * 10)) <= {"passed", "timeout"}


TRAINER = """
import sys
from gdpo_tune.sandbox import *
sandbox = CodeSandbox(workers=2)
print("ready", flush=True)
spin = Job("import time\\ndef f(): time.sleep(1000)", (Call("f", (), 1),),
           limits=Limits(cpu_seconds=500, wall_seconds=1000))
check = Job(spin.code, asserts=("assert f() is 1",), limits=spin.limits)
if sys.argv[1] == "busy":
    sandbox.run_batch([spin, check])
sys.stdin.read()
"""


@pytest.mark.parametrize(("state", "least"), [("idle", 2), ("busy", 5)])
def test_the_death_of_the_trainer_leaves_no_process(state, least):
    command = [sys.executable, "-W", "ignore", "-c", TRAINER, state]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as trainer:
        assert trainer.stdout.readline() == "ready\n"
        wait_until(lambda: len(descendants(trainer.pid)) >= least)
        children = descendants(trainer.pid)
        trainer.kill()
        trainer.wait()
        wait_until(lambda: not any(map(is_alive, children)))


def test_many_jobs_leave_no_descriptor_and_no_process():
    def state():
        return sorted((p.pid, p.num_fds()) for p in {psutil.Process(), *descendants()})

    spin = Job("while True: pass", GOOD.calls, limits=Limits(cpu_seconds=0.01))
    with CodeSandbox() as sandbox:
        sandbox.run_batch([GOOD, ENDING, CHECKED, spin])
        before = state()
        sandbox.run_batch([GOOD, ENDING, CHECKED, spin] * 50)
        assert state() == before


def test_a_sandbox_works_from_any_thread_and_outlives_the_one_that_made_it():
    with ThreadPoolExecutor(1) as maker:
        made = maker.submit(CodeSandbox).result()
    with made as sandbox, ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda _: statuses(sandbox, *[GOOD] * 5), range(3))]
        assert zygotes()
    assert found == [["passed"] * 5] * 3
