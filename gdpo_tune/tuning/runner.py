"""A sweep from start to end: ledger, Ray, searcher, and what is left afterwards."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.core import registry
from gdpo_tune.core.errors import ClusterLostError
from gdpo_tune.core.events import Event, Listener, SearchStarted, SweepFinished, SweepStarted
from gdpo_tune.core.files import room_in
from gdpo_tune.core.signals import on_signals
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger, quiet_optuna
from gdpo_tune.ledger.sweep_store import SweepStore, check_writable
from gdpo_tune.spec import SweepSpec, check_resources, choose_sampler
from gdpo_tune.spec.model import SPEC
from gdpo_tune.tuning.kept_checkpoints import tidy
from gdpo_tune.tuning.provenance import provenance
from gdpo_tune.tuning.ray import cluster
from gdpo_tune.tuning.ray.head import LOST
from gdpo_tune.tuning.ray.resources import slots_of, with_room
from gdpo_tune.tuning.ray.survey import survey
from gdpo_tune.tuning.search.budget import hours_of
from gdpo_tune.tuning.search.plan import ending, is_finished, planned

if TYPE_CHECKING:
    from gdpo_tune.tuning.ray.interruption import Interruption
    from gdpo_tune.tuning.schedulers.base import Scheduler
    from gdpo_tune.tuning.search.searcher import LedgerSearcher

TRAIN = "gdpo_tune.training:train"


@dataclass(frozen=True)
class SweepResult:
    """What a sweep has come to."""

    records: tuple[TrialRecord, ...]
    interrupted: bool
    """Whether it was stopped before its end; the same call goes on with it."""
    reason: str = ""
    """Why nothing is left to run, for a person; empty if interrupted."""
    sessions: tuple[Mapping[str, Any], ...] = ()
    """Which processes have worked on the sweep, as `Ledger.sessions` has them."""


def run_sweep(
    spec: SweepSpec,
    *,
    fresh: bool = False,
    listeners: Sequence[Listener] = (),
    train: str = TRAIN,
) -> SweepResult:
    """Run, continue or extend a sweep until nothing is left to do.

    A finished sweep starts nothing, not even Ray.

    Args:
        spec: what to search, and where it is kept.
        fresh: move an earlier sweep of this name aside and begin anew.
        listeners: called with every event, in the thread of this call; they must return quickly.
        train: `module:function` that trains one trial.

    Raises:
        ResourcesError: a trial does not fit on this machine or cluster.
        LedgerHeldError: another process runs this sweep.
        IdentityError: another sweep lives under this name.
        PolicyError, SandboxUnavailable: what every trial needs is not there.
        DiskFullError: there is no room for checkpoints or the ledger; the same call goes on.
        ClusterError: the cluster cannot be joined, or its nodes do not share the sweep's folder.
        ClusterLostError: Ray's servers did not start, or died; the same call goes on.
        StoreError: `storage` is an object store where nothing can be kept.
        StoreUnreachableError: it does not answer any more; the same call goes on.
    """
    check_resources(spec)
    if spec.address:
        check_writable(spec.storage)
    with Ledger.open(spec, fresh=fresh) as ledger:

        def emit(event: Event) -> None:
            for listener in listeners:
                listener(event)

        if spec.address:
            SweepStore(spec).write_spec()
            fetch(ledger)
        records = tuple(ledger.records())
        emit(SweepStarted(records, planned(spec, records), ledger.moved_aside))
        interrupted = False
        if not is_finished(spec, records, hours_of(ledger.sessions(), records)):
            interrupted = run_trials(ledger, train, emit)
        # Until the end, what is dominated now may be on the front later. At the end always: the
        # last session may have been killed before this, and `keep:` may have changed since.
        if spec.address:
            fetch(ledger)
        if not interrupted:
            tidy(ledger)
        records = tuple(ledger.records())
        reason = "" if interrupted else ending(spec, records, hours_of(ledger.sessions(), records))
        emit(SweepFinished(records, interrupted, reason))
        return SweepResult(records, interrupted, reason, tuple(ledger.sessions()))


def fetch(ledger: Ledger) -> None:
    """Bring here what trials have put into the store."""
    SweepStore(ledger.spec).fetch()
    ledger.forget_checkpoints([record.number for record in ledger.records()])


def run_trials(ledger: Ledger, train: str, emit: Listener) -> bool:
    """Run what the plan asks for; return whether it was interrupted."""
    started = time.time()
    session: int | None = None
    try:
        with cluster.ray_cluster(ledger.directory / "ray.processes") as ray_up:
            nodes = ray_up.nodes.alive()
            slots = slots_of(ledger.spec, nodes)
            if cluster.connected():
                asked = with_room(ledger.spec, nodes)
                survey(ledger.spec, ledger.directory, asked, ray_up.nodes.still_has)
            sampler = str(choose_sampler(ledger.spec, slots))
            session = ledger.begin_session(started, slots, provenance(), sampler)
            emit(SearchStarted(slots, sampler))
            return search(ledger, train, slots, emit, ray_up)
    except KeyboardInterrupt:  # while Ray started or ended: there was nothing to stop
        return True
    finally:
        if session is not None:
            ledger.end_session(session, why_ended(ledger))


def why_ended(ledger: Ledger) -> str:
    """Why nothing is left to run; empty if something is."""
    records, hours = ledger.records(), hours_of(ledger.sessions(), ledger.records(), time.time())
    finished = is_finished(ledger.spec, records, hours)
    return ending(ledger.spec, records, hours) if finished else ""


def reuses_processes(spec: SweepSpec) -> bool:
    """Whether trials follow each other in warm processes.

    vLLM engines stack in one process, so a trial that may have one gets a fresh process.
    """
    return spec.resources.gpus == 0 and spec.rollout.engine != "vllm"


def search(ledger: Ledger, train: str, slots: int, emit: Listener, ray_up: cluster.Cluster) -> bool:
    """Run trials, `slots` side by side, on the Ray that is up; return whether interrupted.

    Raises:
        ClusterLostError: it is no longer up.
    """
    from gdpo_tune.tuning.ray.folder import Folder
    from gdpo_tune.tuning.ray.interruption import ClusterLost, Interruption
    from gdpo_tune.tuning.ray.reporter import pace_of
    from gdpo_tune.tuning.ray.setup import Group, Setup, Store
    from gdpo_tune.tuning.ray.window import open_window
    from gdpo_tune.tuning.search.searcher import LedgerSearcher

    stop_file = ledger.directory / "stop"
    stop_file.unlink(missing_ok=True)
    asked = ledger.spec.resources
    group = None
    if asked.workers > 1:
        group = Group(asked.workers, asked.cpus, asked.gpus, ray_folder(ledger) / "workers")
    chosen = registry.SCHEDULERS[ledger.spec.search.scheduler.type]
    scheduler = registry.load(chosen.target)(ledger)
    # The window closes once nobody holds it.
    window, _held = open_window() if ledger.spec.address else ("", None)
    store = Store(ledger.spec.address, window) if window else None
    folder = None if store else Folder(ledger.directory / SPEC)
    setup = Setup(train, stop_file, asked.cpus, group, pace_of(slots), store, folder)
    searcher = LedgerSearcher(ledger, setup, slots, emit, scheduler)
    interruption = Interruption(stop_file, ray_up.is_alive)

    def stop() -> None:
        searcher.stop()
        interruption.request()

    try:
        with on_signals(stop), quiet_optuna(), room_in(ledger.directory, "the sweep"):
            tune(ledger, searcher, scheduler, interruption, ray_up, slots)
    except KeyboardInterrupt:
        interruption.requested = True
    except ClusterLost:
        raise ClusterLostError(LOST) from None
    finally:
        searcher.close()
        stop_file.unlink(missing_ok=True)
        shutil.rmtree(ray_folder(ledger), ignore_errors=True)
    if searcher.fatal is not None:
        raise searcher.fatal
    return interruption.requested


def tune(
    ledger: Ledger,
    searcher: LedgerSearcher,
    scheduler: Scheduler,
    interruption: Interruption,
    ray_up: cluster.Cluster,
    slots: int,
) -> None:
    """One run of Ray Tune, until the searcher has nothing left or the sweep is interrupted."""
    from ray.tune import FailureConfig, RunConfig, TuneConfig, Tuner, with_resources

    from gdpo_tune.tuning.ray.failures import FOR_EVER, Attempts
    from gdpo_tune.tuning.ray.trainable import run_trial

    spec = ledger.spec
    # Ray would start one process at a time, each once the one before is up: seconds a slot.
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(slots)
    Tuner(
        with_resources(run_trial, resources_of(spec)),
        tune_config=TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=-1,
            reuse_actors=reuses_processes(spec),
            trial_name_creator=trial_name,
            trial_dirname_creator=trial_name,
        ),
        run_config=RunConfig(
            name=ray_folder(ledger).name,
            storage_path=str(ray_folder(ledger).parent),
            verbose=0,
            stop=interruption,
            failure_config=FailureConfig(max_failures=FOR_EVER),
            callbacks=[Attempts(searcher, ray_up.nodes, ray_up.remember)],
        ),
    ).fit()


def resources_of(spec: SweepSpec) -> Any:
    """What Ray sets aside for the process that it starts for a trial.

    Where that one only waits for several others, it takes a sliver of a resource that every cluster
    has and nothing else wants: a CPU would be missing to those that it waits for.
    """
    from ray.tune import PlacementGroupFactory

    asked = spec.resources
    if asked.workers > 1:
        return PlacementGroupFactory([{"node:__internal_head__": 0.001}])
    return {"cpu": asked.cpus, "gpu": asked.gpus}


def ray_folder(ledger: Ledger) -> Path:
    """Where Ray keeps what it wants to keep; deleted at the end."""
    return ledger.directory / "ray"


def trial_name(trial: Any) -> str:
    """A Ray trial's name and folder."""
    return f"{trial.config['trial'].directory.name}-{trial.trial_id}"
