"""Find and open the ledger of a sweep: a file on the machine of its driver.

Of a sweep on an object store it is in the directory of this machine for that sweep, and the store
has a copy of it: another machine goes on from there.
"""

from __future__ import annotations

import socket
import sys
import time
import uuid
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage

from gdpo_tune.core.content import format_time
from gdpo_tune.core.errors import IdentityError, SpecError, UsageError
from gdpo_tune.core.files import is_file, write_atomically
from gdpo_tune.core.locks import LOCK, Lease, is_locked
from gdpo_tune.core.object_store import JOURNAL, SPEC
from gdpo_tune.core.text import join_first
from gdpo_tune.ledger.journal import Journal, archive_directory, truncate_torn_write
from gdpo_tune.ledger.requests import find_user
from gdpo_tune.ledger.sweep_store import LedgerCopy, SweepStore, download_ledger, fetch_spec
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import dump_public_yaml, list_decisive_values, list_differences

ORIGIN = "sweep_origin"
"""Attribute of the study of a sweep on an object store: `host` and `user` of the machine that runs
it, and `time`, since when, in Unix seconds."""


def open_for_reading(spec: SweepSpec) -> Journal:
    """Open the journal of a sweep to read it: of one that runs elsewhere, the copy in its store.

    Raises:
        UsageError: there is none.
        OSError: it cannot be read.
    """
    directory = spec.directory.absolute()
    path = directory / JOURNAL
    if spec.address and not is_locked(directory / LOCK):
        path = download_ledger(spec.address, directory)
    if not path.exists():
        raise UsageError(f"there is no sweep in {spec.address or directory} yet")
    return Journal(path, read_only=True)


def open_for_writing(spec: SweepSpec, *, fresh: bool) -> tuple[Journal, Lease, Path | None]:
    """Open or create the journal of a sweep, for this process alone; arguments as `Ledger.open`.

    Returns:
        The journal, the lease on the sweep's directory, and the new path of the directory of an
        earlier sweep; None if none was moved.

    Raises:
        LedgerHeldError: as `Ledger.open`.
        IdentityError: this machine and another one have continued the sweep apart.
        UsageError: the directory holds a sweep whose ledger is gone.
        OSError: the directory or the file cannot be created.
    """
    directory = spec.directory.absolute()
    path, lease, aside = directory / JOURNAL, Lease(directory / LOCK), None
    try:
        if spec.address:  # the directory on this machine may be new while the sweep is old
            fetch_spec(spec.address, directory)
        if fresh and ((directory / SPEC).exists() or path.exists()):
            lease, aside = archive_directory(lease)
            if spec.address:
                SweepStore(spec).archive(aside.name)
        if path.exists():
            truncate_torn_write(path)
        copy = LedgerCopy(spec.address, path).write if spec.address else lambda: None
        if (directory / SPEC).exists() and not path.exists():
            # an empty ledger would delete its trials
            raise UsageError(
                f"the sweep in {spec.location} has lost its ledger, {JOURNAL}\n"
                "    fix: restore that file, or --fresh to move that sweep aside"
            )
        return Journal(path, read_only=False, copy=copy), lease, aside
    except BaseException:
        lease.release()
        raise


def record_origin(study: optuna.Study, spec: SweepSpec) -> None:
    """Record the machine on which a sweep on an object store goes on, and say so if it is new."""
    known, host = study.user_attrs.get(ORIGIN), socket.gethostname()
    if not spec.address or (known and known["host"] == host):
        return
    if known:
        print(
            f"note: {spec.address} was run by {known['user']} on {known['host']} since "
            f"{format_time(known['time'])}; it goes on here, and a process there ends",
            file=sys.stderr,
        )
    study.set_user_attr(ORIGIN, {"host": host, "user": find_user(), "time": time.time()})


SWEEP_ID = "sweep_id"
"""Attribute of the study: a random id, by which MLflow's runs of this ledger are found."""
PLACE = "directory"
"""Attribute of the study: the directory in which it was last written."""


def open_study(storage: JournalStorage, spec: SweepSpec, *, writable: bool) -> optuna.Study:
    """Load the study that a journal holds, or create it.

    Raises:
        IdentityError: the journal holds another sweep.
        UsageError: the journal holds no sweep and may not be written.
    """
    stored = storage.get_all_studies()  # one at most, whatever its name: a sweep may be renamed
    sampler = optuna.samplers.RandomSampler()  # never used: the searcher proposes
    if stored:
        name = stored[0].study_name
        study = optuna.load_study(storage=storage, study_name=name, sampler=sampler)
    elif writable:
        study = create_study(storage, spec.name, spec, sampler)
        study.set_user_attr(SWEEP_ID, uuid.uuid4().hex)
    else:
        raise UsageError(f"there is no sweep in {spec.location} yet")
    if writable and study.metric_names is None:
        name_objectives(study, list(spec.objectives))
    identity = study.user_attrs.get("identity")
    if identity is None and writable:
        study.set_user_attr("identity", spec.compute_identity())
    elif identity != spec.compute_identity():
        raise IdentityError(
            f"{spec.location} holds another sweep: {describe_differences(spec)}\n"
            "    fix: choose another --name, or --fresh to move that one aside"
        )
    return study


def separate_copy(study: optuna.Study, spec: SweepSpec) -> None:
    """Give a copy of a sweep an id of its own, so that it writes no runs of the original.

    A sweep that was moved keeps its id: nothing is left where it was, or another sweep.
    """
    here, id = str(spec.directory.resolve()), study.user_attrs.get(SWEEP_ID, "")
    before = study.user_attrs.get(PLACE, here)
    if study.user_attrs.get(PLACE) != here:
        study.set_user_attr(PLACE, here)
    original, own = Path(before) / JOURNAL, spec.directory / JOURNAL
    if before == here or not is_file(original) or original.samefile(own):
        return
    if id.encode() not in original.read_bytes():
        return
    study.set_user_attr(SWEEP_ID, uuid.uuid4().hex)
    print(f"note: a copy of the sweep in {before}; MLflow gets runs of its own", file=sys.stderr)


def pin_template_date(study: optuna.Study, spec: SweepSpec, *, writable: bool) -> SweepSpec:
    """Return the spec with the date for chat templates that the sweep recorded at its first start.

    A sweep that recorded none is given one if it is `writable`, and else keeps that of its file.

    Raises:
        IdentityError: the spec names another date.
    """
    named = spec.model.template_date
    recorded: str = study.user_attrs.get("template_date", "")
    if not recorded and not writable:
        return spec
    if not recorded:
        recorded = named or date.today().isoformat()
        study.set_user_attr("template_date", recorded)
    if named not in ("", recorded):
        raise IdentityError(
            f"{spec.location} was started with model.template_date = {recorded}, not {named}\n"
            "    fix: remove that key, choose another --name, or --fresh to move that sweep aside"
        )
    return spec.replace(model=spec.model.replace(template_date=recorded))


def describe_differences(spec: SweepSpec) -> str:
    """Return the first keys in which the sweep in the directory of `spec` differs from `spec`."""
    keys: list[str] = []
    with suppress(SpecError):  # the file was moved, or another version wrote it
        stored = load_spec(spec.directory / SPEC, name=spec.name, to_run=False)
        keys = list_differences(list_decisive_values(stored), list_decisive_values(spec))
        if not keys:  # read now, the stored file has today's keys and defaults
            return "no key differs, but a version of gdpo_tune with other keys or defaults began it"
    if not keys:
        return "another task, policy, space or training, or other objectives"
    return join_first(keys)


def create_study(
    storage: BaseStorage, name: str, spec: SweepSpec, sampler: BaseSampler
) -> optuna.Study:
    """Create a study over the sweep's objectives."""
    with silence_optuna():
        return optuna.create_study(
            storage=storage,
            study_name=name,
            directions=[objective.direction for objective in spec.list_objectives()],
            sampler=sampler,
        )


def copy_study(study: optuna.Study) -> optuna.Study:
    """Return a copy in memory, which stays usable after the ledger is closed.

    It lacks the trials without parameters. As Optuna numbers the others anew, their user attribute
    `trial` has the number. Violations are lists, which the dashboard of Optuna reads; a constraint
    that a trial does not have is 0.
    """
    trials = [trial for trial in study.get_trials() if trial.params]
    names = dict.fromkeys(name for trial in trials for name in trial.constraints)
    for trial in trials:
        trial.user_attrs["trial"] = trial.number
        if found := trial.constraints:
            trial.system_attrs = {"constraints": [found.get(name, 0.0) for name in names]}
    with silence_optuna():
        copy = optuna.create_study(study_name=study.study_name, directions=study.directions)
        if study.metric_names is not None:
            name_objectives(copy, study.metric_names)
        copy.add_trials(trials)
    return copy


def name_objectives(study: optuna.Study, names: list[str]) -> None:
    """Store the names of a study's values, which Optuna's plots and its dashboard show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(names)


def write_spec(spec: SweepSpec) -> None:
    """Write the resolved spec, readable by its owner alone if it contains a password."""
    content = spec.dump_stored_yaml()
    mode = 0o644 if content == dump_public_yaml(spec, stored=True) else 0o600
    write_atomically(spec.directory / SPEC, content, mode=mode)


@contextmanager
def silence_optuna() -> Generator[None]:
    """Suppress Optuna's messages, which would disturb the display of the sweep."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
