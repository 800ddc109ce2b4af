"""Limits of this machine, processes by pid and start, and signals that stop a command."""

from __future__ import annotations

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

GIB = 1 << 30
MACHINE = "MemTotal:        8388608 kB\nMemFree:          1024 kB\n"
NO_LIMIT_OF_VERSION_1 = "9223372036854771712\n"


def machine(root, files):
    for name, text in {"proc/meminfo": MACHINE, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n"}, 8 * GIB),
        # A container of version 2 sees its own group as the root.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{64 * GIB}\n"}, 8 * GIB),
        # A service inside a slice: the narrowest of all limits on the way up.
        (
            {
                "proc/self/cgroup": "0::/user.slice/job.service\n",
                "sys/fs/cgroup/user.slice/job.service/memory.max": f"{5 * GIB}\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{3 * GIB}\n",
            },
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/user.slice/job.service\n",
                "sys/fs/cgroup/user.slice/job.service/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/user.slice/memory.max": "max\n",
            },
            GIB,
        ),
        # Version 1, seen from the host.
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_OF_VERSION_1,
            },
            GIB,
        ),
        # Version 1 in a container: the path is the one outside, the file is the container's.
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/0123\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": NO_LIMIT_OF_VERSION_1,
            },
            8 * GIB,
        ),
        # Another controller's limit is none of memory.
        (
            {
                "proc/self/cgroup": "4:pids:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
            },
            8 * GIB,
        ),
    ],
)
def test_the_smallest_of_machine_and_control_groups(files, expected, tmp_path):
    assert read_machine_memory(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        # Version 2: "$MAX $PERIOD", where "max" is no limit.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),
        # Whole cores, and one at least: a trial asks for a whole one.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "375000 50000\n"}, 7),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        # The quota of a parent holds for all of its groups together.
        (
            {
                "proc/self/cgroup": "0::/user.slice/job.service\n",
                "sys/fs/cgroup/user.slice/job.service/cpu.max": "500000 100000\n",
                "sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/other.slice/cpu.max": "100000 100000\n",
            },
            3,
        ),
        # Version 1, seen from the host and in a container; -1 is no limit.
        (
            {
                "proc/self/cgroup": "4:cpuset:/\n2:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/docker/0123\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "600000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
    ],
)
def test_cpus_are_the_fewest_of_affinity_and_quotas(files, expected, tmp_path, monkeypatch):
    """Quotas are those of the kernel's cgroup-v2.rst and sched-bwc.rst, counted as Ray counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert count_local_cpus(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("user", "limit", "files", "expected"),
    [
        (0, 100, {}, None),  # getrlimit(2): not enforced for root
        (1000, resource.RLIM_INFINITY, {}, None),
        (1000, 500, {}, 500 - 3 - 20),
        (
            *(1000, 500),
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "sys/fs/cgroup/pod/job/pids.max": "max\n",
                "sys/fs/cgroup/pod/job/pids.current": "40\n",
                "sys/fs/cgroup/pod/pids.max": "110\n",
                "sys/fs/cgroup/pod/pids.current": "60\n",
            },
            50,
        ),
        (
            *(0, 500),
            {
                "proc/self/cgroup": "3:pids:/docker/0123\n",
                "sys/fs/cgroup/pids/pids.max": "150\n",
                "sys/fs/cgroup/pids/pids.current": "10\n",
            },
            140,
        ),
        (  # the root of all groups has no limit
            *(0, 500),
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/pids.current": "10\n"},
            None,
        ),
    ],
)
def test_free_threads_are_the_fewest_of_user_and_control_groups(
    user, limit, files, expected, tmp_path, monkeypatch
):
    """Files are those of the kernel's cgroup-v2.rst and, in version 1, pids.rst."""
    processes = [(1000, 3), (1000, 20), (0, 70)]
    table = [
        SimpleNamespace(info={"uids": SimpleNamespace(real=owner), "num_threads": threads})
        for owner, threads in processes
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda names: table)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert count_free_threads(machine(tmp_path, files)) == expected


def test_candidates_share_half_of_the_memory_and_one_always_runs():
    assert count_parallel_candidates(8 * GIB, GIB) == 4
    assert count_parallel_candidates(8 * GIB, 3 * GIB) == 1
    assert count_parallel_candidates(GIB, 2 * GIB) == 1


def test_nothing_is_known_where_the_kernel_says_nothing(tmp_path):
    assert read_machine_memory(tmp_path) is None


def test_this_machine():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = read_machine_memory()
    assert memory is not None
    assert 64 << 20 < memory <= pages


needs_proc = pytest.mark.skipif(
    not system.BOOT_ID.exists(), reason="this system has no /proc, so no boot id"
)


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the clock: the kernel derives btime from it, and psutil creation times from btime."""
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + seconds)


@needs_proc
@pytest.mark.parametrize("seconds", [-3600, 60])
def test_a_process_is_the_same_after_the_clock_was_set(monkeypatch, seconds):
    start = identify_start(os.getpid())
    set_clock(monkeypatch, seconds)
    assert identify_start(os.getpid()) == start
    assert find_process(os.getpid(), start) == psutil.Process()


@needs_proc
def test_the_start_is_the_22nd_field_of_the_kernel_and_the_boot():
    boot, _, ticks = identify_start(os.getpid()).partition(".")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # the second field, the program's name, has no blank here
    assert ticks == Path("/proc/self/stat").read_text().split()[21]


@needs_proc
def test_a_name_with_blanks_and_parentheses_is_one_field(tmp_path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        assert find_process(process.pid, identify_start(process.pid)) is not None
        assert ") R 1 (" in Path(f"/proc/{process.pid}/stat").read_text()
        process.kill()


@needs_proc
def test_a_process_of_another_boot_or_with_another_start_is_another_one(tmp_path, monkeypatch):
    boot, _, ticks = identify_start(os.getpid()).partition(".")
    assert find_process(os.getpid(), f"{boot}.{int(ticks) + 1}") is None
    monkeypatch.setattr(system, "BOOT_ID", tmp_path / "boot_id")
    system.BOOT_ID.write_text("a0b1-c2d3\n")
    assert identify_start(os.getpid()) == f"a0b1-c2d3.{ticks}"
    assert find_process(os.getpid(), f"{boot}.{ticks}") is None


def test_a_record_of_an_earlier_version_is_a_creation_time():
    created = psutil.Process().create_time()
    for start in (created, created + 1.5, f"{created:.2f}"):
        assert find_process(os.getpid(), start) == psutil.Process()
    assert find_process(os.getpid(), created - 60) is None
    assert find_process(os.getpid(), float("nan")) is None


def test_a_system_without_proc(tmp_path, monkeypatch):
    """macOS: the kernel keeps a time, which psutil returns."""
    monkeypatch.setattr(system, "BOOT_ID", tmp_path / "there is none")
    start = identify_start(os.getpid())
    assert start == f"{psutil.Process().create_time():.2f}"
    assert find_process(os.getpid(), start) == psutil.Process()


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
    assert find_process(os.getpid(), "") is None


@pytest.fixture
def hangups():
    """SIGHUP is not ignored, here and in processes that the test starts."""
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_aborts(number):
    calls = []
    before = signal.signal(number, signal.default_int_handler)  # it may be ignored
    try:
        with stop_on_signals(calls.append):
            os.kill(os.getpid(), number)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        assert calls == [128 + number]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.usefixtures("hangups")
def test_a_command_ends_with_128_and_the_number_of_its_signal(number, status):
    """POSIX, shell command language, 2.8.2: above 128; bash(1), "Exit status": 128 + n."""

    def command(words):
        with stop_on_signals(lambda _: None):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)  # the second one aborts
        raise AssertionError

    before = {each: signal.signal(each, signal.default_int_handler) for each in (2, 15)}
    try:
        with pytest.raises(SystemExit) as caught:
            cli.run_command(command, [])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert caught.value.code == status


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    calls = []
    with stop_on_signals(calls.append):
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert calls == []


UNDER_NOHUP = """
import os, signal
from gdpo_tune.core.system import stop_on_signals
calls = []
with stop_on_signals(calls.append):
    os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGHUP)
print(calls)
"""


@pytest.mark.usefixtures("hangups")
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


@pytest.mark.usefixtures("hangups")
def test_a_terminal_that_closes_asks_once_and_aborts_nothing():
    terminal, inside = pty.openpty()
    # Its terminal is not that of this process, so the kernel alone sends the signal.
    own = {"start_new_session": True, "stdin": inside, "stdout": inside, "stderr": inside}
    with subprocess.Popen([sys.executable, "-c", ENDS_IN_ORDER], **own) as process:
        os.close(inside)
        assert b"ready" in os.read(terminal, 100)
        os.close(terminal)
        assert process.wait(30) == 129


@pytest.mark.usefixtures("hangups")
def test_a_hangup_is_never_the_second_signal():
    calls = []
    with stop_on_signals(calls.append):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert calls == [129]


@pytest.mark.usefixtures("hangups")
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
