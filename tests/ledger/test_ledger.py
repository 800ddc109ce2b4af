"""Records of the ledger, recovery after a crash, and the right to write."""

import errno
import fcntl
import json
import math
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from gdpo_tune.core.errors import IdentityError, LedgerHeldError, NonFiniteError, UsageError
from gdpo_tune.core.locks import LOCK, is_locked
from gdpo_tune.core.trials import Cost, Estimate, Rung
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.journal import Journal, truncate_torn_write
from gdpo_tune.results.open_sweep import read_sweep
from gdpo_tune.tuning import runner
from tests.support.tuning import build_measurement, build_outcome, load_code_spec


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path)


@pytest.fixture
def ledger(spec):
    """A ledger that is open for writing."""
    with Ledger.open(spec) as ledger:
        yield ledger


@pytest.fixture
def journal(spec):
    return spec.directory / "ledger.journal"


def start(ledger, **params):
    complete = {**ledger.spec.space.complete_baseline({}), **params}
    return ledger.start(complete, "search", "model", seed=7)


def reopened(spec):
    with Ledger.open(spec) as ledger:
        return ledger.get_records()


def set_attribute(ledger, key, value):
    """Write an attribute of the first trial as another version would."""
    study = ledger.study
    study._storage.set_trial_user_attr(study.trials[0]._trial_id, key, value)


def test_the_records_of_many_trials_take_few_reads_of_the_journal(spec, ledger):
    for _ in range(20):
        start(ledger)
    read = patch.object(Journal, "read_logs", autospec=True, side_effect=Journal.read_logs)
    with Ledger.open(spec, read_only=True) as reader, read as reads:
        assert len(reader.get_records()) == 20
        assert reads.call_count <= 5
        reads.reset_mock()
        assert len(reader.take_snapshot().records) == 20
        assert reads.call_count <= 10


def test_a_trial_reads_back_as_it_was_recorded(spec, ledger):
    params = ledger.spec.space.complete_baseline({"normalization": "grpo"})
    ledger.start(params, "search", "enqueued", seed=11)
    replicate = ledger.start(params, "replicate", "replicate", seed=12, replicate_of=0)
    done = ledger.complete(0, build_outcome(0.6, test_shift=0.05))
    written = ledger.get_records()
    ledger.close()
    assert reopened(spec) == written
    assert (done.state, done.seed, done.proposer) == ("complete", 11, "enqueued")
    assert done.params == params
    assert done.validation["correctness"].mean == 0.6
    assert done.test["correctness"].mean == pytest.approx(0.65)
    assert done.cost == Cost(640, 2.0, 1.5)
    assert done.environment == {"sandbox": "test"}
    assert (replicate.role, replicate.replicate_of, replicate.state) == ("replicate", 0, "running")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_no_rung_and_a_failure(spec, ledger, value):
    start(ledger)
    with pytest.raises(NonFiniteError, match=f"validation format is {value} at step 20"):
        ledger.record_rung(0, build_measurement(20, correctness=0.5, format=value))
    record = ledger.complete(0, build_outcome(format=value))
    ledger.close()
    assert (record.state, record.rungs) == ("failed", ())
    assert record.reason == f"validation format is {value}"
    assert reopened(spec) == [record]


def test_a_failure_keeps_its_reason_and_its_cost_or_that_of_its_last_rung(spec, ledger):
    spent = Cost(completions=1920, seconds=3.0)
    for _ in range(2):
        start(ledger)
    ledger.fail(0, "loss is nan at step 3", Cost(192, 1.0, 0.5))
    ledger.record_rung(1, build_measurement(30, spent, format=0.5))
    ledger.close()
    with Ledger.open(spec) as again:
        assert again.fail(1, "the trial's process died").cost == spent
        record = again.get_record(0)
    assert (record.state, record.reason) == ("failed", "loss is nan at step 3")
    assert record.cost.completions == 192


def test_a_reason_holds_nothing_that_no_file_or_terminal_takes(ledger):
    start(ledger)
    assert ledger.fail(0, "caf\u00e9: \ud800\x1b[31m\nline").reason == "caf\u00e9: ??[31m\nline"


def test_a_trial_with_a_reused_number_starts_in_an_empty_directory(spec, ledger, journal):
    start(ledger)
    before = journal.stat().st_size
    start(ledger)
    for number in (0, 1):
        (ledger.get_trial_directory(number) / "checkpoint-20").mkdir(parents=True)
    ledger.close()
    os.truncate(journal, before + 10)
    with Ledger.open(spec) as again:
        assert start(again, learning_rate=1e-4).number == 1
        assert not again.get_trial_directory(1).exists()
        assert (again.get_trial_directory(0) / "checkpoint-20").exists()


@pytest.mark.parametrize("fault", ["short", "full"])
def test_a_failed_write_leaves_the_ledger_as_it_was(spec, ledger, journal, fault):
    """write(2): a disk with some room takes a part, and refuses the next write with its reason."""
    write, calls = os.write, []

    def refuse(file, data):
        calls.append(write(file, data[:7]))
        if fault == "full" or len(calls) > 1:
            raise OSError(errno.ENOSPC, "no space left on device")
        return calls[-1]

    start(ledger)
    before = journal.read_bytes()
    with patch.object(os, "write", refuse), pytest.raises(OSError, match="no space"):
        ledger.fail(0, "broken")
    assert journal.read_bytes() == before
    ledger.complete(0, build_outcome())  # there is room again
    ledger.close()
    assert [record.state for record in reopened(spec)] == ["complete"]


COST = Cost(64, 1.0, 1.0)


@pytest.mark.parametrize(
    "end",
    [
        lambda ledger: ledger.complete(0, build_outcome()),
        lambda ledger: ledger.prune(0, "dominated", COST),
        lambda ledger: ledger.fail(0, "crashed", COST),
    ],
    ids=["complete", "prune", "fail"],
)
def test_the_end_of_a_trial_waits_for_the_disk_once(ledger, journal, monkeypatch, end):
    waits = []
    start(ledger)
    before = journal.read_bytes().count(b"\n")
    monkeypatch.setattr(os, "fsync", lambda _: waits.append(journal.read_bytes().count(b"\n")))
    end(ledger)
    assert waits == [journal.read_bytes().count(b"\n")]
    assert waits[0] >= before + 2
    start(ledger)  # outside of a batch
    assert len(waits) == 2


def test_rungs_read_back_in_order_with_their_standard_errors_and_the_first_one_stays(spec, ledger):
    spent = Cost(completions=1280, seconds=2.0, cpu_seconds=1.0)
    began = time.time()
    start(ledger)
    assert ledger.record_rung(0, build_measurement(30, format=0.6, correctness=0.3))
    assert ledger.get_record(0).cost.completions == 64 * 30, "what a running trial has used"
    ledger.record_rung(0, build_measurement(20, spent, se=0.02, format=0.5, correctness=0.25))
    assert not ledger.record_rung(0, build_measurement(20, spent, format=0.9))
    record = ledger.get_record(0)
    ledger.close()
    written, (read,) = record.rungs, reopened(spec)
    assert read.rungs == written
    assert read.cost.completions == 64 * 30
    assert [rung.recorded for rung in read.rungs] == [rung.recorded for rung in written]
    assert began <= written[1].recorded <= time.time()
    assert [rung.completions for rung in written] == [1280, 1920]
    estimates = {"format": Estimate(0.5, 0.02), "correctness": Estimate(0.25, 0.02)}
    assert written[0] == Rung(20, estimates, spent)


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("missing", ["validation", "time", "group_size"])
def test_a_ledger_of_another_version_is_refused(spec, ledger, journal, missing, read_only):
    start(ledger)
    ledger.record_rung(0, build_measurement(20, format=0.5))
    for key in ("rung:1280", "trial"):
        stored = json.loads(json.dumps(ledger.study.trials[0].user_attrs[key]))
        for part in (stored, stored.get("params", {})):
            part.pop(missing, None)
        set_attribute(ledger, key, stored)
    ledger.close()
    with pytest.raises(UsageError) as caught:
        Ledger.open(spec, read_only=read_only)
    assert str(caught.value) == (
        f"{journal}: another version of gdpo_tune wrote this ledger "
        f"('{missing}' is missing); move the sweep aside with --fresh, or choose another --name"
    )
    with Ledger.open(spec, fresh=True) as fresh:
        assert fresh.get_records() == []


def test_a_paused_trial_waits_until_it_is_resumed(spec, ledger):
    start(ledger)
    start(ledger)
    ledger.record_rung(0, build_measurement(20, format=0.5))
    assert ledger.pause(0).state == "paused"
    assert ledger.get_record(0).paused_at == 1280
    ledger.close()
    assert [record.state for record in reopened(spec)] == ["paused", "running"]
    with Ledger.open(spec) as again:
        assert again.resume(0).state == "running"
        assert again.get_record(0).paused_at == 1280
        again.record_rung(0, build_measurement(30, format=0.5))
        assert again.pause(0).paused_at == 1920
        assert again.prune(0, "never promoted", Cost(640)).state == "pruned"


def test_no_write_reads_all_trials(spec, ledger):
    start(ledger)
    storage = ledger.study._storage
    with patch.object(storage, "get_all_trials", side_effect=AssertionError("all were listed")):
        start(ledger)
        start(ledger)
        ledger.record_rung(0, build_measurement(20, format=0.5))
        ledger.pause(0)
        ledger.resume(0)
        ledger.complete(0, build_outcome())
        ledger.prune(1, "dominated", Cost(640))
        ledger.fail(2, "broken")
        states = [record.state for record in ledger.get_records()]
    ledger.close()
    assert states == [record.state for record in reopened(spec)] == ["complete", "pruned", "failed"]


def test_repeated_strings_are_in_memory_once(ledger):
    first, second = (dict(start(ledger, normalization="grpo").params) for _ in range(2))
    for name, other in zip(first, second, strict=True):
        assert name is other
    assert first["normalization"] is second["normalization"]


def test_another_identity_under_the_same_name_is_refused(spec, ledger, tmp_path):
    ledger.close()
    with pytest.raises(IdentityError) as caught:
        Ledger.open(load_code_spec(tmp_path, ["training.steps=61", "space.group_size=8"]))
    assert str(caught.value).splitlines() == [
        f"{spec.directory} holds another sweep: space.group_size = [4, 8], not 8; "
        "training.steps = 60, not 61",
        "    fix: choose another --name, or --fresh to move that one aside",
    ]
    changed = ["steps=61", "length_limit=20", "test_prompts=9", "validation_prompts=9"]
    overrides = ["sandbox.cpu_seconds=2", *(f"training.{setting}" for setting in changed)]
    with pytest.raises(IdentityError, match=r"steps = 60, not 61; .*; 1 more\n"):
        Ledger.open(load_code_spec(tmp_path, overrides))
    assert reopened(spec) == []  # the refusals released the lease


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("task: [")])
def test_another_identity_is_refused_without_a_readable_spec_file(damage, spec, ledger, tmp_path):
    ledger.close()
    damage(spec.directory / "spec.yaml")
    with pytest.raises(IdentityError, match=r"another task, policy.*\n.*--name"):
        Ledger.open(load_code_spec(tmp_path, ["training.steps=61"]))


def test_a_password_in_an_address_is_no_difference(tmp_path):
    spec = load_code_spec(tmp_path, ["tracking.uri=http://me:secret@host", "training.steps=61"])
    Ledger.open(spec).close()
    with pytest.raises(IdentityError) as caught:
        Ledger.open(load_code_spec(tmp_path))
    assert "secret" not in str(caught.value)


def test_fresh_moves_the_whole_old_sweep_aside(spec, ledger, journal):
    start(ledger)
    ledger.close()
    before = journal.read_bytes()
    for generation in (1, 2):  # twice within a second: names must not collide
        with Ledger.open(spec, fresh=True) as fresh:
            assert fresh.get_records() == []
            assert (fresh.moved_aside / "ledger.journal").exists()
        aside = [path for path in spec.output_directory.iterdir() if path != spec.directory]
        assert len(aside) == generation
        (spec.directory / "spec.yaml").unlink()  # a ledger alone is a sweep too
    with Ledger.open(spec) as again:
        assert again.moved_aside is None
    assert before in [(path / "ledger.journal").read_bytes() for path in aside]


def raise_error(number):
    """Return a function that raises an error of the system."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("name", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_a_disk_without_locks_is_named_with_the_way_out(spec, monkeypatch, name):
    """Errors of flock(2); Lustre without `-o flock` gives ENOSYS (mount.lustre(8))."""
    without = rf"{spec.directory}: this file system has no locks(.|\n)*another disk"
    with monkeypatch.context() as lustre:
        lustre.setattr(fcntl, "flock", raise_error(getattr(errno, name)))
        with pytest.raises(UsageError, match=without):
            Ledger.open(spec)
        assert not is_locked(spec.directory / LOCK)
    assert not is_locked(spec.directory / LOCK)
    assert reopened(spec) == []


def test_another_error_of_a_lock_stays_what_it_is(spec, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", raise_error(errno.EIO))
    with pytest.raises(UsageError, match=r"cannot be kept in .*Input/output error"):
        Ledger.open(spec)


def test_fresh_on_a_mount_point_says_so(spec, ledger, monkeypatch):
    """rename(2): EBUSY for a mount point."""
    start(ledger)
    ledger.close()
    with monkeypatch.context() as mounted:
        mounted.setattr(Path, "rename", raise_error(errno.EBUSY))
        mounted.setattr(os.path, "ismount", lambda path: path == spec.directory)
        with pytest.raises(UsageError, match=f"cannot move {spec.directory} aside: a mount point"):
            Ledger.open(spec, fresh=True)
    assert len(reopened(spec)) == 1  # nothing was lost, and the lease is free


def test_a_lease_on_a_directory_that_was_moved_aside_is_taken_again(spec, monkeypatch):
    """The last holder moves the directory between our opening of the file and our lock."""
    lock, aside = fcntl.flock, spec.output_directory / "aside"

    def move_and_lock(file, operation):
        if not aside.exists():
            spec.directory.rename(aside)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", move_and_lock)
    with Ledger.open(spec) as ledger:
        start(ledger)
        with pytest.raises(LedgerHeldError):
            Ledger.open(spec)
    assert not (aside / "ledger.journal").exists()
    assert [record.state for record in reopened(spec)] == ["running"]


def test_a_directory_that_cannot_hold_a_sweep_is_refused_with_a_fix(spec, journal, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file.*--set storage="):
        Ledger.open(load_code_spec(tmp_path / "file" / "runs"))
    journal.mkdir(parents=True)
    for read_only in (True, False):
        with pytest.raises(UsageError, match=r"directory.*--set storage="):
            Ledger.open(spec, read_only=read_only)
    journal.rmdir()
    assert reopened(spec) == []  # the refusals released the lease


@pytest.mark.parametrize(
    ("override", "umask", "mode"),
    [
        ("search.seed=1", 0o022, 0o644),
        ("search.seed=1", 0o077, 0o600),
        ("tracking.uri=http://host:5000", 0o022, 0o644),
        ("tracking.uri=http://me:secret@host:5000", 0o022, 0o600),
    ],
)
def test_a_resolved_spec_with_a_password_is_private(override, umask, mode, tmp_path):
    spec = load_code_spec(tmp_path, [override])
    before = os.umask(umask)
    try:
        Ledger.open(spec).close()
    finally:
        os.umask(before)
    assert (spec.directory / "spec.yaml").stat().st_mode & 0o777 == mode


def test_a_reader_works_beside_the_writer(spec, ledger):
    start(ledger)
    with Ledger.open(spec, read_only=True) as reader:
        assert [record.state for record in reader.get_records()] == ["running"]
        ledger.complete(0, build_outcome())
        assert [record.state for record in reader.get_records()] == ["complete"]


def test_a_reader_creates_nothing(spec):
    with pytest.raises(UsageError, match="no sweep"):
        Ledger.open(spec, read_only=True)
    assert not spec.directory.exists()


def hold(spec, held):
    with Ledger.open(spec) as ledger:
        start(ledger)
        held.set()
        time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12
def test_a_second_writer_is_refused_and_a_killed_one_leaves_no_lock_behind(spec):
    processes = multiprocessing.get_context("fork")
    held = processes.Event()
    holder = processes.Process(target=hold, args=(spec, held))
    holder.start()
    assert held.wait(60)
    with pytest.raises(LedgerHeldError, match=f"process {holder.pid} on "):
        Ledger.open(spec)
    holder.kill()
    holder.join()
    assert [record.state for record in reopened(spec)] == ["running"]


def test_a_ledger_cut_in_its_last_two_records_opens_with_every_complete_one(spec, ledger, journal):
    start(ledger)
    ledger.complete(0, build_outcome())
    start(ledger)
    ledger.fail(1, "broken")
    first = ledger.get_record(0)
    ledger.close()
    content = journal.read_bytes()
    last = content.rfind(b"\n", 0, -1) + 1
    second_last = content.rfind(b"\n", 0, last - 1) + 1
    for cut in range(second_last, len(content)):  # by itself, at any byte
        journal.write_bytes(content[:cut])
        kept = last if cut >= last else second_last
        assert truncate_torn_write(journal) == cut - kept
        assert journal.read_bytes() == content[:kept]
    for cut in (second_last, second_last + 9, last - 1, last, last + 9, len(content) - 1):
        journal.write_bytes(content[:cut])
        with Ledger.open(spec) as again:
            records = again.get_records()
            assert records[0] == first
            # the end is written before the state: once it is there, the trial has ended
            assert records[1].state == ("running" if cut < last else "failed")
            start(again)
        assert [record.number for record in reopened(spec)] == [0, 1, 2]


def test_a_ledger_cut_in_a_completion_completes_the_trial_or_runs_it_again(spec, ledger, journal):
    start(ledger)
    before = journal.stat().st_size
    done = ledger.complete(0, build_outcome())
    ledger.close()
    content = journal.read_bytes()
    outcome_end = content.index(b"\n", before) + 1
    ends = [n + 1 for n, byte in enumerate(content) if byte == 10 and n > before]
    for cut in sorted({before, *ends, *(end - 1 for end in ends)} - {len(content)}):
        journal.write_bytes(content[:cut])
        (record,) = reopened(spec)
        assert record.state == ("complete" if cut >= outcome_end else "running")
        assert record.validation == (done.validation if cut >= outcome_end else {})


@pytest.mark.parametrize("tail", [b"", b"\0" * 64, b"\0\n", b'{"op_code": 5', b"]\n", b"7\n"])
def test_repair_drops_torn_records_at_the_end(tmp_path, tail):
    journal, whole = tmp_path / "journal", b'{"op_code": 0}\n{"op_code": 1}\n'
    journal.write_bytes(whole + tail)
    assert truncate_torn_write(journal) == len(tail)
    assert journal.read_bytes() == whole


LINES = {line: b"\n" + line + b"\n" for line in (b"\0\0", b"{}", b"", b"7", b"\xff", b"garb\rage")}
NOT_A_RECORD = "ledger.journal:2: this line is not a record.*--fresh"
NOT_REPLAYED = "ledger.journal: Optuna cannot replay .* --fresh"


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((lambda a, b, line=line: a + line + b, NOT_A_RECORD) for line in LINES.values()),
        (lambda a, b: b, r"ledger.journal: its first record.* is gone.*--fresh"),
        (lambda a, b: a + b"\n" + b + b'{"op_code": 99, "worker_id": "w"}\n', NOT_REPLAYED),
        (lambda a, b: a + b"\n" + b + b'{"op_code": 4}\n', NOT_REPLAYED),
    ],
    ids=[*map(repr, LINES), "first", "unknown code", "other keys"],
)
def test_damage_is_refused_and_left_as_it_is(spec, ledger, journal, damage, message, read_only):
    start(ledger)
    start(ledger)
    ledger.close()
    whole = journal.read_bytes()
    journal.write_bytes(damaged := damage(*whole.split(b"\n", 1)))
    with pytest.raises(UsageError, match=message):
        Ledger.open(spec, read_only=read_only)
    assert journal.read_bytes() == damaged
    journal.write_bytes(whole)
    assert len(reopened(spec)) == 2  # the refusal released the lease


def test_opening_a_ledger_reads_each_record_once(spec, ledger, journal, monkeypatch):
    for number in range(10):
        start(ledger)
        ledger.complete(number, build_outcome())
    ledger.close()
    lines, decoded = journal.read_bytes().count(b"\n"), []
    decode = json.JSONDecoder.decode
    monkeypatch.setattr(
        json.JSONDecoder, "decode", lambda self, line: decoded.append(line) or decode(self, line)
    )
    assert len(reopened(spec)) == 10
    records = [line for line in decoded if '"op_code"' in line]
    assert len(records) == lines + 1  # the last one twice: a crash may have torn it


def test_a_sweep_that_died_while_it_was_created_opens(spec, ledger, journal):
    ledger.close()
    first_record = journal.read_bytes().index(b"\n") + 1
    for cut in (0, 3, first_record, first_record + 5):
        os.truncate(journal, cut)
        assert reopened(spec) == []
        with pytest.raises(IdentityError):
            Ledger.open(load_code_spec(spec.storage, ["training.steps=61"]))


def test_a_moved_sweep_finds_its_checkpoints(spec, ledger, tmp_path):
    start(ledger)
    policy = ledger.get_trial_directory(0) / "checkpoint-60"
    policy.mkdir(parents=True)
    ledger.complete(0, replace(build_outcome(), checkpoint=policy))
    ledger.close()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    spec.directory.rename(elsewhere / "sweep")
    (record,) = reopened(load_code_spec(elsewhere))
    assert record.checkpoint == elsewhere / "sweep" / "trials" / "0" / "checkpoint-60"


def test_sessions_record_when_and_where_the_sweep_ran(spec, ledger):
    session = ledger.begin_session(time.time(), 2, {"git": "abc"})
    ledger.end_session(session, "all was tried")
    ledger.begin_session(time.time(), 3, {"git": "def"})
    with Ledger.open(spec, read_only=True) as reader:
        first, second = reader.get_sessions()
    assert (first["slots"], first["provenance"], second["slots"]) == (2, {"git": "abc"}, 3)
    assert first["finished"] >= first["started"]
    assert first["ending"] == "all was tried"
    assert "finished" not in second  # it was killed


def test_a_killed_session_that_is_found_finished_has_the_ending_of_the_runner(
    spec, ledger, monkeypatch
):
    monkeypatch.setattr(runner, "check_resources", lambda spec: None)
    monkeypatch.setattr(runner, "is_finished", lambda *_: True)
    monkeypatch.setattr(runner, "explain_end", lambda *_: "all was tried")
    ledger.begin_session(time.time(), 2, {})
    hours = ledger.compute_hours()
    ledger.close()
    assert runner.run_sweep(spec).reason == "all was tried"
    assert runner.run_sweep(spec).sessions[-1]["ending"] == "all was tried"
    with Ledger.open(spec, read_only=True) as reader:
        assert reader.compute_hours() == hours
        assert read_sweep(spec.location, "x").ending == "all was tried"
