"""Identity of processes while the clock is set: proc_pid_stat(5), field 22, in ticks since boot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gdpo_tune.core import system
from gdpo_tune.core.system import find_process, identify_start

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
