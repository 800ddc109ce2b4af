"""The ledger in a PostgreSQL database: the same records as in a file, one a row.

The right to write is a lock of the database's that ends with the connection of its holder, and the
connection of a machine that is gone ends within a minute.
Records are numbered: of two writers that take each other for dead, the second one finds its number
taken, whatever became of the lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError

from gdpo_tune.core.errors import LedgerHeldError, LedgerUnreachableError, UsageError
from gdpo_tune.core.outages import PATIENCE, build_retrying
from gdpo_tune.ledger.journal import DAMAGED, DECODER, Journal
from gdpo_tune.spec import without_password

TABLE = "gdpo_tune_ledger"
CREATE = f"""CREATE TABLE IF NOT EXISTS {TABLE} (
    sweep text NOT NULL,
    number bigint NOT NULL,
    record text NOT NULL,
    written timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sweep, number))"""
CREATING = 7105161002
"""Number of the lock that lets one process at a time create the table."""
SESSION = {
    "tcp_keepalives_idle": "20",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""What the server is asked to do for our connections: notice within a minute who is gone."""
CLIENT = {
    "connect_timeout": 10,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""The same on this side: a network that loses packets without a word would hold a record up for a
quarter of an hour."""
NOTICED = 90.0
"""Seconds after which the server knows for sure that a connection of ours has ended."""
AGAIN_SECONDS = 2.0


class JournalTable(Journal):
    """Optuna's journal in one table of a database, for one writer and any number of readers.

    Every record is committed before a call returns.
    """

    def __init__(self, url: str, sweep: str, *, read_only: bool) -> None:
        """
        Args:
            url: of the database.
            sweep: its name, which is unique in a database.
            read_only: take no lock and change nothing.

        Raises:
            LedgerHeldError: another process writes this ledger; the message names it.
            UsageError: the database does not answer, or refuses.
        """
        self.path = f"{without_password(url)} ({sweep})"
        """What to call it in messages."""
        self._sweep = sweep
        self._key = int.from_bytes(hashlib.sha256(sweep.encode()).digest()[:8], signed=True)
        """Number of the lock that who writes this sweep holds."""
        self._writes = not read_only
        self._held: list[str] | None = None
        """Records that are to be written together; None: each at once."""
        self._next = 0
        """Number of the next record that is written."""
        self._lost: Exception | None = None
        """Why nothing is written any more."""
        self._unread: list[str] = []
        """Records that were written here and not read back yet: nobody else writes any."""
        try:
            self._engine = _engine(url)
            self._connection = self._connect()
            if self._writes:
                self._create()
                self._lock()
                self._next = self._count()
        except ImportError as error:
            raise UsageError(
                f"ledger {self.path}: {error}\n"
                "    fix: write postgresql+psycopg2://, and pip install 'gdpo-tune[postgres]'"
            ) from error
        except SQLAlchemyError as error:
            raise UsageError(
                f"ledger {self.path}: {_told(error)}\n"
                "    fix: start the database, or mend the address; the password belongs into "
                "PGPASSWORD or ~/.pgpass"
            ) from error

    def exists(self) -> bool:
        """Whether there is any record."""
        return self._count() > 0

    def move_aside(self, name: str) -> None:
        """Keep all records under another name of a sweep, and begin anew."""
        self._run(f"UPDATE {TABLE} SET sweep = :name WHERE sweep = :sweep", name=name)
        self._next = 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the records from number `log_number_from` on.

        Raises:
            UsageError: one of them is not there.
        """
        if self._writes and log_number_from == self._next - len(self._unread):
            records, self._unread = self._unread, []
        else:
            query = f"""SELECT number, record FROM {TABLE} WHERE sweep = :sweep
                AND number >= :first ORDER BY number"""
            found = self._run(query, first=log_number_from) if self._there() else []
            for expected, (number, _) in enumerate(found, log_number_from):
                if number != expected:
                    raise UsageError(
                        f"ledger {self.path}: record {expected} is gone, so it is {DAMAGED}"
                    )
            records = [row[1] for row in found]
        for record in records:
            yield DECODER.decode(record)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records; they are committed when this returns, but for `together`.

        Raises:
            LedgerHeldError: another process has appended some meanwhile.
            LedgerUnreachableError: the database has not answered for `PATIENCE`.
        """
        records = [json.dumps(log, separators=(",", ":")) for log in logs]
        self._unread += records
        self._next += len(records)
        if self._held is not None:
            self._held += records
        else:
            self._write(records, self._next - len(records))

    @contextmanager
    def together(self) -> Generator[None]:
        """Commit all records that are appended meanwhile at once, at the end."""
        self._held = []
        try:
            yield
        finally:
            records, self._held = self._held, None
            self._write(records, self._next - len(records))

    def close(self) -> None:
        """Give the right to write back; a second call does nothing."""
        self._connection.close()
        self._engine.dispose()

    def _write(self, records: Sequence[str], first: int) -> None:
        if self._lost is not None:
            raise self._lost
        try:
            self._write_now(records, first)
        except (LedgerHeldError, LedgerUnreachableError) as error:
            self._lost = error  # whoever goes on from here does not wait for it again
            raise

    def _write_now(self, records: Sequence[str], first: int) -> None:
        if not records:
            return
        rows = [
            {"sweep": self._sweep, "number": number, "record": record}
            for number, record in enumerate(records, first)
        ]
        from tenacity import RetryError, TryAgain, retry_if_exception

        away: BaseException | None = None
        held_since: float | None = None

        def insert() -> None:
            nonlocal held_since
            if away is not None and not self._is_ours_again():
                # by our own connection, as long as the server has not noticed its end
                held_since = held_since or time.monotonic()
                if time.monotonic() - held_since > NOTICED:
                    raise self._held_by_another()
                raise TryAgain
            self._insert(rows)

        def announce(state: Any) -> None:
            nonlocal away
            error = state.outcome.exception()
            if away is None:
                print(f"waiting for the ledger {self.path}: {_told(error)}", file=sys.stderr)
            away = away if isinstance(error, TryAgain) else error

        away_errors = retry_if_exception(_is_away)
        retrying = build_retrying(
            PATIENCE, first=AGAIN_SECONDS, retry=away_errors, before_sleep=announce
        )
        try:
            retrying(insert)
        except RetryError as error:
            last = away or error.last_attempt.exception()
            raise LedgerUnreachableError(
                f"the ledger {self.path} has not answered for {PATIENCE:g} s ({_told(last)}); what "
                "trials have recorded is kept, and the same command goes on"
            ) from last

    def _insert(self, rows: Sequence[dict[str, Any]]) -> None:
        statement = f"INSERT INTO {TABLE} (sweep, number, record) VALUES (:sweep, :number, :record)"
        try:
            with self._connection.begin():
                self._connection.execute(sa.text(statement), rows)
        except IntegrityError as error:
            # of a commit whose answer was lost, nobody knows but the table
            if not self._are_there(rows):
                raise LedgerHeldError(
                    f"ledger {self.path}: another process has written to it; this one ends"
                ) from error

    def _are_there(self, rows: Sequence[dict[str, Any]]) -> bool:
        query = f"""SELECT record FROM {TABLE} WHERE sweep = :sweep AND number BETWEEN :first
            AND :last ORDER BY number"""
        found = self._run(query, first=rows[0]["number"], last=rows[-1]["number"])
        return [row[0] for row in found] == [row["record"] for row in rows]

    def _is_ours_again(self) -> bool:
        """Whether a new connection has the lock."""
        self._connection.close()
        self._connection = self._connect()
        return self._try_lock()

    def _connect(self) -> sa.Connection:
        connection = self._engine.connect()
        with connection.begin():
            for name, value in SESSION.items():
                connection.execute(sa.text(f"SET {name} = {value}"))
        return connection

    def _create(self) -> None:
        with self._connection.begin():
            self._connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({CREATING})"))
            self._connection.execute(sa.text(CREATE))

    def _lock(self) -> None:
        if not self._try_lock():
            raise self._held_by_another()

    def _try_lock(self) -> bool:
        return self._run("SELECT pg_try_advisory_lock(:key)", key=self._key)[0][0]

    def _held_by_another(self) -> LedgerHeldError:
        """What to tell of another writer."""
        holder = self._run(
            """SELECT a.application_name, a.client_addr FROM pg_locks l JOIN pg_stat_activity a
            ON a.pid = l.pid WHERE l.locktype = 'advisory' AND l.granted
            AND ((l.classid::bigint << 32) | l.objid::bigint) = :key""",
            key=self._key,
        )
        who = f"{holder[0][0]}, from {holder[0][1]}" if holder else "another process"
        return LedgerHeldError(
            f"ledger {self.path} is being written by {who}; wait for it, stop it, or choose "
            "another --name"
        )

    def _there(self) -> bool:
        """Whether the table is: who only reads does not create it."""
        return self._run("SELECT to_regclass(:table) IS NOT NULL", table=TABLE)[0][0]

    def _count(self) -> int:
        if not self._there():
            return 0
        query = f"SELECT coalesce(max(number) + 1, 0) FROM {TABLE} WHERE sweep = :sweep"
        return self._run(query)[0][0]

    def _run(self, statement: str, **values: object) -> Sequence[Any]:
        with self._connection.begin():
            asked = self._connection.execute(sa.text(statement), {"sweep": self._sweep, **values})
            return asked.all() if asked.returns_rows else ()


def _engine(url: str) -> sa.Engine:
    about = f"gdpo_tune {os.getpid()} on {socket.gethostname()}"[:63]
    options = {**CLIENT, "application_name": about}
    return sa.create_engine(url, connect_args=options, poolclass=sa.NullPool)


def _is_away(error: BaseException) -> bool:
    """Return whether the database does not answer, or has ended the connection."""
    return isinstance(error, OperationalError) or (
        isinstance(error, DBAPIError) and error.connection_invalidated
    )


def _told(error: BaseException | None) -> str:
    """The first line of what the database says; SQLAlchemy adds a page of its own."""
    told = getattr(error, "orig", None) or error
    return (str(told).strip().splitlines() or [type(error).__name__])[0]
