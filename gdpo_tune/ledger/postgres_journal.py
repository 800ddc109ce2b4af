"""The ledger in a PostgreSQL database: the same records as in a file, one a row.

The right to write is an advisory lock that ends with its holder's connection. The server ends the
connection of a lost machine within a minute. Records are numbered, so a writer that lost its lock
finds that the number of its next record is taken.

Optuna's `RDBStorage` cannot replace this table. It commits each call alone, so an outcome could be
stored without the end of its trial. After a lost answer a call cannot be repeated safely. Its rows
have no numbers that would stop a second writer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError

from gdpo_tune.core.errors import (
    LedgerHeldError,
    LedgerUnreachableError,
    UsageError,
    get_first_line,
)
from gdpo_tune.core.http import PATIENCE, build_retry
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.ledger.journal import DAMAGED_FIX, DECODER, Journal

TABLE = "gdpo_tune_ledger"
CREATE = f"""CREATE TABLE IF NOT EXISTS {TABLE} (
    sweep text NOT NULL,
    number bigint NOT NULL,
    record text NOT NULL,
    written timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sweep, number))"""
TIMEOUTS = {
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""For both ends of a connection: each notices within a minute that the other one is gone."""
NOTICE_SECONDS = 90.0
"""Time within which the server notices that one of our connections has ended."""
RETRY_SECONDS = 2.0


class PostgresJournal(Journal):
    """Journal in one table of a database, for one writer and any number of readers.

    A record that another process has appended is a `LedgerHeldError`, a database that has not
    answered for `PATIENCE` a `LedgerUnreachableError`.
    """

    def __init__(self, url: str, sweep: str, *, read_only: bool) -> None:
        """Connect; unless `read_only`, create the table if it is missing and take the lock.

        `sweep` is unique in the database.

        Raises:
            LedgerHeldError: another process writes this ledger; the message names it.
            UsageError: the database does not answer, or refuses.
        """
        self.path = f"{redact_passwords(url)} ({sweep})"
        self._sweep = sweep
        self._key = int.from_bytes(hashlib.sha256(sweep.encode()).digest()[:8], signed=True)
        """Number of the lock of the sweep's writer."""
        self._writes = not read_only
        self._uncommitted: list[str] = []
        self._next = 0  # number of the next record to append
        self._unread: list[str] = []
        """Records that this writer appended and did not read back: no other process appends."""
        self._failure: Exception | None = None
        client = f"gdpo_tune {os.getpid()} on {socket.gethostname()}"[:63]
        options = {**TIMEOUTS, "connect_timeout": 10, "application_name": client}
        try:
            self._engine = sa.create_engine(url, connect_args=options, poolclass=sa.NullPool)
            self._connection = self._connect()
            if self._writes:
                with self._connection.begin():
                    # one process at a time creates the table
                    for statement in ("SELECT pg_advisory_xact_lock(7105161002)", CREATE):
                        self._connection.execute(sa.text(statement))
                if not self._try_lock():
                    raise self._build_held_error()
                self._next = self._count()
        except ImportError as error:
            raise UsageError(
                f"ledger {self.path}: {error}\n"
                "    fix: write postgresql+psycopg2://, and pip install 'gdpo-tune[postgres]'"
            ) from error
        except SQLAlchemyError as error:
            raise UsageError(
                f"ledger {self.path}: {_get_database_message(error)}\n"
                "    fix: start the database, or correct the address; the password belongs in "
                "PGPASSWORD or ~/.pgpass"
            ) from error

    def exists(self) -> bool:
        """Return whether there is any record."""
        # A reader does not create the table.
        has_table = self._run("SELECT to_regclass(:table) IS NOT NULL", table=TABLE)[0][0]
        return has_table and self._count() > 0

    def find_last(self, word: str) -> dict[str, Any] | None:
        """Return the newest record with a key of this name; None if there is none."""
        query = f"""SELECT record FROM {TABLE} WHERE sweep = :sweep AND record LIKE :key
            ORDER BY number DESC LIMIT 1"""
        rows = self._run(query, key=f'%"{word}":%')
        return DECODER.decode(rows[0][0]) if rows else None

    def archive(self, name: str) -> None:
        """Rename the stored sweep, so that this journal is empty."""
        self._run(f"UPDATE {TABLE} SET sweep = :name WHERE sweep = :sweep", name=name)
        self._next = 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the records from number `log_number_from` on."""
        if self._writes and log_number_from == self._next - len(self._unread):
            records, self._unread = self._unread, []
        else:
            query = f"""SELECT number, record FROM {TABLE} WHERE sweep = :sweep
                AND number >= :first ORDER BY number"""
            rows = self._run(query, first=log_number_from)
            for expected, (number, _) in enumerate(rows, log_number_from):
                if number != expected:
                    raise UsageError(
                        f"ledger {self.path}: record {expected} is gone, so it is {DAMAGED_FIX}"
                    )
            records = [record for _, record in rows]
        for record in records:
            yield DECODER.decode(record)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records; unless a batch is open, they are committed when this returns."""
        records = [json.dumps(log, separators=(",", ":")) for log in logs]
        self._unread += records
        self._uncommitted += records
        self._next += len(records)
        if not self._is_batch_open:
            self._flush()

    def close(self) -> None:
        """Close the connection, which releases the lock; a second call does nothing."""
        self._connection.close()
        self._engine.dispose()

    def _flush(self) -> None:
        """Commit the uncommitted records; after a failure, raise it again at once."""
        if self._failure is not None:
            raise self._failure
        records, self._uncommitted = self._uncommitted, []
        rows = [
            {"sweep": self._sweep, "number": number, "record": record}
            for number, record in enumerate(records, self._next - len(records))
        ]
        if not rows:
            return
        try:
            self._insert_patiently(rows)
        except (LedgerHeldError, LedgerUnreachableError) as error:
            self._failure = error
            raise

    def _insert_patiently(self, rows: Sequence[dict[str, Any]]) -> None:
        from tenacity import RetryError, TryAgain, retry_if_exception

        def announce(state: Any) -> None:
            if state.attempt_number == 1:
                message = _get_database_message(state.outcome.exception())
                print(f"waiting for the ledger {self.path}: {message}", file=sys.stderr)

        def is_away(error: BaseException) -> bool:
            has_no_connection = isinstance(error, DBAPIError) and error.connection_invalidated
            return isinstance(error, OperationalError) or has_no_connection

        retry = retry_if_exception(is_away)
        notice_by = math.inf
        try:
            for attempt in build_retry(
                PATIENCE, first=RETRY_SECONDS, retry=retry, before_sleep=announce
            ):
                with attempt:
                    if attempt.retry_state.attempt_number > 1:
                        self._connection.close()
                        self._connection = self._connect()
                        if not self._try_lock():
                            notice_by = min(notice_by, time.monotonic() + NOTICE_SECONDS)
                            if time.monotonic() > notice_by:
                                raise self._build_held_error()
                            raise TryAgain("our old connection still holds the lock")
                    self._insert(rows)
        except RetryError as error:
            last = error.last_attempt.exception()
            raise LedgerUnreachableError(
                f"the ledger {self.path} has not answered for {PATIENCE:g} s "
                f"({_get_database_message(last)}); the records of trials are kept: run the same "
                "command to resume"
            ) from last

    def _insert(self, rows: Sequence[dict[str, Any]]) -> None:
        statement = f"INSERT INTO {TABLE} (sweep, number, record) VALUES (:sweep, :number, :record)"
        try:
            with self._connection.begin():
                self._connection.execute(sa.text(statement), rows)
        except IntegrityError as error:
            # After a commit whose answer was lost, the table already holds these rows.
            query = f"""SELECT record FROM {TABLE} WHERE sweep = :sweep
                AND number BETWEEN :first AND :last ORDER BY number"""
            stored = self._run(query, first=rows[0]["number"], last=rows[-1]["number"])
            if [record for (record,) in stored] != [row["record"] for row in rows]:
                raise LedgerHeldError(
                    f"ledger {self.path}: another process has written to it; this one ends"
                ) from error

    def _connect(self) -> sa.Connection:
        connection = self._engine.connect()
        with connection.begin():
            for name, value in TIMEOUTS.items():
                connection.execute(sa.text(f"SET tcp_{name.removeprefix('tcp_')} = {value}"))
        return connection

    def _try_lock(self) -> bool:
        return self._run("SELECT pg_try_advisory_lock(:key)", key=self._key)[0][0]

    def _build_held_error(self) -> LedgerHeldError:
        query = """SELECT a.application_name, a.client_addr FROM pg_locks l
            JOIN pg_stat_activity a ON a.pid = l.pid WHERE l.locktype = 'advisory' AND l.granted
            AND ((l.classid::bigint << 32) | l.objid::bigint) = :key"""
        holders = [f"{name}, from {host}" for name, host in self._run(query, key=self._key)]
        return LedgerHeldError(
            f"ledger {self.path} is being written by {next(iter(holders), 'another process')}; "
            "wait for it, stop it, or choose another --name"
        )

    def _count(self) -> int:
        query = f"SELECT coalesce(max(number) + 1, 0) FROM {TABLE} WHERE sweep = :sweep"
        return self._run(query)[0][0]

    def _run(self, statement: str, **values: object) -> Sequence[Any]:
        with self._connection.begin():
            result = self._connection.execute(sa.text(statement), {"sweep": self._sweep, **values})
            return result.all() if result.returns_rows else ()


def _get_database_message(error: BaseException | None) -> str:
    """Return the first line of the database's message, without the page that SQLAlchemy adds."""
    return get_first_line(getattr(error, "orig", None) or error)
