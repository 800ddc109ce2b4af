"""Where a sweep's ledger is, and who may write it: a file in the sweep's folder, or a database."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core.errors import SpecError, UsageError
from gdpo_tune.ledger.journal import Journal, JournalFile, Lease, move_aside, repair
from gdpo_tune.ledger.sweep_store import SweepStore, fetch_spec
from gdpo_tune.spec import SweepSpec, load_spec, without_password
from gdpo_tune.spec.model import JOURNAL, SPEC

if TYPE_CHECKING:
    from gdpo_tune.ledger.table import JournalTable

LOCK = "ledger.lock"


@dataclass(frozen=True)
class Opened:
    """A journal that may be written."""

    journal: Journal
    lease: Lease
    """On the sweep's folder."""
    aside: Path | None
    """Where the folder of an earlier sweep is now, if it was moved."""

    def close(self) -> None:
        """Give both back."""
        self.journal.close()
        self.lease.release()


def for_reading(spec: SweepSpec) -> Journal:
    """The journal of a sweep.

    Raises:
        UsageError: there is none.
        OSError: it cannot be read.
    """
    directory = spec.directory.absolute()
    if spec.ledger:
        journal = in_database(spec, read_only=True)
        if journal.exists():
            return journal
        journal.close()
        raise UsageError(f"there is no sweep {spec.name} in {without_password(spec.ledger)} yet")
    if not (directory / JOURNAL).exists():
        raise UsageError(f"there is no sweep in {directory} yet")
    return JournalFile(directory / JOURNAL, read_only=True)


def for_writing(spec: SweepSpec, *, fresh: bool) -> Opened:
    """The journal of a sweep, for one process alone.

    Args:
        spec: the sweep.
        fresh: move an earlier one of this name aside.

    Raises:
        LedgerHeldError: another process writes it.
        UsageError: an earlier sweep in the folder has its ledger elsewhere.
        OSError: the folder or the file cannot be made.
    """
    directory = spec.directory.absolute()
    lease, table, aside, stored = Lease(directory / LOCK), None, None, False
    try:
        if spec.address:
            stored = fetch_spec(spec.address, directory)  # this folder may be new, and that old
        if spec.ledger:
            table = in_database(spec, read_only=False)
        if fresh and (stored or (table.exists() if table else (directory / JOURNAL).exists())):
            lease, aside = move_aside(lease)
            if spec.address:
                # Before the ledger: trials that one does not know of are deleted there.
                SweepStore(spec).move_aside(aside.name)
            if table:
                table.move_aside(aside.name)
        refuse_another_place(spec, directory)
        if table and stored and not fresh and not table.exists():
            raise UsageError(
                f"{spec.address} holds a sweep of which {without_password(spec.ledger)} knows "
                "nothing\n    fix: bring that database back, or --fresh to move that sweep aside"
            )
        if table:
            return Opened(table, lease, aside)
        if (directory / JOURNAL).exists():
            repair(directory / JOURNAL)
        return Opened(JournalFile(directory / JOURNAL, read_only=False), lease, aside)
    except BaseException:
        if table:
            table.close()
        lease.release()
        raise


def in_database(spec: SweepSpec, *, read_only: bool) -> JournalTable:
    """The journal in the database that the sweep names."""
    # Only now: SQLAlchemy takes a moment to import, and most ledgers are files.
    from gdpo_tune.ledger.table import JournalTable

    return JournalTable(spec.ledger, spec.name, read_only=read_only)


def refuse_another_place(spec: SweepSpec, directory: Path) -> None:
    """A sweep stays where its ledger was begun: an empty one beside its trials would delete them.

    Raises:
        UsageError: this one's is elsewhere.
    """
    in_file = (directory / JOURNAL).exists()
    if in_file and not spec.ledger:
        return
    if in_file:
        there = str(directory / JOURNAL)
        fix = "leave ledger: out"
    else:
        there, fix = _earlier(spec, directory), "write that as ledger:"
    if there:
        raise UsageError(
            f"the sweep in {directory} has its ledger in {there}\n"
            f"    fix: {fix}, or choose another --name, or --fresh to move that sweep aside"
        )


def _earlier(spec: SweepSpec, directory: Path) -> str:
    """Another database that the sweep in a folder was begun in; empty if none was."""
    try:
        earlier = load_spec(directory / SPEC, name=spec.name, to_run=False)
    except SpecError:
        return ""  # there is none, or one that another version wrote
    known = without_password(earlier.ledger)
    return known if known != without_password(spec.ledger) else ""
