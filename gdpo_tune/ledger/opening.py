"""Find and open the ledger of a sweep: a file in the sweep's directory, or a database."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core.errors import SpecError, UsageError
from gdpo_tune.ledger.journal import Journal, JournalFile, Lease, move_aside, repair
from gdpo_tune.ledger.sweep_store import SweepStore, fetch_spec
from gdpo_tune.spec import SweepSpec, hide_passwords, load_spec
from gdpo_tune.spec.model import JOURNAL, SPEC

if TYPE_CHECKING:
    from gdpo_tune.ledger.postgres_journal import PostgresJournal

LOCK = "ledger.lock"


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
        return journal
    journal.close()
    raise UsageError(f"there is no sweep {spec.name} in {hide_passwords(spec.ledger)} yet")


def open_for_writing(spec: SweepSpec, *, fresh: bool) -> tuple[Journal, Lease, Path | None]:
    """Open or create the journal of a sweep, for this process alone.

    `fresh` moves an earlier sweep of this name aside.

    Returns:
        The journal, the lease on the sweep's directory, and the new path of the directory of an
        earlier sweep; None if none was moved.

    Raises:
        LedgerHeldError: another process writes it.
        UsageError: an earlier sweep in the directory has its ledger elsewhere.
        OSError: the directory or the file cannot be created.
    """
    directory = spec.directory.absolute()
    file = directory / JOURNAL
    lease, database, aside, stored = Lease(directory / LOCK), None, None, False
    try:
        if spec.address:  # the directory on this machine may be new while the sweep is old
            stored = fetch_spec(spec.address, directory)
        if spec.ledger:
            database = _open_database(spec, read_only=False)
        if fresh and (stored or (database.exists() if database else file.exists())):
            lease, aside = move_aside(lease)
            if spec.address:
                # Before the ledger, because an empty ledger would delete stored trials.
                SweepStore(spec).move_aside(aside.name)
            if database:
                database.move_aside(aside.name)
        _refuse_moved_ledger(spec, directory)
        if database:
            if stored and not fresh and not database.exists():
                raise UsageError(
                    f"{spec.address} holds a sweep that is not in {hide_passwords(spec.ledger)}\n"
                    "    fix: restore that database, or --fresh to move that sweep aside"
                )
            return database, lease, aside
        if file.exists():
            repair(file)
        return JournalFile(file, read_only=False), lease, aside
    except BaseException:
        if database:
            database.close()
        lease.release()
        raise


def _open_database(spec: SweepSpec, *, read_only: bool) -> PostgresJournal:
    # Imported late: SQLAlchemy is slow to import, and most ledgers are files.
    from gdpo_tune.ledger.postgres_journal import PostgresJournal

    return PostgresJournal(spec.ledger, spec.name, read_only=read_only)


def _refuse_moved_ledger(spec: SweepSpec, directory: Path) -> None:
    """Refuse another ledger than that of the sweep: an empty ledger would delete its trials.

    Raises:
        UsageError: this sweep has its ledger elsewhere.
    """
    ledger, fix = spec.ledger and str(directory / JOURNAL), "leave ledger: out"
    if not (directory / JOURNAL).exists():
        ledger, fix = "", "write that as ledger:"
        with suppress(SpecError):  # there is no file, or another version wrote it
            earlier = load_spec(directory / SPEC, name=spec.name, to_run=False)
            ledger = hide_passwords(earlier.ledger)
    if ledger and ledger != hide_passwords(spec.ledger):
        raise UsageError(
            f"the sweep in {directory} has its ledger in {ledger}\n"
            f"    fix: {fix}, or choose another --name, or --fresh to move that sweep aside"
        )
