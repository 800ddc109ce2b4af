"""Processes of the sandbox are killed: jobs keep their verdicts, and nothing is left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gdpo_tune.core.errors import SandboxInfraError
from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits, local_sandbox
from gdpo_tune.sandbox.guest.grading import CandidateReport
from gdpo_tune.sandbox.guest.protocol import HEADER, READY, pack_frame
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

GOOD = Job("def f(x): return x + 1", (Call("f", (1,), 2),))
PATIENT = Limits(cpu_seconds=500, wall_seconds=1000)
SLOW = Job("import time\ndef f(x):\n    time.sleep(0.3)\n    return x + 1", (Call("f", (1,), 2),))


def descendants(root):
    """Process ids below `root`."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(entry.parent.name)] = int(fields[1])
    found = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} | found
        if more == found:
            return found - {root}
        found = more


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def zygote_pids():
    """Processes of zygotes below this one, forks included."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"sandbox/launch.py\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_process_killed_between_batches_is_replaced():
    with CodeSandbox() as sandbox:
        assert sandbox.run_batch([GOOD])[0].passed
        for pid in zygote_pids():
            os.kill(pid, signal.SIGKILL)
        assert [result.status for result in sandbox.run_batch([GOOD] * 3)] == ["passed"] * 3


def test_a_job_whose_process_is_killed_under_it_is_retried():
    with CodeSandbox() as sandbox:
        idle = set(zygote_pids())

        def kill_when_busy():
            # A candidate is a fork of the zygote and carries its command line.
            assert wait_until(lambda: set(zygote_pids()) - idle)
            for pid in idle:
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_when_busy)
        killer.start()
        results = sandbox.run_batch([SLOW, GOOD, GOOD])
        killer.join()
        assert not set(zygote_pids()) & idle
    assert [result.status for result in results] == ["passed"] * 3


def locked_pids():
    """Forks that a filter locks: candidates, and for an instant the trial of the filter."""
    found = set()
    for pid in zygote_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text():
                found.add(pid)
    return found


def test_a_candidate_killed_from_outside_is_retried_and_then_raises():
    sleeper = Job("import time\ndef f(x): time.sleep(100)", GOOD.calls, limits=PATIENT)
    with CodeSandbox() as sandbox:
        done = threading.Event()

        def keep_killing():
            while not done.is_set():
                early = locked_pids()
                time.sleep(0.3)
                for pid in early & locked_pids():
                    os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=keep_killing)
        killer.start()
        try:
            with pytest.raises(SandboxInfraError, match=r"3 attempts: .* killed from outside"):
                sandbox.run_batch([sleeper])
        finally:
            done.set()
            killer.join()


def test_a_failed_batch_leaves_the_sandbox_usable(monkeypatch):
    with CodeSandbox() as sandbox:
        monkeypatch.setattr("gdpo_tune.sandbox.local_sandbox._GRACE_SECONDS", -7.9)
        # The job sleeps longer than the trainer waits: 2 * 4 - 7.9 seconds.
        with pytest.raises(SandboxInfraError, match="does not answer"):
            sandbox.run_batch([SLOW, GOOD])
        monkeypatch.undo()
        assert sandbox.run_batch([GOOD])[0].passed


def test_an_unforeseen_error_leaves_no_answers_to_the_next_batch(monkeypatch):
    wrong = Job("def f(x): return x", GOOD.calls)

    def broken(*arguments):
        raise KeyError("verdict")

    with CodeSandbox() as sandbox:
        monkeypatch.setattr("gdpo_tune.sandbox.local_sandbox.conclude", broken)
        with pytest.raises(SandboxInfraError, match="KeyError"):
            sandbox.run_batch([GOOD] * 3)
        monkeypatch.undo()
        results = sandbox.run_batch([wrong, GOOD])
        assert [result.status for result in results] == ["failed", "passed"]


def test_close_ends_every_process():
    before = descendants(os.getpid())
    with CodeSandbox(workers=2) as sandbox:
        sandbox.run_batch([GOOD] * 4)
        assert len(descendants(os.getpid()) - before) >= 2
    sandbox.close()
    assert descendants(os.getpid()) <= before


def test_close_does_not_wait_for_jobs_under_way():
    sleep = Job("import time\ndef f(): time.sleep(1000)", (Call("f", (), 1),), limits=PATIENT)
    check = Job(sleep.code, asserts=("assert f() is 1",), limits=PATIENT)
    before = descendants(os.getpid())
    errors = []

    def run(sandbox):
        try:
            sandbox.run_batch([sleep, check] * 2)
        except SandboxInfraError as error:
            errors.append(str(error))

    with CodeSandbox(workers=2) as sandbox:
        caller = threading.Thread(target=run, args=(sandbox,))
        caller.start()
        assert wait_until(lambda: len(locked_pids()) >= 2)
    caller.join()
    assert errors == ["the sandbox was closed before a job had its verdict"]
    assert descendants(os.getpid()) <= before


def test_a_fork_of_the_trainer_does_not_keep_the_processes_of_a_closed_sandbox():
    before = descendants(os.getpid())
    with CodeSandbox() as sandbox:
        assert sandbox.run_batch([GOOD])[0].passed
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        zygotes = zygote_pids()
    try:
        assert not any(map(is_alive, zygotes))
        assert descendants(os.getpid()) - before == {child}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_verdicts_do_not_depend_on_forks_that_hold_the_connections(monkeypatch):
    open_pair, held = local_sandbox._open_pair, []

    def open_and_hold(*arguments):
        pair = open_pair(*arguments)
        held.extend(end.dup() for end in pair)  # as a fork at this instant would
        return pair

    monkeypatch.setattr(local_sandbox, "_open_pair", open_and_hold)
    ending = Job("import os\ndef f(x): os._exit(0)", GOOD.calls)
    checked = [Job(job.code, asserts=("assert f(1) > 1",)) for job in (GOOD, ending)]
    with CodeSandbox() as sandbox:
        results = sandbox.run_batch([GOOD, ending, *checked])
    for end in held:
        end.close()
    assert [result.status for result in results] == ["passed", "crash"] * 2


FORGED_VERDICTS = [
    b"7", b'["test","perfect","",""]', b'["test","passed",1,""]', b'["test","passed"]', b"\xff",
    b"[" * 5000, b'["stop","ended",null,""]',
]  # fmt: skip


@pytest.mark.parametrize("frame", [*map(pack_frame, FORGED_VERDICTS), HEADER.pack(1 << 30)])
def test_a_checker_that_forges_its_verdicts_gives_none(frame):
    ours, theirs = socket.socketpair()
    job = local_sandbox.encode_job(0, Job("", asserts=("assert f(1) > 1",)))
    report = CandidateReport()
    with ours, theirs:
        theirs.sendall(READY + frame)
        local_sandbox._collect_verdicts(ours, job, report)
    assert (report.verdicts, report.stop) == ([], "malformed")


def test_clocks_that_end_before_a_candidate_starts_are_a_timeout():
    limits = Limits(cpu_seconds=0.01, wall_seconds=0.01)
    checked = Job(GOOD.code, asserts=("assert f(1) > 1",), limits=limits)
    with CodeSandbox() as sandbox:
        results = sandbox.run_batch([Job(GOOD.code, GOOD.calls, limits=limits), checked] * 10)
    assert {result.status for result in results} <= {"passed", "timeout"}


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


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_the_death_of_the_trainer_leaves_no_process(state):
    trainer = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAINER, state],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with trainer:
        assert trainer.stdout.readline() == "ready\n"
        least = 2 if state == "idle" else 5
        assert wait_until(lambda: len(descendants(trainer.pid)) >= least)
        children = descendants(trainer.pid)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        assert wait_until(lambda: not any(map(is_alive, children)))


def test_many_jobs_leave_no_descriptor_and_no_process():
    def state():
        files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in sorted(descendants(os.getpid()))]
        return files, len(os.listdir("/proc/self/fd"))

    ending = Job("import os\ndef f(x): os._exit(0)", (Call("f", (1,), 2),))
    checked = Job("def f(x): return x + 1", asserts=("assert f(1) > 1",))
    spin = Job("while True: pass", GOOD.calls, limits=Limits(cpu_seconds=0.01))
    with CodeSandbox() as sandbox:
        sandbox.run_batch([GOOD, ending, checked, spin])
        before = state()
        sandbox.run_batch([GOOD, ending, checked, spin] * 50)
        assert state() == before


def test_a_sandbox_works_from_any_thread_and_outlives_the_one_that_made_it():
    made = []
    maker = threading.Thread(target=lambda: made.append(CodeSandbox()))
    maker.start()
    maker.join()
    with made[0] as sandbox:
        results = []
        threads = [
            threading.Thread(target=lambda: results.extend(sandbox.run_batch([GOOD] * 5)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        zygotes = zygote_pids()
    assert [result.status for result in results] == ["passed"] * 15
    assert zygotes
