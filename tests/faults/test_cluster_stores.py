"""Clusters whose stores fail: the shared directory, the disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gdpo_tune.ledger import Ledger
from tests.support.cluster_sweeps import (
    FIFO,
    MARKS,
    MINUTE,
    UndisturbedSweeps,
    add_row,
    build_slow_sweep,
    check_recovery,
    list_incidents,
    run_until_under_way,
    time_fault,
    wait_during_fault,
)
from tests.support.killed_sweeps import KilledSweep
from tests.support.ray_nodes import RayCluster

pytestmark = MARKS
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")


def run_mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def run_umount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def mount_directory(directory: Path, *words: str | Path) -> Iterator[None]:
    directory.mkdir(parents=True)
    run_mount(*words, directory)
    try:
        yield
    finally:
        run_umount(directory)


@needs_root
@pytest.mark.parametrize("mountpoint", ["read-only", "writable"])
def test_the_shared_directory(
    tmp_path: Path, cluster: RayCluster, whole: UndisturbedSweeps, mountpoint: str
):
    """The directory is unmounted for a minute during the sweep; the mountpoint stays."""
    (tmp_path / "kept" / "runs").mkdir(parents=True)
    with mount_directory(tmp_path / "mounted", "-t", "tmpfs", "none"):
        mounted = tmp_path / "mounted" / "runs"
        with mount_directory(mounted, "--bind", tmp_path / "kept" / "runs"):
            if mountpoint == "read-only":
                run_mount("-o", "remount,ro", tmp_path / "mounted")
            overrides = (f"storage={mounted}", *FIFO)
            sweep = build_slow_sweep(tmp_path, overrides, cluster)
            with run_until_under_way(sweep) as process:
                with time_fault() as fault:
                    run_umount(mounted)
                    wait_during_fault(MINUTE, process)
                    run_mount("--bind", tmp_path / "kept" / "runs", mounted)
                assert process.wait(600) == 0, sweep.read_errors()
            check_recovery(cluster, sweep, whole["fifo"])
            assert add_row(f"shared directory gone, its mountpoint {mountpoint}", sweep, fault)


@needs_root
def test_the_disk(tmp_path: Path, cluster: RayCluster, whole: UndisturbedSweeps):
    """It is full until somebody makes room; then the command is repeated."""
    with mount_directory(tmp_path / "runs", "-t", "tmpfs", "-o", "size=32m", "none"):
        sweep = build_slow_sweep(tmp_path, FIFO, cluster)
        with run_until_under_way(sweep) as process, time_fault() as fault:
            fill_disk(tmp_path / "runs" / "others")
            assert process.wait(300) == 1
            (tmp_path / "runs" / "others").unlink()
        assert "no space left for" in sweep.read_errors()
        sweep.finish()
        check_recovery(cluster, sweep, whole["fifo"])
        assert add_row("disk full, room made, command repeated", sweep, fault)


def fill_disk(file: Path) -> None:
    with file.open("wb", buffering=0) as full:
        try:
            while True:
                full.write(bytes(4096))
        except OSError:
            return


def test_failures_of_a_trial_are_retried_only_a_few_times(
    tmp_path: Path, cluster: RayCluster, whole: UndisturbedSweeps
):
    """NaN, a GPU that is too small, and a process that the kernel kills for its memory."""
    sweep = KilledSweep(tmp_path, FIFO, fake=True, address=cluster.address)
    sweep.set_faults({"all": "slow", "3": "nonfinite", "4": "memory", "5": "die"})
    sweep.finish()
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        failed = {r.number: r.reason for r in ledger.get_records() if r.state == "failed"}
        assert {r.state for r in ledger.get_records()} == {"complete", "failed"}
    assert "loss is nan" in failed.pop(3)
    assert "out of memory" in failed.pop(4).lower()
    assert "process died" in failed.pop(5)
    assert failed == {}
    starts = [entry["trial"] for entry in sweep.list_starts()]
    assert [starts.count(trial) for trial in ("3", "4", "5")] == [1, 1, 3]
    assert sum("is tried again" in incident for incident in list_incidents(sweep)) == 2
