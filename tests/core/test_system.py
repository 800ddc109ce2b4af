"""Limits of this machine, processes by pid and start, and signals that stop a command."""

import os
import pty
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from gdpo_tune import cli
from gdpo_tune.core import system
from gdpo_tune.core.system import (
    block_hangups,
    count_free_threads,
    count_local_cpus,
    count_parallel_candidates,
    find_process,
    identify_start,
    read_machine_memory,
    stop_on_signals,
)
from tests.support.tables import cases

GIB = 1 << 30
MEMORY = "MemTotal:        8388608 kB\nMemFree:          1024 kB"
HERE = os.getpid()


def write_machine(root, files):
    for name, text in {"proc/meminfo": MEMORY, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@cases("core", "memory limits")
def test_the_smallest_of_machine_and_control_groups(files, expected, tmp_path):
    assert read_machine_memory(write_machine(tmp_path, files)) == expected


@cases("core", "cpu quotas")
def test_cpus_are_the_fewest_of_affinity_and_quotas(files, expected, tmp_path, monkeypatch):
    """Quotas are those of the kernel's cgroup-v2.rst and sched-bwc.rst, counted as Ray counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert count_local_cpus(write_machine(tmp_path, files)) == expected


@cases("core", "free threads")
def test_free_threads_are_the_fewest_of_user_and_control_groups(
    user, limit, files, expected, tmp_path, monkeypatch
):
    """Files are those of the kernel's cgroup-v2.rst and, in version 1, pids.rst."""
    table = [
        SimpleNamespace(info={"uids": SimpleNamespace(real=owner), "num_threads": threads})
        for owner, threads in [(1000, 3), (1000, 20), (0, 70)]
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda names: table)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert count_free_threads(write_machine(tmp_path, files)) == expected


@pytest.mark.parametrize(("room", "each", "count"), [(8, 1, 4), (8, 3, 1), (1, 2, 1)])
def test_candidates_share_half_of_the_memory_and_one_always_runs(room, each, count):
    assert count_parallel_candidates(room * GIB, each * GIB) == count


def test_the_memory_of_this_machine_and_of_a_kernel_that_says_nothing(tmp_path):
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = read_machine_memory()
    assert memory is not None
    assert 64 << 20 < memory <= pages
    assert read_machine_memory(tmp_path) is None


needs_proc = pytest.mark.skipif(
    not system.BOOT_ID.exists(), reason="this system has no /proc, so no boot id"
)


@needs_proc
@pytest.mark.parametrize("seconds", [-3600, 60])
def test_a_process_is_the_same_after_the_clock_was_set(monkeypatch, seconds):
    """The kernel derives btime from the clock, and psutil creation times from btime."""
    start, real = identify_start(HERE), psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + seconds)
    assert identify_start(HERE) == start
    assert find_process(HERE, start) == psutil.Process()


@needs_proc
def test_the_start_is_the_22nd_field_of_the_kernel_and_the_boot(tmp_path, monkeypatch):
    boot, _, ticks = identify_start(HERE).partition(".")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # the second field, the program's name, has no blank here
    assert ticks == Path("/proc/self/stat").read_text().split()[21]
    assert find_process(HERE, f"{boot}.{int(ticks) + 1}") is None
    monkeypatch.setattr(system, "BOOT_ID", tmp_path / "boot_id")
    system.BOOT_ID.write_text("a0b1-c2d3\n")
    assert identify_start(HERE) == f"a0b1-c2d3.{ticks}"
    assert find_process(HERE, f"{boot}.{ticks}") is None


@needs_proc
def test_a_name_with_blanks_and_parentheses_is_one_field(tmp_path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        assert find_process(process.pid, identify_start(process.pid)) is not None
        assert ") R 1 (" in Path(f"/proc/{process.pid}/stat").read_text()
        process.kill()


def test_a_record_of_an_earlier_version_is_a_creation_time():
    created = psutil.Process().create_time()
    for start in (created, created + 1.5, f"{created:.2f}"):
        assert find_process(HERE, start) == psutil.Process()
    assert find_process(HERE, created - 60) is None
    assert find_process(HERE, float("nan")) is None


def test_a_system_without_proc(tmp_path, monkeypatch):
    """macOS: the kernel keeps a time, which psutil returns."""
    monkeypatch.setattr(system, "BOOT_ID", tmp_path / "there is none")
    start = identify_start(HERE)
    assert start == f"{psutil.Process().create_time():.2f}"
    assert find_process(HERE, start) == psutil.Process()


def test_a_process_that_has_ended():
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    start = identify_start(process.pid)
    assert process.stdout is not None
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert find_process(process.pid, start) is None
    process.stdout.close()
    process.wait()
    assert identify_start(process.pid) == ""
    assert find_process(process.pid, start) is None
    assert find_process(HERE, "") is None


STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""POSIX, shell command language, 2.8.2: above 128; bash(1), "Exit status": 128 + n."""


@pytest.fixture(autouse=True)
def heeded_signals():
    """No signal is ignored, here and in processes that a test starts."""
    before = {each: signal.signal(each, signal.default_int_handler) for each in STATUSES}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_aborts(number):
    calls = []
    with stop_on_signals(calls.append):
        os.kill(HERE, number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(HERE, number)
    assert calls == [STATUSES[number]]
    assert signal.getsignal(number) is signal.default_int_handler


@pytest.mark.parametrize("number", STATUSES)
def test_a_command_ends_with_128_and_the_number_of_its_signal(number):
    def command(words):
        with stop_on_signals(lambda _: None):
            os.kill(HERE, number)
            os.kill(HERE, signal.SIGTERM)  # the second one aborts
        raise AssertionError

    with pytest.raises(SystemExit) as caught:
        cli.run_command(command, [])
    assert caught.value.code == STATUSES[number]


def test_a_hangup_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    calls = []
    with stop_on_signals(calls.append):
        os.kill(HERE, signal.SIGHUP)
    assert calls == []


def test_a_hangup_is_never_the_second_signal():
    calls = []
    with stop_on_signals(calls.append):
        os.kill(HERE, signal.SIGHUP)
        os.kill(HERE, signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(HERE, signal.SIGTERM)
    assert calls == [129]


UNDER_NOHUP = """
import os, signal
from gdpo_tune.core.system import stop_on_signals
calls = []
with stop_on_signals(calls.append):
    os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGHUP)
print(calls)
"""


def test_a_command_under_nohup_goes_on_ignoring_hangups():
    command = ["nohup", sys.executable, "-c", UNDER_NOHUP]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n")


ENDS_IN_ORDER = """
import fcntl, os, signal, sys, termios, time
from gdpo_tune.core.system import stop_on_signals
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
calls = []
with stop_on_signals(calls.append):
    print("ready", flush=True)
    deadline = time.monotonic() + 30
    while not calls and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)
    print("last words", flush=True)
print("to both", file=sys.stderr, flush=True)
sys.exit(calls[0] if len(calls) == 1 else 1)
"""


def test_a_terminal_that_closes_asks_once_and_aborts_nothing():
    terminal, inside = pty.openpty()
    # Its terminal is not that of this process, so the kernel alone sends the signal.
    own = {"start_new_session": True, "stdin": inside, "stdout": inside, "stderr": inside}
    with subprocess.Popen([sys.executable, "-c", ENDS_IN_ORDER], **own) as process:
        os.close(inside)
        assert b"ready" in os.read(terminal, 100)
        os.close(terminal)
        assert process.wait(30) == 129


def test_a_process_started_meanwhile_outlives_its_terminal():
    sleeps = [sys.executable, "-c", "import sys; print(flush=True); sys.exit(sys.stdin.read())"]
    calls = []
    with stop_on_signals(calls.append):
        with block_hangups():
            child = subprocess.Popen(sleeps, stdin=-1, stdout=-1, stderr=-1, text=True)
            # to this thread: another one, which an earlier test has left, does not block it
            signal.raise_signal(signal.SIGHUP)
            assert calls == []
        assert calls == [129]
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "\n"
        child.send_signal(signal.SIGHUP)
        _, message = child.communicate("still here")
    assert message == "still here\n"
