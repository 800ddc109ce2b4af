"""A sweep from start to end: its ledger, Ray, the search, and the checkpoints that are kept."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdpo_tune.core import registry
from gdpo_tune.core.content import measure_content
from gdpo_tune.core.errors import ClusterLostError, StoreError, StoreUnreachableError
from gdpo_tune.core.events import (
    Event,
    Listener,
    SearchStarted,
    SweepFinished,
    SweepStarted,
    SweepSteered,
)
from gdpo_tune.core.files import explain_full_disk
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.system import INTERRUPTED, stop_on_signals
from gdpo_tune.core.text import format_list
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger, silence_optuna
from gdpo_tune.ledger.sweep_store import SweepStore, check_writable
from gdpo_tune.spec import SweepSpec, check_resources, choose_sampler, collect_variables
from gdpo_tune.tuning.kept_checkpoints import delete_unkept_checkpoints
from gdpo_tune.tuning.provenance import describe_machine
from gdpo_tune.tuning.ray import cluster
from gdpo_tune.tuning.ray.joining import LOST
from gdpo_tune.tuning.ray.nodes import count_slots
from gdpo_tune.tuning.ray.preflight import check_nodes
from gdpo_tune.tuning.search.applied_requests import RequestInbox
from gdpo_tune.tuning.search.candidate_plan import count_candidates
from gdpo_tune.tuning.search.earlier_sweeps import refuse_other_content
from gdpo_tune.tuning.search.plan import count_planned, explain_end, is_finished

if TYPE_CHECKING:
    from ray.tune import Callback, Stopper, Tuner

    from gdpo_tune.tuning.schedulers.base import Scheduler
    from gdpo_tune.tuning.search.searcher import LedgerSearcher

TRAIN = "gdpo_tune.training:train"
PACK = "gdpo_tune.training.packs:Pack"
RAY = "ray"
"""In the sweep's directory: working directory of Ray; deleted at the end."""


@dataclass(frozen=True)
class SweepResult:
    """Trials of a sweep that was interrupted or has finished."""

    records: tuple[TrialRecord, ...]
    interrupted: int
    """Exit status if it was stopped before its end; the same call resumes it. Otherwise 0."""
    spec: SweepSpec
    """With the settings that requests have changed, and the values of measured baselines."""
    reason: str = ""
    """Why nothing is left to run, for a person; empty if interrupted."""
    sessions: tuple[Mapping[str, Any], ...] = ()
    """Processes that have worked on the sweep, see `Ledger.sessions`."""


def run_sweep(
    spec: SweepSpec,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    one_front: bool = False,
    continue_from: str = "",
    listeners: Sequence[Listener] = (),
    train: str = "",
) -> SweepResult:
    """Run, resume or extend a sweep until nothing is left to do.

    A finished sweep starts nothing, not even Ray.

    Args:
        spec: what to search, and where it is kept.
        fresh: move an earlier sweep of this name aside and begin anew.
        accept_changes: go on although files or versions that decide results have changed.
        one_front: keep the trials before an accepted change on one front with later ones.
        continue_from: directory or address of the sweep, if it is to go on in this one.
        listeners: called with every event, in the thread of this call; they must return quickly.
        train: `module:function` that trains one trial; `module:class`, as `training.packs.Pack`, if
            trials share a process. Default: those of `training`.

    Raises:
        ResourcesError: a trial does not fit on this machine or cluster.
        LedgerHeldError: another process runs this sweep.
        IdentityError: another sweep has this name, another directory has this sweep, or content
            that decides its results changed.
        PolicyError, SandboxUnavailable: the policy or the sandbox of every trial is not available.
        DiskFullError: there is no room for checkpoints or the ledger; the same call resumes.
        ClusterError: the cluster cannot be joined, or its nodes do not share the directory.
        ClusterLostError: Ray's servers did not start, or died; the same call resumes.
        StoreError: the object store of `storage` refuses access.
        StoreUnreachableError: it does not answer any more; the same call resumes.
    """
    check_resources(spec)
    if spec.address:
        check_writable(spec.storage)
    with Ledger.open(spec, fresh=fresh, continue_from=continue_from) as ledger:
        content = measure_content(spec.task, spec.policy, spec.model, spec.data, spec.rollout)
        ledger.compare_content(content, accept=accept_changes, one_front=one_front)

        def emit(event: Event) -> None:
            for listener in listeners:
                listener(event)

        if spec.address:
            SweepStore(spec).write_spec()
            fetch_files(ledger)
        steered = list(RequestInbox(ledger).take())  # they may extend a sweep that has finished
        records, spec, steering = tuple(ledger.get_records()), ledger.spec, ledger.steering
        added = steering.list_waiting(records)
        planned, candidates = count_planned(spec, records, added), count_candidates(spec)
        emit(
            SweepStarted(
                records, planned, ledger.moved_aside, candidates, steering.pause, ledger.sweep_id
            )
        )
        for request in steered:
            emit(SweepSteered(request, planned, candidates, steering.pause))
        interrupted = 0
        if not is_finished(spec, records, ledger.compute_hours(), added):
            refuse_other_content(spec, content)
            print_deleted_policies(ledger)
            interrupted = _with_ray(ledger, train, emit)
        spec = ledger.spec
        if spec.address:
            fetch_files(ledger)
        # Only now, because before the end a dominated trial may still join the front. Always,
        # because the last session may have been killed before this, or `keep:` may have changed.
        if not interrupted:
            delete_unkept_checkpoints(ledger)
        records = tuple(ledger.get_records())
        hours = ledger.compute_hours()
        reason = "" if interrupted else explain_end(spec, records, hours)
        emit(SweepFinished(records, bool(interrupted), reason))
        return SweepResult(records, interrupted, spec, reason, tuple(ledger.get_sessions()))


def _with_ray(ledger: Ledger, train: str, emit: Listener) -> int:
    """Start or join Ray and run trials on it; return the exit status if that was interrupted."""
    started, spec = time.time(), ledger.spec
    session: int | None = None
    try:
        variables = collect_variables(spec.resources.env, os.environ)
        processes = ledger.directory / "ray.processes"
        with cluster.open_cluster(processes, variables) as ray_cluster:
            slots = count_slots(spec, ray_cluster.nodes.list_alive())
            if ray_cluster.joined:
                check_nodes(spec, ledger.directory, ray_cluster.nodes)
            sampler = str(choose_sampler(spec, slots))
            session = ledger.begin_session(started, slots, describe_machine(), sampler)
            emit(SearchStarted(slots, sampler))
            return _run_tuner(ledger, train, slots, emit, ray_cluster)
    except KeyboardInterrupt:  # while Ray started or ended: there was nothing to stop
        return INTERRUPTED
    finally:
        if session is not None:
            ledger.end_session(session, find_ending(ledger))


def _run_tuner(
    ledger: Ledger, train: str, slots: int, emit: Listener, ray_cluster: cluster.Cluster
) -> int:
    """Run Ray Tune until the searcher has nothing left; see `_with_ray`."""
    from gdpo_tune.tuning.ray.failures import Attempts
    from gdpo_tune.tuning.ray.messages import Setup
    from gdpo_tune.tuning.ray.places import PackHosts
    from gdpo_tune.tuning.ray.reporter import choose_interval
    from gdpo_tune.tuning.ray.stopping import ClusterLostInterrupt, Interruption
    from gdpo_tune.tuning.search.searcher import LedgerSearcher

    spec_file, address = ledger.directory / SPEC, ledger.spec.address
    worker, together = ledger.spec.resources, ledger.spec.resources.trials_per_process
    setup = Setup(
        train or (PACK if together > 1 else TRAIN),
        spec_file,
        address,
        worker.workers,
        worker.cpus,
        worker.gpus,
        together,
        choose_interval(slots),
    )
    hosts = PackHosts(setup)
    info = registry.SCHEDULERS[ledger.spec.search.scheduler.type]
    scheduler = registry.load(info.target)(ledger)
    searcher = LedgerSearcher(ledger, setup, slots, emit, scheduler, hosts.grow)
    interruption = Interruption(
        searcher.stop_flag, ray_cluster.is_alive, searcher.apply_requests, together
    )
    attempts = Attempts(searcher, ray_cluster.nodes, ray_cluster.remember)
    status = INTERRUPTED

    def stop(exit_status: int) -> None:
        nonlocal status
        status = exit_status
        searcher.stop()
        interruption.request()

    try:
        with (
            stop_on_signals(stop),
            silence_optuna(),
            explain_full_disk(ledger.directory, "the sweep"),
        ):
            hosts.grow(slots)
            build_tuner(ledger, slots, searcher, scheduler, interruption, attempts).fit()
    except KeyboardInterrupt:
        interruption.request()
    except ClusterLostInterrupt:
        raise ClusterLostError(LOST) from None
    else:
        hosts.close()
    finally:
        searcher.close()
        # the next start clears it too
        with suppress(StoreError, StoreUnreachableError, OSError):
            searcher.stop_flag.clear()
        shutil.rmtree(ledger.directory / RAY, ignore_errors=True)
    if searcher.fatal is not None:
        raise searcher.fatal
    return status if interruption.requested else 0


def build_tuner(
    ledger: Ledger,
    slots: int,
    searcher: LedgerSearcher,
    scheduler: Scheduler,
    stopper: Stopper,
    callback: Callback,
) -> Tuner:
    """Return Ray's Tuner for one run."""
    from ray.tune import FailureConfig, RunConfig, TuneConfig, Tuner, with_resources

    from gdpo_tune.tuning.ray.failures import FOR_EVER
    from gdpo_tune.tuning.ray.messages import unpack_attempt
    from gdpo_tune.tuning.ray.pack_proxy import run_packed_trial
    from gdpo_tune.tuning.ray.trainable import run_trial

    def name_trial(trial: Any) -> str:
        return f"{unpack_attempt(trial.config).trial}-{trial.trial_id}"

    # By default Ray starts one process after the other, which takes seconds for each slot.
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(slots)
    resources, rollout = ledger.spec.resources, ledger.spec.rollout
    may_have_engine = resources.gpus > 0 or rollout.engine == "vllm"
    shares = resources.trials_per_process > 1
    return Tuner(
        with_resources(run_packed_trial if shares else run_trial, build_resources(ledger.spec)),
        tune_config=TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=-1,
            reuse_actors=shares or rollout.reuse_engine or not may_have_engine,
            trial_name_creator=name_trial,
            trial_dirname_creator=name_trial,
        ),
        run_config=RunConfig(
            name=RAY,
            storage_path=str(ledger.directory),
            verbose=0,
            stop=stopper,
            failure_config=FailureConfig(max_failures=FOR_EVER),
            callbacks=[callback],
        ),
    )


def print_deleted_policies(ledger: Ledger) -> None:
    """Print which policies a sweep that is extended lost when it ended: merges need them."""
    ended = [r for r in ledger.get_records() if r.is_training and r.state == "complete"]
    lost = [record.name for record in ended if record.checkpoint is None]
    was_finished = any(session.get("ending") for session in ledger.get_sessions()[-1:])
    if lost and was_finished and ledger.spec.has_candidates and ledger.spec.search.most_merges:
        kept, names = len(ended) - len(lost), format_list(lost)
        print(
            f"note: merges choose among the {kept} policies that keep: {ledger.spec.keep} left at "
            f"the end of this sweep; those of {names} were deleted. keep: all keeps every one.",
            file=sys.stderr,
        )


def build_resources(spec: SweepSpec) -> Any:
    """Return what Ray sets aside for the process that it starts for a trial."""
    from ray.tune import PlacementGroupFactory

    resources = spec.resources
    if resources.workers == resources.trials_per_process == 1:
        return {"cpu": spec.resources.cpus, "gpu": spec.resources.gpus}
    # This process only waits for others, and must not hold a CPU that they need. So it takes a tiny
    # share of a resource that every cluster has and nothing else uses.
    return PlacementGroupFactory([{"node:__internal_head__": 0.0001}])


def fetch_files(ledger: Ledger) -> None:
    """Copy the small files of trials from the store to this machine."""
    SweepStore(ledger.spec).fetch()
    ledger.refresh_checkpoints([record.number for record in ledger.get_records()])


def find_ending(ledger: Ledger) -> str:
    """Return why nothing is left to run; empty if something is."""
    spec, records = ledger.spec, ledger.get_records()
    hours = ledger.compute_hours(time.time())
    added = ledger.steering.list_waiting(records)
    return explain_end(spec, records, hours) if is_finished(spec, records, hours, added) else ""
