"""The ledger in a real PostgreSQL: equal to a file, one writer, recovery after an outage."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from gdpo_tune.core.errors import IdentityError, LedgerHeldError, LedgerUnreachableError, UsageError
from gdpo_tune.core.events import Incident
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome
from gdpo_tune.ledger import Ledger, postgres_journal
from gdpo_tune.ledger.postgres_journal import TABLE, PostgresJournal
from gdpo_tune.ledger.sweep_store import SweepStore
from gdpo_tune.results.open_sweep import read_sweep
from gdpo_tune.results.steering import Steering
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning.proposals import load_earlier_trials
from tests.support.mlflow_servers import PostgresServer, run_postgres_server
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration
SPACE = ROOT / "search_spaces" / "code.yaml"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with run_postgres_server() as server:
        yield server


@pytest.fixture
def spec(server: PostgresServer, tmp_path: Path) -> Iterator[SweepSpec]:
    yield spec_in(tmp_path, f"ledger={server.uri}")
    with sa.create_engine(server.uri, poolclass=sa.NullPool).begin() as connection:
        connection.execute(sa.text(f"DROP TABLE IF EXISTS {TABLE}"))


def spec_in(directory: Path, *overrides: str) -> SweepSpec:
    return load_spec(SPACE, [f"storage={directory}", *overrides], "sweep")


def values(mean: float) -> dict[str, Estimate]:
    return {name: Estimate(mean, 0.01) for name in ("correctness", "format", "length")}


def write_trials(ledger: Ledger, seed: int = 1) -> None:
    """Record a complete, a failed and a running trial, and an incident."""
    params = ledger.spec.space.complete_baseline({})
    ledger.begin_session(0.0, 2, {"revision": "none"})
    for number in range(3):
        ledger.start(params, "search", "model", seed + number)
        ledger.record_rung(number, Measurement(1, {}, Cost(64, 1.0), values(0.25)))
    ledger.record_incident(Incident(1.0, "node h (a) was lost", (2,)))
    ledger.complete(0, Outcome(values(0.5), values(0.5), Cost(640, 2.0), None))
    ledger.fail(1, "it broke")


def begin(spec: SweepSpec) -> None:
    with Ledger.open(spec) as ledger:
        write_trials(ledger)


def contents(ledger: Ledger) -> object:
    return [
        (r.number, r.state, dict(r.params), r.seed, r.validation, r.reason, r.cost, len(r.rungs))
        for r in ledger.get_records()
    ], ledger.get_sessions()


def records_of(spec: SweepSpec) -> list[str]:
    journal = PostgresJournal(spec.ledger, spec.name, read_only=True)
    try:
        return [json.dumps(log) for log in journal.read_logs(0)]
    finally:
        journal.close()


def test_a_database_holds_the_records_of_a_file(spec: SweepSpec, tmp_path: Path):
    in_file = spec_in(tmp_path / "file")
    with Ledger.open(in_file) as ledger:
        write_trials(ledger)
        expected = contents(ledger)
    with Ledger.open(spec) as ledger:
        write_trials(ledger)
        assert contents(ledger) == expected
        with Ledger.open(spec, read_only=True) as reader:
            assert contents(reader) == expected
    with Ledger.open(spec) as ledger:
        assert contents(ledger) == expected
        ledger.fail(2, "later")
    assert not (spec.directory / "ledger.journal").exists()
    of_file = (in_file.directory / "ledger.journal").read_text().splitlines()
    kinds = [sorted(json.loads(line)) for line in of_file]
    assert [sorted(json.loads(line)) for line in records_of(spec)][: len(kinds)] == kinds
    sweep = read_sweep(str(spec.directory), "x")
    assert [record.state for record in sweep.records] == ["complete", "failed", "failed"]
    learning = spec_in(tmp_path / "new", f"search.warm_start=[{spec.directory}]")
    assert [record.number for record in load_earlier_trials(learning)] == [0]


def hold(spec: SweepSpec, held: Event) -> None:
    with Ledger.open(spec):
        held.set()
        time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12
def test_a_second_writer_is_refused_with_the_name_of_the_first(spec: SweepSpec, tmp_path: Path):
    processes = multiprocessing.get_context("fork")
    held = processes.Event()
    holder = processes.Process(target=hold, args=(spec, held))
    holder.start()
    assert held.wait(60)
    with pytest.raises(LedgerHeldError, match=f"written by gdpo_tune {holder.pid} on"):
        Ledger.open(spec_in(tmp_path / "elsewhere", f"ledger={spec.ledger}"))
    holder.kill()
    holder.join()
    deadline = time.monotonic() + 30
    while True:  # the server needs a moment to see the end of the connection
        try:
            Ledger.open(spec).close()
            break
        except LedgerHeldError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_writer_that_lost_its_lock_writes_nothing_more(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        write_trials(ledger)
        other = PostgresJournal.__new__(PostgresJournal)
        other.__dict__.update(ledger._journal.__dict__, _unread=[], _uncommitted=[])
        other.append_logs([{"op_code": 99, "worker_id": "another"}])
        before = records_of(spec)
        with pytest.raises(LedgerHeldError, match="another process has written to it"):
            ledger.fail(2, "too late")
        assert records_of(spec) == before


def test_the_writer_waits_for_a_database_that_restarts(
    spec: SweepSpec, server: PostgresServer, capsys: pytest.CaptureFixture[str]
):
    with Ledger.open(spec) as ledger:
        write_trials(ledger)
        server.stop()
        again = threading.Timer(1.0, server.start)
        again.start()
        ledger.fail(2, "while the database was away")
        again.join()
        assert "waiting for the ledger postgresql+psycopg2://me@127" in capsys.readouterr().err
        with pytest.raises(LedgerHeldError):
            PostgresJournal(spec.ledger, spec.name, read_only=False)  # the lock is ours again
    with Ledger.open(spec, read_only=True) as ledger:
        assert ledger.get_record(2).reason == "while the database was away"


def test_the_writer_waits_until_the_server_releases_its_old_lock(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(postgres_journal, "RETRY_SECONDS", 0.1)
    with Ledger.open(spec) as ledger:
        write_trials(ledger)
        old, insert = ledger._journal._connection, PostgresJournal._insert

        def cut(journal: PostgresJournal, rows: list[dict[str, object]]) -> None:
            journal._connection = SimpleNamespace(close=lambda: None)
            monkeypatch.setattr(PostgresJournal, "_insert", insert)
            raise sa.exc.OperationalError("INSERT", {}, Exception("connection timed out"))

        monkeypatch.setattr(PostgresJournal, "_insert", cut)
        noticed = threading.Timer(1.0, old.close)
        noticed.start()
        ledger.fail(2, "while the network was cut")
        noticed.join()
        assert ledger.get_record(2).reason == "while the network was cut"
        with pytest.raises(LedgerHeldError):
            PostgresJournal(spec.ledger, spec.name, read_only=False)  # the lock is ours again
        monkeypatch.setattr(PostgresJournal, "_insert", cut)
        monkeypatch.setattr(postgres_journal, "NOTICE_SECONDS", 0.5)
        holder = ledger._journal._connection  # looks like that of another process
        with pytest.raises(LedgerHeldError, match="is being written by gdpo_tune"):
            ledger.end_session(0)
        holder.close()


def test_a_database_that_stays_away_ends_the_sweep(
    spec: SweepSpec, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(postgres_journal, "PATIENCE", 0.5)
    monkeypatch.setattr(postgres_journal, "RETRY_SECONDS", 0.1)
    with Ledger.open(spec) as ledger:
        write_trials(ledger)
        server.stop()
        try:
            with pytest.raises(LedgerUnreachableError, match=r"has not answered for 0\.5 s"):
                ledger.fail(2, "lost")
            monkeypatch.setattr(postgres_journal, "PATIENCE", 600.0)
            with pytest.raises(LedgerUnreachableError):
                ledger.end_session(0)  # at once
            with pytest.raises(UsageError, match=r"ledger .*: .*\n.*fix: start the database"):
                Ledger.open(spec, read_only=True)
        finally:
            server.start()
    with Ledger.open(spec) as ledger:
        assert [record.state for record in ledger.get_records()] == [
            "complete",
            "failed",
            "running",
        ]


def test_a_commit_whose_answer_was_lost_is_not_repeated(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch
):
    with Ledger.open(spec) as ledger:
        write_trials(ledger)
        insert, calls = PostgresJournal._insert, list[int]()

        def lose_the_answer(journal: PostgresJournal, rows: list[dict[str, object]]) -> None:
            insert(journal, rows)
            calls.append(len(rows))
            if len(calls) == 1:
                raise sa.exc.OperationalError("COMMIT", {}, Exception("connection lost"))

        monkeypatch.setattr(PostgresJournal, "_insert", lose_the_answer)
        count = len(records_of(spec))
        ledger.fail(2, "once")
        assert len(records_of(spec)) == count + 2
        assert ledger.get_record(2).state == "failed"


def test_a_fresh_sweep_moves_the_earlier_one_aside(spec: SweepSpec):
    begin(spec)
    kept = records_of(spec)
    with Ledger.open(spec, fresh=True) as ledger:
        assert ledger.get_records() == []
        moved = ledger.moved_aside
        assert moved is not None
    with sa.create_engine(spec.ledger, poolclass=sa.NullPool).connect() as connection:
        names = connection.execute(sa.text(f"SELECT DISTINCT sweep FROM {TABLE} ORDER BY sweep"))
        first, second = (row[0] for row in names)
    assert first == "sweep"
    assert records_of(spec.model_copy(update={"name": second})) == kept
    assert len(read_sweep(str(moved), "x").records) == 3


def test_a_missing_record_is_refused(spec: SweepSpec):
    begin(spec)
    with sa.create_engine(spec.ledger, poolclass=sa.NullPool).begin() as connection:
        connection.execute(sa.text(f"DELETE FROM {TABLE} WHERE number = 3"))
    for read_only in (True, False):
        with pytest.raises(UsageError, match=r"\(sweep\): record 3 is gone.*--fresh"):
            Ledger.open(spec, read_only=read_only)
    with Ledger.open(spec, fresh=True) as ledger:
        assert ledger.get_records() == []


def test_another_sweep_of_the_same_name_is_refused(spec: SweepSpec, tmp_path: Path):
    begin(spec)
    other = spec_in(tmp_path, f"ledger={spec.ledger}", "training.length_limit=20")
    with pytest.raises(IdentityError, match="holds another sweep"):
        Ledger.open(other)


def test_a_sweep_with_its_ledger_elsewhere_is_refused(spec: SweepSpec, tmp_path: Path):
    in_file = spec_in(tmp_path)
    begin(spec)
    with pytest.raises(UsageError, match=r"has its ledger in postgresql.*\n.*write that as ledger"):
        Ledger.open(in_file)
    shutil.rmtree(spec.directory)
    Ledger.open(in_file).close()
    with pytest.raises(UsageError, match=r"in .*ledger.journal\n.*leave ledger: out"):
        Ledger.open(spec)


def test_a_missing_sweep_is_refused(spec: SweepSpec):
    with pytest.raises(UsageError, match="there is no sweep sweep in postgresql"):
        Ledger.open(spec, read_only=True)


def test_a_trial_takes_little_time_to_record(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        params = ledger.spec.space.complete_baseline({})
        started = time.perf_counter()
        for number in range(20):
            ledger.start(params, "search", "model", number)
            ledger.fail(number, "at once")
        assert (time.perf_counter() - started) / 20 < 0.2


def test_another_directory_is_told_whose_sweep_it_meets(
    spec: SweepSpec, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """The primary key of the table (`postgres_journal.CREATE`) holds one sweep of a name."""
    other = spec_in(tmp_path / "other", f"ledger={spec.ledger}")
    with Ledger.open(spec) as ledger:
        write_trials(ledger)
        with pytest.raises(LedgerHeldError):  # both begin at once: one has the database's lock
            Ledger.open(other)
    whose = rf"the sweep of .+ on {re.escape(socket.gethostname())}, in {spec.directory} since"
    before = records_of(spec)
    for options in ({}, {"fresh": True}, {"continue_from": str(tmp_path / "wrong")}):
        with pytest.raises(IdentityError, match=f"{whose}(.|\n)*--continue-from {spec.directory}"):
            Ledger.open(other, **options)
    assert records_of(spec) == before
    assert not (other.directory / "spec.yaml").exists()
    with Ledger.open(other, read_only=True) as reader:
        assert len(reader.get_records()) == 3
    assert re.search(whose, capfd.readouterr().err)
    with pytest.raises(UsageError, match="ledger: names no database"):
        Ledger.open(spec_in(tmp_path / "file"), continue_from=str(spec.directory))


def test_a_sweep_continues_in_another_directory_with_its_policies(spec: SweepSpec, tmp_path: Path):
    other = spec_in(tmp_path / "other", f"ledger={spec.ledger}")
    with Ledger.open(spec) as ledger:
        write_trials(ledger)
        write_checkpoint(ledger.get_trial_directory(0), 2, Cost(2), lambda _: None)
    for _ in range(2):  # again, as after an interruption
        with Ledger.open(other, continue_from=str(spec.directory)) as ledger:
            assert ledger.get_checkpoint(0, 2).is_relative_to(other.directory)
            assert (ledger.get_checkpoint(0, 2) / "complete.json").exists()
    Ledger.open(other).close()  # it is this directory's now
    with pytest.raises(IdentityError, match=f"in {other.directory} since"):
        Ledger.open(spec)


def test_a_moved_directory_keeps_its_sweep_and_a_copy_does_not(spec: SweepSpec, tmp_path: Path):
    begin(spec)
    moved = spec_in(tmp_path / "moved", f"ledger={spec.ledger}")
    shutil.copytree(spec.directory, moved.directory)
    with pytest.raises(IdentityError, match=f"in {spec.directory} since"):
        Ledger.open(moved)
    with pytest.raises(UsageError, match=f"goes on in {spec.directory}, on"):
        Steering(moved.directory).request("budget", {"completions": 10**9})
    Steering(spec.directory).request("budget", {"completions": 10**9})
    shutil.rmtree(spec.directory)
    with Ledger.open(moved) as ledger:
        assert len(ledger.get_records()) == 3
        assert ledger.study.user_attrs["sweep_origin"]["place"] == str(moved.directory)


def test_a_copy_on_a_shared_disk_is_known_from_every_machine(
    spec: SweepSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """cp(1) with -a copies `.sweep` too."""
    begin(spec)
    copy = spec_in(tmp_path / "copy", f"ledger={spec.ledger}")
    shutil.copytree(spec.directory, copy.directory)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with pytest.raises(IdentityError, match=f"in {spec.directory} since"):
        Ledger.open(copy)
    Ledger.open(spec).close()


def test_a_directory_is_named_through_a_link_too(spec: SweepSpec, tmp_path: Path):
    begin(spec)
    other = spec_in(tmp_path / "other", f"ledger={spec.ledger}")
    (tmp_path / "link").symlink_to(spec.directory)
    with pytest.raises(UsageError, match="--fresh begins anew: write one of them"):
        Ledger.open(other, continue_from=str(tmp_path / "link"), fresh=True)
    with Ledger.open(other, continue_from=f"{tmp_path / 'link'}/") as ledger:
        assert len(ledger.get_records()) == 3


def test_a_damaged_id_is_no_traceback(spec: SweepSpec):
    begin(spec)
    id_file = spec.directory / ".sweep"
    id_file.write_text(id_file.read_text() + "\n")  # as an editor leaves it
    Ledger.open(spec).close()
    id_file.write_bytes(b"\xff\x00")
    Ledger.open(spec).close()
    assert len(id_file.read_text()) == 32


def test_an_address_is_the_same_sweep_on_every_machine(
    spec: SweepSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stored = spec.model_copy(update={"storage": "memory://bucket/origins"})
    for machine in ("a", "b"):
        monkeypatch.setenv("GDPO_TUNE_CACHE", str(tmp_path / machine))
        monkeypatch.setattr(socket, "gethostname", lambda machine=machine: machine)
        with Ledger.open(stored) as ledger:
            assert ledger.study.user_attrs["sweep_origin"]["host"] == "a"
            SweepStore(stored).write_spec()
            write_checkpoint(tmp_path / "checkpoint", 2, Cost(2), lambda _: None)
    with pytest.raises(IdentityError, match="in memory://bucket/origins/sweep since"):
        Ledger.open(spec)
    Ledger.open(spec, continue_from="memory://bucket/origins/sweep").close()
    for options in ({"continue_from": str(spec.directory)}, {}):
        Ledger.open(stored, **options).close()  # and back


def test_a_ledger_without_an_origin_is_adopted_by_its_own_directory(
    spec: SweepSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Earlier versions recorded none."""
    with monkeypatch.context() as earlier:
        earlier.setattr("gdpo_tune.ledger.ledger.record_origin", lambda *_: None)
        with Ledger.open(spec) as ledger:
            write_trials(ledger)
    other = spec_in(tmp_path / "other", f"ledger={spec.ledger}")
    with pytest.raises(IdentityError, match="is the sweep of another directory"):
        Ledger.open(other)
    with Ledger.open(spec) as ledger:
        assert ledger.study.user_attrs["sweep_origin"]["place"] == str(spec.directory)


def test_files_out_of_reach_are_said_to_be_elsewhere(
    spec: SweepSpec, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    begin(spec)
    shutil.rmtree(spec.directory)
    other = spec_in(tmp_path / "other", f"ledger={spec.ledger}")
    Ledger.open(other, continue_from=str(spec.directory)).close()
    assert f"stay elsewhere: {spec.directory} on" in capfd.readouterr().err
