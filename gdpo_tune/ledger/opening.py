"""Find and open the ledger of a sweep: a file in the sweep's directory, or a database.

A name is unique in a database, and two directories may have sweeps of one name. So a ledger has an
origin: the directory or address of its sweep, host and user, and a random id that the directory
has too, in `.sweep`. A directory with another id is refused, one that was moved is not.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import date
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage

from gdpo_tune.core.content import format_time
from gdpo_tune.core.errors import (
    IdentityError,
    SpecError,
    StoreError,
    StoreUnreachableError,
    UsageError,
)
from gdpo_tune.core.files import is_file, write_atomically
from gdpo_tune.core.locks import LOCK, Lease
from gdpo_tune.core.object_store import JOURNAL, SPEC, StoreDirectory, is_url
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.core.trial_files import TRIALS
from gdpo_tune.ledger.journal import Journal, JournalFile, archive_directory, truncate_torn_write
from gdpo_tune.ledger.requests import find_user
from gdpo_tune.ledger.sweep_store import SweepStore, fetch_spec, print_notice
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import dump_public_yaml, list_decisive_values, list_differences

if TYPE_CHECKING:
    from gdpo_tune.ledger.postgres_journal import PostgresJournal


ID = ".sweep"
"""File of a sweep's directory with the random id of its ledger."""
ORIGIN = "sweep_origin"
"""Attribute of the study: `id`, `place` (directory or address), `host`, `user`, and `time`, at
which this place began with it, in Unix seconds."""


def open_for_reading(spec: SweepSpec) -> Journal:
    """Open the journal of a sweep to read it.

    Raises:
        UsageError: there is none.
        OSError: it cannot be read.
    """
    if not spec.ledger:
        path = spec.directory.absolute() / JOURNAL
        if not path.exists():
            raise UsageError(f"there is no sweep in {path.parent} yet")
        return JournalFile(path, read_only=True)
    journal = _open_database(spec, read_only=True)
    if journal.exists():
        origin = _read_origin(journal)
        if origin and not is_ours(spec, origin):
            _print_once(f"{_describe_origin(spec, origin)}; its policies and step files are there")
        return journal
    journal.close()
    raise UsageError(f"there is no sweep {spec.name} in {redact_passwords(spec.ledger)} yet")


def open_for_writing(
    spec: SweepSpec, *, fresh: bool, continue_from: str = ""
) -> tuple[Journal, Lease, Path | None]:
    """Open or create the journal of a sweep, for this process alone; arguments as `Ledger.open`.

    Returns:
        The journal, the lease on the sweep's directory, and the new path of the directory of an
        earlier sweep; None if none was moved.

    Raises:
        LedgerHeldError, IdentityError: as `Ledger.open`.
        UsageError: an earlier sweep in the directory has its ledger elsewhere.
        OSError: the directory or the file cannot be created.
    """
    directory = spec.directory.absolute()
    file = directory / JOURNAL
    lease = Lease(directory / LOCK, is_needed=not spec.ledger)
    database, aside, stored = None, None, False
    try:
        if spec.address:  # the directory on this machine may be new while the sweep is old
            stored = fetch_spec(spec.address, directory)
        if spec.ledger:
            database = _open_database(spec, read_only=False)
        is_known = database is not None and database.exists()
        if continue_from and fresh:
            raise UsageError("--continue-from goes on, and --fresh begins anew: write one of them")
        if continue_from and not is_known:
            raise UsageError(
                f"--continue-from {continue_from}: ledger: names no database with {spec.name}\n    "
                "fix: write the ledger: of that sweep; one without ledger: is continued where it is"
            )
        if not fresh:
            _refuse_moved_ledger(spec, directory)
        if database and is_known:
            _check_owner(spec, database, continue_from)
        if fresh and (is_known or stored or (directory / SPEC).exists() or file.exists()):
            lease, aside = archive_directory(lease)
            if spec.address:
                # Before the ledger, because an empty ledger would delete stored trials.
                SweepStore(spec).archive(aside.name)
            if database:
                database.archive(aside.name)
        elif stored and not is_known:
            raise UsageError(
                f"{spec.address} holds a sweep that is not in {redact_passwords(spec.ledger)}\n"
                "    fix: restore that database, or --fresh to move that sweep aside"
            )
        if database:
            return database, lease, aside
        if file.exists():
            truncate_torn_write(file)
        return JournalFile(file, read_only=False), lease, aside
    except BaseException:
        if database:
            database.close()
        lease.release()
        raise


def record_origin(study: optuna.Study, spec: SweepSpec) -> None:
    """Record whose sweep a ledger is, if that is new, in the study and in its directory."""
    known, own_id = study.user_attrs.get(ORIGIN), _read_id(spec.directory)
    here = {"place": spec.address or os.path.abspath(spec.directory), "host": socket.gethostname()}
    if known and spec.address == known["place"]:
        return
    if known and not spec.address and own_id in ("", known["id"]):
        origin = known | here  # the directory may have moved
    else:  # it begins here, or continues here
        new_id = own_id or uuid.uuid4().hex
        origin = {"id": new_id, **here, "user": find_user(), "time": time.time()}
    if not spec.address:
        write_atomically(spec.directory / ID, str(origin["id"]))
    if origin != known:
        study.set_user_attr(ORIGIN, origin)


def _describe_origin(spec: SweepSpec, origin: Mapping[str, Any]) -> str:
    return (
        f"{spec.name} in {redact_passwords(spec.ledger)} is the sweep of {origin['user']} on "
        f"{origin['host']}, in {origin['place']} since {format_time(origin['time'])}"
    )


def _check_owner(spec: SweepSpec, database: PostgresJournal, continue_from: str) -> None:
    """Refuse a sweep of another directory, or fetch its files if it is to continue here."""
    origin, directory = _read_origin(database), spec.directory.absolute()
    if origin is None:  # an earlier version wrote it, or a kill came between
        if spec.address or (directory / SPEC).exists() or not database.find_last("datetime_start"):
            return
        whose = f"{spec.name} in {redact_passwords(spec.ledger)} is the sweep of another directory"
        origin = {"id": "", "host": "another machine", "place": continue_from or "DIRECTORY"}
    elif is_ours(spec, origin):
        return
    else:
        whose = _describe_origin(spec, origin)
    source = continue_from.rstrip("/") if is_url(continue_from) else os.path.abspath(continue_from)
    is_named = source == origin["place"] or _read_id(Path(source)) == origin["id"] != ""
    if not continue_from or not is_named:
        raise IdentityError(
            f"{whose}\n    fix: choose another --name, or go on with it here, and no longer there: "
            f"--continue-from {quote(origin['place'])}"
        )
    _fetch_files(spec, source, origin)
    if not spec.address:
        write_atomically(directory / ID, uuid.uuid4().hex)


def _fetch_files(spec: SweepSpec, source: str, origin: Mapping[str, Any]) -> None:
    """Copy the trials' files of a sweep that continues here; say so where they are out of reach."""
    directory = spec.directory.absolute()
    try:
        if is_url(source):
            files = StoreDirectory(source, say=print_notice)
            files.download({name: directory / name for name in files.list_sizes(TRIALS)})
        elif _read_id(Path(source)) == origin["id"] and is_file(Path(source, SPEC)):
            if Path(source, TRIALS).is_dir():
                shutil.copytree(Path(source, TRIALS), directory / TRIALS, dirs_exist_ok=True)
        else:
            raise StoreError(f"{source} on {origin['host']} is out of reach of this machine")
    except (StoreError, StoreUnreachableError) as error:
        print(
            f"policies and step files stay elsewhere: {error}. The front is kept; trials that had "
            "not ended begin again, and no merge has parents from there.",
            file=sys.stderr,
        )
    if spec.address:
        files = [path for path in (directory / TRIALS).rglob("*") if path.is_file()]
        store = StoreDirectory(spec.address, say=print_notice)
        store.upload({path.relative_to(directory).as_posix(): path for path in files})


def _read_origin(database: PostgresJournal) -> dict[str, Any] | None:
    record = database.find_last(ORIGIN)
    return record and record["user_attr"][ORIGIN]


def is_ours(spec: SweepSpec, origin: Mapping[str, Any]) -> bool:
    """Return whether a ledger's sweep is that in the directory, or at the address, of `spec`."""
    place, own_id = origin["place"], _read_id(spec.directory)
    if spec.address or is_url(place):
        return place == spec.address
    if not own_id:  # its files were deleted
        return origin["host"] == socket.gethostname() and place == os.path.abspath(spec.directory)
    # A copy has the id too, and then the first one keeps the sweep: on a shared disk, for any host.
    is_copy = _read_id(Path(place)) == own_id and not Path(place).samefile(spec.directory)
    return own_id == origin["id"] and not is_copy


def _read_id(directory: Path) -> str:
    with suppress(OSError, ValueError):  # ValueError: other bytes than ours
        return (directory / ID).read_text(encoding="ascii").strip()
    return ""


@cache
def _print_once(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _open_database(spec: SweepSpec, *, read_only: bool) -> PostgresJournal:
    # Imported late: SQLAlchemy is slow to import, and most ledgers are files.
    from gdpo_tune.ledger.postgres_journal import PostgresJournal

    return PostgresJournal(spec.ledger, spec.name, read_only=read_only)


def _refuse_moved_ledger(spec: SweepSpec, directory: Path) -> None:
    """Refuse another ledger than that of the sweep: an empty ledger would delete its trials."""
    ledger, fix = spec.ledger and str(directory / JOURNAL), "leave ledger: out"
    if not (directory / JOURNAL).exists():
        ledger, fix = "", "write that as ledger:"
        with suppress(SpecError):  # there is no file, or another version wrote it
            earlier = load_spec(directory / SPEC, name=spec.name, to_run=False)
            ledger = redact_passwords(earlier.ledger)
    if ledger and ledger != redact_passwords(spec.ledger):
        raise UsageError(
            f"the sweep in {directory} has its ledger in {ledger}\n"
            f"    fix: {fix}, or choose another --name, or --fresh to move that sweep aside"
        )


SWEEP_ID = "sweep_id"
"""Attribute of the study: a random id, by which MLflow's runs of this ledger are found."""
MAX_DIFFERENCES = 4
"""Number of differences between two sweeps that a message lists."""


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
    if not keys:
        return "another task, policy, space or training, or other objectives"
    hidden = len(keys) - MAX_DIFFERENCES
    return "; ".join(keys[:MAX_DIFFERENCES]) + (f"; {hidden} more" if hidden > 0 else "")


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
    """Return a copy in memory, which stays usable after the ledger is closed."""
    with silence_optuna():
        copy = optuna.create_study(study_name=study.study_name, directions=study.directions)
        if study.metric_names is not None:
            name_objectives(copy, study.metric_names)
        copy.add_trials(study.get_trials(deepcopy=False))
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
