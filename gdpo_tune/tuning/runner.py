"""A sweep from start to end: its ledger, Ray, the search, and the checkpoints that are kept."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gdpo_tune.core import events, registry
from gdpo_tune.core.content import RECORDED, measure_content
from gdpo_tune.core.errors import (
    ClusterLostError,
    ExitCode,
    GdpoTuneError,
    StoreError,
    StoreUnreachableError,
)
from gdpo_tune.core.files import explain_full_disk
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.system import count_local_cpus, read_machine_memory, stop_on_signals
from gdpo_tune.core.text import format_list
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.opening import silence_optuna
from gdpo_tune.ledger.sweep_store import SweepStore, check_store_writable
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.gpu import choose_sampler
from gdpo_tune.spec.machine import check_resources
from gdpo_tune.tuning.attempts import RunSettings, choose_interval
from gdpo_tune.tuning.lifecycle import Lifecycle, RequestInbox, explain_failed_write
from gdpo_tune.tuning.nodes import count_slots
from gdpo_tune.tuning.plan import estimate_outlook, explain_end, is_finished
from gdpo_tune.tuning.proposals import refuse_other_content
from gdpo_tune.tuning.ray import cluster
from gdpo_tune.tuning.ray.cluster import LOST
from gdpo_tune.tuning.ray.preflight import check_nodes, find_mixture
from gdpo_tune.tuning.retention import delete_unkept_checkpoints

TRAIN = "gdpo_tune.training:train"


@dataclass(frozen=True)
class SweepResult:
    """Trials of a sweep that was interrupted or has finished."""

    records: tuple[TrialRecord, ...]
    exit_status: int
    """Exit status if it was stopped before its end; the same call resumes it. Otherwise 0."""
    spec: SweepSpec
    """With the settings that requests have changed, and the values of measured baselines."""
    reason: str = ""
    """Why nothing is left to run, for a person; empty if interrupted."""
    sessions: tuple[Mapping[str, Any], ...] = ()
    """Processes that have worked on the sweep, see `Ledger.get_sessions`."""


def run_sweep(
    spec: SweepSpec,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    listeners: Sequence[events.Listener] = (),
    train: str = TRAIN,
) -> SweepResult:
    """Run, resume or extend a sweep until nothing is left to do.

    A finished sweep starts nothing, not even Ray.

    Args:
        spec: what to search, and where it is kept.
        fresh: move an earlier sweep of this name aside and begin anew.
        accept_changes: go on although files or versions that decide results have changed.
        listeners: called with every event, in the thread of this call; they must return quickly.
        train: `module:function` that trains one trial.

    Raises:
        ResourcesError: a trial does not fit on this machine or cluster.
        LedgerHeldError: another process runs this sweep.
        IdentityError: another sweep has this name, another machine has continued it apart, or
            content that decides its results changed.
        PolicyError, SandboxUnavailable: the policy or the sandbox of every trial is not available.
        DiskFullError: there is no room for checkpoints or the ledger; the same call resumes.
        ClusterError: the cluster cannot be joined, or its nodes do not share the directory.
        ClusterLostError: Ray's servers did not start, or died; the same call resumes.
        StoreError: the object store of `storage` refuses access.
        StoreUnreachableError: it does not answer any more; the same call resumes.
    """
    check_resources(spec)
    if spec.address:
        check_store_writable(spec.storage)

    def emit(event: events.Event) -> None:
        for listener in listeners:
            listener(event)

    with Ledger.open(spec, fresh=fresh) as ledger:
        is_left = _begin_sweep(ledger, emit, accept=accept_changes)
        exit_status = _with_ray(ledger, train, emit) if is_left else 0
        return _end_sweep(ledger, emit, exit_status)


def _begin_sweep(ledger: Ledger, emit: events.Listener, *, accept: bool) -> bool:
    """Check and announce an open sweep; return whether anything is left to run."""
    spec = ledger.spec
    content = measure_content(spec, spec.start.file if spec.start else "")
    ledger.compare_content(content, accept=accept)
    if spec.address:
        SweepStore(spec).write_spec()
        fetch_files(ledger)
    steered = list(RequestInbox(ledger).take())  # they may extend a sweep that has finished
    records, spec, pause = tuple(ledger.get_records()), ledger.spec, ledger.steering.pause
    added = ledger.steering.list_waiting(records)
    emit(estimate_outlook(spec, records, ledger.compute_hours(), added))
    emit(events.SweepStarted(records, ledger.moved_aside, pause, ledger.sweep_id))
    for request in steered:
        emit(events.SweepSteered(request, pause))
    if is_finished(spec, records, ledger.compute_hours(), added):
        return False
    refuse_other_content(spec, content)
    print_deleted_policies(ledger)
    return True


def _end_sweep(ledger: Ledger, emit: events.Listener, exit_status: int) -> SweepResult:
    spec, reason = ledger.spec, ""
    if spec.address:
        fetch_files(ledger)
    # Before the end a dominated trial may still join the front. A session that was killed may
    # have left some, and `keep:` may have changed.
    if not exit_status:
        delete_unkept_checkpoints(ledger)
    records = tuple(ledger.get_records())
    if not exit_status and (reason := explain_end(spec, records, ledger.compute_hours())):
        ledger.record_ending(reason)
    emit(events.SweepFinished(records, bool(exit_status), reason))
    return SweepResult(records, exit_status, spec, reason, tuple(ledger.get_sessions()))


def _with_ray(ledger: Ledger, train: str, emit: events.Listener) -> int:
    """Start or join Ray and run trials on it; return the exit status if that was interrupted."""
    started, spec = time.time(), ledger.spec
    variables = spec.resources.collect_variables(os.environ)
    try:
        with (
            ExitStack() as stack,
            cluster.open_cluster(ledger.directory / "ray.processes", variables) as ray_cluster,
        ):
            slots = count_slots(spec, ray_cluster.nodes.list_alive())
            if ray_cluster.joined:
                check_nodes(spec, ledger.directory, ray_cluster.nodes)
                if mixture := find_mixture(spec, ray_cluster.nodes):
                    print(f"note: nodes differ: {mixture}", file=sys.stderr)
            sampler = str(choose_sampler(spec, slots))
            session = ledger.begin_session(started, slots, _describe_machine(), sampler)
            stack.enter_context(_end_session(ledger, session))  # after Ray's servers have ended
            emit(events.SearchStarted(slots, sampler))
            return _run_tuner(ledger, train, slots, emit, ray_cluster)
    except KeyboardInterrupt:  # while Ray started or ended: there was nothing to stop
        return ExitCode.INTERRUPTED


@contextmanager
def _end_session(ledger: Ledger, session: int) -> Generator[None]:
    """Record the end of a session after the block, whose error is raised before any other."""

    def end() -> None:
        spec, records = ledger.spec, ledger.get_records()
        hours, added = ledger.compute_hours(time.time()), ledger.steering.list_waiting(records)
        has_ended = is_finished(spec, records, hours, added)
        with explain_failed_write(ledger.directory):
            ledger.end_session(session, explain_end(spec, records, hours) if has_ended else "")

    try:
        yield
    except BaseException:
        with suppress(OSError, GdpoTuneError):  # what broke the sweep may break this write, too
            end()
        raise
    end()


def _run_tuner(
    ledger: Ledger, train: str, slots: int, emit: events.Listener, ray_cluster: cluster.Cluster
) -> int:
    """Run Ray Tune until nothing is left to start; see `_with_ray`."""
    from gdpo_tune.tuning.ray import tune

    spec, worker = ledger.spec, ledger.spec.resources
    setup = RunSettings(
        train,
        ledger.directory / SPEC,
        spec.address,
        worker.workers,
        worker.cpus,
        worker.gpus,
        choose_interval(slots),
    )
    scheduler = registry.load(registry.SCHEDULERS[spec.search.scheduler.type].target)(ledger)
    lifecycle = Lifecycle(ledger, scheduler, setup, slots, emit, ray_cluster.nodes)
    stopper = tune.TuneStopper(lifecycle, ray_cluster.is_alive)
    status: int = ExitCode.INTERRUPTED

    def stop(exit_status: int) -> None:
        nonlocal status
        status = exit_status
        stopper.request()

    try:
        with (
            stop_on_signals(stop),
            silence_optuna(),
            explain_full_disk(ledger.directory, "the sweep"),
        ):
            tune.build_tuner(
                spec, ledger.directory, slots, setup, lifecycle, stopper, ray_cluster.remember
            ).fit()
    except KeyboardInterrupt:
        stopper.request()
    except tune.ClusterLostInterrupt:
        raise ClusterLostError(LOST) from None
    finally:
        lifecycle.close()
        # the next start clears it too
        with suppress(StoreError, StoreUnreachableError, OSError):
            lifecycle.stop_flag.clear()
        shutil.rmtree(ledger.directory / tune.RAY_DIRECTORY, ignore_errors=True)
    if lifecycle.fatal is not None:
        raise lifecycle.fatal
    return status if stopper.requested else 0


def print_deleted_policies(ledger: Ledger) -> None:
    """Print which policies a sweep that is extended lost when it ended: merges need them."""
    ended = [r for r in ledger.get_records() if r.is_training and r.state == "complete"]
    lost = [record.name for record in ended if record.checkpoint is None]
    was_finished = any(session.get("ending") for session in ledger.get_sessions()[-1:])
    if lost and was_finished and ledger.spec.has_candidates and ledger.spec.most_merges:
        kept, names = len(ended) - len(lost), format_list(lost)
        print(
            f"note: merges choose among the {kept} policies that keep: {ledger.spec.keep} left at "
            f"the end of this sweep; those of {names} were deleted. keep: all keeps every one.",
            file=sys.stderr,
        )


def fetch_files(ledger: Ledger) -> None:
    """Copy the small files of trials from the store to this machine."""
    SweepStore(ledger.spec).fetch()
    ledger.refresh_checkpoints([record.number for record in ledger.get_records()])


def _describe_machine() -> dict[str, Any]:
    packages: dict[str, str] = {}
    for name in RECORDED:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "git": _read_git_revision(),
        "packages": packages,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpus": count_local_cpus(),
        "memory_bytes": read_machine_memory(),
    }


def _read_git_revision() -> str:
    """Return the commit of this package's source, `+` if changed; empty outside of a checkout."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return ""
    command = ["git", "-C", str(source), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=5
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
