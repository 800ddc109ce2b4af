"""Records of the ledger, recovery after a crash, and the right to write."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import multiprocessing
import os
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial

from gdpo_tune.core.errors import IdentityError, LedgerHeldError, NonFiniteError, UsageError
from gdpo_tune.core.locks import LOCK, is_locked
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.journal import Journal, truncate_torn_write
from gdpo_tune.ledger.trial_encoding import encode_outcome
from gdpo_tune.results.open_sweep import read_sweep
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning import runner
from tests.support.tuning import build_measurement, build_outcome, load_code_spec


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return load_code_spec(tmp_path)


def start(ledger: Ledger, **params: float | str) -> TrialRecord:
    complete = {**ledger.spec.space.complete_baseline({}), **params}
    return ledger.start(complete, "search", "model", seed=7)


def begin(spec: SweepSpec) -> None:
    with Ledger.open(spec) as ledger:
        start(ledger)


def reopened(spec: SweepSpec) -> list[TrialRecord]:
    with Ledger.open(spec) as ledger:
        return ledger.get_records()


def test_the_records_of_many_trials_take_few_reads_of_the_journal(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch
):
    with Ledger.open(spec) as ledger:
        for _ in range(20):
            start(ledger)
    reads: list[int] = []
    read_logs = Journal.read_logs

    def count_reads(self: Journal, log_number_from: int):
        reads.append(log_number_from)
        return read_logs(self, log_number_from)

    monkeypatch.setattr("gdpo_tune.ledger.journal.Journal.read_logs", count_reads)
    with Ledger.open(spec, read_only=True) as ledger:
        reads.clear()
        assert len(ledger.get_records()) == 20
        assert len(reads) <= 5
        reads.clear()
        assert len(ledger.take_snapshot().records) == 20
        assert len(reads) <= 10


def test_a_trial_reads_back_as_it_was_recorded(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        params = ledger.spec.space.complete_baseline({"normalization": "grpo"})
        ledger.start(params, "search", "enqueued", seed=11)
        replicate = ledger.start(params, "replicate", "replicate", seed=12, replicate_of=0)
        done = ledger.complete(0, build_outcome(0.6, test_shift=0.05))
        written = ledger.get_records()
    assert reopened(spec) == written
    assert (done.state, done.seed, done.proposer, done.params) == (
        "complete",
        11,
        "enqueued",
        params,
    )
    assert done.validation["correctness"].mean == 0.6
    assert done.test["correctness"].mean == pytest.approx(0.65)
    assert done.cost == Cost(640, 2.0, 1.5)
    assert done.environment == {"sandbox": "test"}
    assert (replicate.role, replicate.replicate_of, replicate.state) == ("replicate", 0, "running")


def test_the_study_holds_validation_values_in_the_order_of_the_objectives(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        start(ledger)
        ledger.complete(0, build_outcome(0.1, 0.2, 0.3, test_shift=0.5))
        assert ledger.study.trials[0].values == [0.1, 0.2, 0.3]
        assert [direction.name for direction in ledger.study.directions] == ["MAXIMIZE"] * 3


@pytest.mark.parametrize(("correctness", "feasible"), [(0.2, True), (0.19, False)])
def test_every_complete_trial_carries_its_constraints(
    spec: SweepSpec, correctness: float, feasible: bool
):
    with Ledger.open(spec) as ledger:
        start(ledger)
        record = ledger.complete(0, build_outcome(correctness))
        assert record.feasible is feasible
        assert ledger.study.trials[0].constraints["correctness"] == pytest.approx(0.2 - correctness)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_no_rung_and_a_failure(spec: SweepSpec, value: float):
    with Ledger.open(spec) as ledger:
        start(ledger)
        with pytest.raises(NonFiniteError, match=f"validation format is {value} at step 20"):
            ledger.record_rung(0, build_measurement(20, correctness=0.5, format=value))
        record = ledger.complete(0, build_outcome(format=value))
    assert (record.state, record.rungs) == ("failed", ())
    assert record.reason == f"validation format is {value}"
    assert reopened(spec) == [record]


def test_a_failure_keeps_its_reason_and_its_cost_or_that_of_its_last_rung(spec: SweepSpec):
    spent = Cost(completions=1920, seconds=3.0)
    with Ledger.open(spec) as ledger:
        for _ in range(2):
            start(ledger)
        ledger.fail(0, "loss is nan at step 3", Cost(192, 1.0, 0.5))
        ledger.record_rung(1, build_measurement(30, spent, format=0.5))
    with Ledger.open(spec) as ledger:
        assert ledger.fail(1, "the trial's process died").cost == spent
        record = ledger.get_record(0)
    assert (record.state, record.reason) == ("failed", "loss is nan at step 3")
    assert record.cost.completions == 192


def test_a_trial_with_a_reused_number_starts_in_an_empty_directory(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        start(ledger)
        before = (spec.directory / "ledger.journal").stat().st_size
        start(ledger)
        for number in (0, 1):
            (ledger.get_trial_directory(number) / "checkpoint-20").mkdir(parents=True)
    os.truncate(spec.directory / "ledger.journal", before + 10)
    with Ledger.open(spec) as ledger:
        again = start(ledger, learning_rate=1e-4)
        assert again.number == 1
        assert not ledger.get_trial_directory(1).exists()
        assert (ledger.get_trial_directory(0) / "checkpoint-20").exists()


@pytest.mark.parametrize("fault", ["short", "full"])
def test_a_failed_write_leaves_the_ledger_as_it_was(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch, fault: str
):
    """write(2): a disk with some room takes a part, and refuses the next write with its reason."""
    write, calls = os.write, 0

    def refuse(file: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        written = write(file, data[:7])
        if fault == "full" or calls > 1:
            raise OSError(errno.ENOSPC, "no space left on device")
        return written

    with Ledger.open(spec) as ledger:
        start(ledger)
        before = (spec.directory / "ledger.journal").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", refuse)
            with pytest.raises(OSError, match="no space"):
                ledger.fail(0, "broken")
        assert (spec.directory / "ledger.journal").read_bytes() == before
        ledger.complete(0, build_outcome())  # there is room again
    assert [record.state for record in reopened(spec)] == ["complete"]


@pytest.mark.parametrize("ends", ["complete", "prune", "fail"])
def test_the_end_of_a_trial_waits_for_the_disk_once(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch, ends: str
):
    waits: list[int] = []
    cost = Cost(64, 1.0, 1.0)
    with Ledger.open(spec) as ledger:
        start(ledger)
        path = ledger.directory / "ledger.journal"
        before = path.read_bytes().count(b"\n")
        monkeypatch.setattr(os, "fsync", lambda _: waits.append(path.read_bytes().count(b"\n")))
        if ends == "complete":
            ledger.complete(0, build_outcome())
        elif ends == "prune":
            ledger.prune(0, "dominated", cost)
        else:
            ledger.fail(0, "crashed", cost)
        assert waits == [path.read_bytes().count(b"\n")]
        assert waits[0] >= before + 2
        start(ledger)  # outside of a batch
        assert len(waits) == 2


def test_a_running_trial_shows_its_cost_so_far(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        start(ledger)
        for step in (30, 60):
            cost = Cost(completions=64 * step, seconds=step / 10)
            ledger.record_rung(0, build_measurement(step, cost, format=0.5))
        assert ledger.get_record(0).cost.completions == 64 * 60


def test_rungs_read_back_with_their_standard_errors(spec: SweepSpec):
    spent = Cost(completions=1280, seconds=2.0, cpu_seconds=1.0)
    began = time.time()
    with Ledger.open(spec) as ledger:
        start(ledger)
        ledger.record_rung(0, build_measurement(30, format=0.6, correctness=0.3))
        ledger.record_rung(0, build_measurement(20, spent, se=0.02, format=0.5, correctness=0.25))
        written = ledger.get_record(0).rungs
    read = reopened(spec)[0].rungs
    assert read == written
    assert [rung.recorded for rung in read] == [rung.recorded for rung in written]
    assert written[1].recorded is not None
    assert began <= written[1].recorded <= time.time()
    assert [rung.completions for rung in written] == [1280, 1920]
    estimates = {"format": Estimate(0.5, 0.02), "correctness": Estimate(0.25, 0.02)}
    assert written[0] == Rung(20, estimates, spent)


def test_the_first_measurement_at_a_rung_stays(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        start(ledger)
        assert ledger.record_rung(0, build_measurement(20, format=0.5))
        assert not ledger.record_rung(0, build_measurement(20, format=0.9))
        assert ledger.get_record(0).rungs[0].validation["format"].mean == 0.5


def set_attribute(ledger: Ledger, key: str, value: object) -> None:
    """Write an attribute of the first trial as another version would."""
    study = ledger.study
    study._storage.set_trial_user_attr(study.trials[0]._trial_id, key, value)


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("missing", ["validation", "time"])
def test_a_ledger_with_rungs_of_an_older_version_is_refused(
    spec: SweepSpec, missing: str, read_only: bool
):
    with Ledger.open(spec) as ledger:
        start(ledger)
        ledger.record_rung(0, build_measurement(20, format=0.5))
        rung = dict(ledger.study.trials[0].user_attrs["rung:1280"])
        del rung[missing]
        set_attribute(ledger, "rung:1280", rung)
    with pytest.raises(UsageError) as caught:
        Ledger.open(spec, read_only=read_only)
    assert str(caught.value) == (
        f"{spec.directory / 'ledger.journal'}: another version of gdpo_tune wrote this ledger "
        f"('{missing}' is missing); move the sweep aside with --fresh, or choose another --name"
    )
    with Ledger.open(spec, fresh=True) as ledger:
        assert ledger.get_records() == []


def test_a_ledger_whose_trials_lack_a_parameter_is_refused(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        start(ledger)
        trial = dict(ledger.study.trials[0].user_attrs["trial"])
        params = {name: value for name, value in trial["params"].items() if name != "group_size"}
        set_attribute(ledger, "trial", {**trial, "params": params})
    with pytest.raises(
        UsageError, match=r"ledger.journal: another version .*'group_size' is missing"
    ):
        Ledger.open(spec)


def test_a_paused_trial_waits_until_it_is_resumed(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        start(ledger)
        start(ledger)
        ledger.record_rung(0, build_measurement(20, format=0.5))
        assert ledger.pause(0).state == "paused"
        assert ledger.get_record(0).paused_at == 1280
        assert [r.number for r in ledger.get_records() if r.state == "running"] == [1]
    assert [record.state for record in reopened(spec)] == ["paused", "running"]
    with Ledger.open(spec) as ledger:
        assert ledger.resume(0).state == "running"
        assert ledger.get_record(0).paused_at == 1280
        ledger.record_rung(0, build_measurement(30, format=0.5))
        assert ledger.pause(0).paused_at == 1920
        assert ledger.prune(0, "never promoted", Cost(640)).state == "pruned"


def test_no_write_reads_all_trials(spec: SweepSpec, monkeypatch: pytest.MonkeyPatch):
    with Ledger.open(spec) as ledger:
        start(ledger)

        def refuse(*_: object, **__: object) -> list[FrozenTrial]:
            raise AssertionError("all trials were listed")

        monkeypatch.setattr(ledger.study._storage, "get_all_trials", refuse)
        start(ledger)
        start(ledger)
        ledger.record_rung(0, build_measurement(20, format=0.5))
        ledger.pause(0)
        ledger.resume(0)
        ledger.complete(0, build_outcome())
        ledger.prune(1, "dominated", Cost(640))
        ledger.fail(2, "broken")
        states = [record.state for record in ledger.get_records()]
    monkeypatch.undo()
    assert states == [record.state for record in reopened(spec)] == ["complete", "pruned", "failed"]


def test_repeated_strings_are_in_memory_once(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        first, second = (dict(start(ledger, normalization="grpo").params) for _ in range(2))
    for name, other in zip(first, second, strict=True):
        assert name is other
    assert first["normalization"] is second["normalization"]


def test_optuna_parameters_are_the_searched_active_ones_inside_of_their_domain(tmp_path: Path):
    spec = load_code_spec(tmp_path, ["space.reward_weights.length={log: [0.05, 0.5]}"])
    with Ledger.open(spec) as ledger:
        start(ledger, **{"reward_weights.length": 1.0})
        params = ledger.study.trials[0].params
    assert set(params) == {"normalization", "group_size", "reward_weights.format", "learning_rate"}


def test_another_identity_under_the_same_name_is_refused(spec: SweepSpec, tmp_path: Path):
    Ledger.open(spec).close()
    with pytest.raises(IdentityError) as caught:
        Ledger.open(load_code_spec(tmp_path, ["training.steps=61", "space.group_size=8"]))
    assert str(caught.value).splitlines() == [
        f"{spec.directory} holds another sweep: space.group_size = [4, 8], not 8; "
        "training.steps = 60, not 61",
        "    fix: choose another --name, or --fresh to move that one aside",
    ]
    assert reopened(spec) == []  # the refusal released the lease


def test_the_message_lists_the_first_of_many_differences(spec: SweepSpec, tmp_path: Path):
    Ledger.open(spec).close()
    changed = ["steps=61", "length_limit=20", "test_prompts=9", "validation_prompts=9"]
    overrides = ["sandbox.cpu_seconds=2", *(f"training.{setting}" for setting in changed)]
    with pytest.raises(IdentityError, match=r"steps = 60, not 61; .*; 1 more\n"):
        Ledger.open(load_code_spec(tmp_path, overrides))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("task: [")])
def test_another_identity_is_refused_without_a_readable_spec_file(
    damage, spec: SweepSpec, tmp_path: Path
):
    Ledger.open(spec).close()
    damage(spec.directory / "spec.yaml")
    with pytest.raises(IdentityError, match=r"another task, policy.*\n.*--name"):
        Ledger.open(load_code_spec(tmp_path, ["training.steps=61"]))


def test_a_password_in_an_address_is_no_difference(tmp_path: Path):
    spec = load_code_spec(tmp_path, ["tracking.uri=http://me:secret@host", "training.steps=61"])
    Ledger.open(spec).close()
    with pytest.raises(IdentityError) as caught:
        Ledger.open(load_code_spec(tmp_path))
    assert "secret" not in str(caught.value)


def test_budget_and_constraints_may_change(spec: SweepSpec, tmp_path: Path):
    with Ledger.open(spec) as ledger:
        start(ledger)
        ledger.complete(0, build_outcome(0.25))
    stricter = load_code_spec(tmp_path, ["search.trials=40", "constraints.format='>= 0.6'"])
    (record,) = reopened(stricter)
    assert record.feasible is False


@pytest.mark.parametrize(("bound", "feasible"), [("<= 90", True), ("<= 1", False)])
def test_a_sweep_continues_with_a_new_constraint_on_a_cost(
    spec: SweepSpec, tmp_path: Path, bound: str, feasible: bool
):
    spent = Cost(completions=1280, seconds=1.5)
    with Ledger.open(spec) as ledger:
        for _ in range(3):
            start(ledger)
        ledger.record_rung(0, build_measurement(20, spent, format=0.5))
        ledger.complete(0, build_outcome())
        ledger.record_rung(1, build_measurement(20, spent, format=0.5))
        # As if killed before the trial had its new state.
        ended = encode_outcome(build_outcome(), spec.directory)
        trial_id = ledger.study.trials[2]._trial_id
        ledger.study._storage.set_trial_user_attr(trial_id, "outcome", ended)
    bounded = load_code_spec(tmp_path, [f"constraints.seconds='{bound}'"])
    with Ledger.open(bounded) as ledger:
        done, under_way, closed = ledger.get_records()
        assert ledger.study.trials[2].constraints["seconds"] == 2.0 - float(
            bound.removeprefix("<= ")
        )
    assert [r.state for r in (done, under_way, closed)] == ["complete", "running", "complete"]
    assert [done.feasible, under_way.feasible, closed.feasible] == [feasible, None, feasible]
    assert done.validation["seconds"] == done.test["seconds"] == Estimate(2.0, 0.0)
    assert not under_way.validation
    for rung in (*done.rungs, *under_way.rungs):
        assert rung.validation["seconds"] == Estimate(1.5, 0.0)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_new_constraint_on_a_missing_metric_is_not_met(
    spec: SweepSpec, tmp_path: Path, is_closed: bool
):
    with Ledger.open(spec) as ledger:
        start(ledger)
        if is_closed:
            ledger.complete(0, build_outcome())
        else:
            set_attribute(ledger, "outcome", encode_outcome(build_outcome(), spec.directory))
    (record,) = reopened(load_code_spec(tmp_path, ["constraints.bug_rate='<= 0.5'"]))
    assert (record.state, record.feasible) == ("complete", False)


def test_a_stored_cost_metric_does_not_change_with_the_resources(tmp_path: Path):
    judged = "constraints.gpu_hours='<= 1'"
    spent = Cost(completions=640, seconds=1800.0)
    with Ledger.open(load_code_spec(tmp_path, [judged, "resources.gpus=1"])) as ledger:
        start(ledger)
        ledger.record_rung(0, build_measurement(20, spent, format=0.5))
        ledger.complete(0, replace(build_outcome(), cost=spent))
    (record,) = reopened(load_code_spec(tmp_path, [judged, "resources.gpus=0.25"]))
    assert record.feasible
    assert record.validation["gpu_hours"] == record.rungs[0].validation["gpu_hours"]
    assert record.validation["gpu_hours"] == Estimate(0.5, 0.0)


def test_fresh_moves_the_whole_old_sweep_aside(spec: SweepSpec):
    begin(spec)
    before = (spec.directory / "ledger.journal").read_bytes()
    for generation in (1, 2):  # twice within a second: names must not collide
        with Ledger.open(spec, fresh=True) as ledger:
            assert ledger.get_records() == []
            assert ledger.moved_aside is not None
            assert (ledger.moved_aside / "ledger.journal").exists()
        aside = [path for path in spec.output_directory.iterdir() if path != spec.directory]
        assert len(aside) == generation
    with Ledger.open(spec) as ledger:
        assert ledger.moved_aside is None
    assert before in [(path / "ledger.journal").read_bytes() for path in aside]


def refuse_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("name", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_a_disk_without_locks_is_named_with_the_way_out(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Errors of flock(2); Lustre without `-o flock` gives ENOSYS (mount.lustre(8))."""
    with monkeypatch.context() as lustre:
        refuse_locks(lustre, getattr(errno, name))
        with pytest.raises(
            UsageError, match=rf"{spec.directory}: this file system has no locks(.|\n)*another disk"
        ):
            Ledger.open(spec)
        lock = spec.directory / LOCK
        assert not is_locked(lock)
    assert not is_locked(lock)
    assert reopened(spec) == []


def test_another_error_of_a_lock_stays_what_it_is(spec: SweepSpec, monkeypatch: pytest.MonkeyPatch):
    refuse_locks(monkeypatch, errno.EIO)
    with pytest.raises(UsageError, match=r"cannot be kept in .*Input/output error"):
        Ledger.open(spec)


def test_fresh_on_a_mount_point_says_so(spec: SweepSpec, monkeypatch: pytest.MonkeyPatch):
    """rename(2): EBUSY for a mount point."""
    with Ledger.open(spec) as ledger:
        start(ledger)

    def rename(path: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as mounted:
        mounted.setattr(Path, "rename", rename)
        mounted.setattr(os.path, "ismount", lambda path: path == spec.directory)
        with pytest.raises(UsageError, match=f"cannot move {spec.directory} aside: a mount point"):
            Ledger.open(spec, fresh=True)
    assert len(reopened(spec)) == 1  # nothing was lost, and the lease is free


def test_a_lease_on_a_directory_that_was_moved_aside_is_taken_again(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch
):
    """The last holder moves the directory between our opening of the file and our lock."""
    lock, aside = fcntl.flock, spec.output_directory / "aside"

    def move_and_lock(file: int, operation: int) -> None:
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


def test_a_directory_that_cannot_hold_a_sweep_is_refused_with_a_fix(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file.*--set storage="):
        Ledger.open(load_code_spec(tmp_path / "file" / "runs"))
    spec = load_code_spec(tmp_path)
    (spec.directory / "ledger.journal").mkdir(parents=True)
    for read_only in (True, False):
        with pytest.raises(UsageError, match=r"directory.*--set storage="):
            Ledger.open(spec, read_only=read_only)
    (spec.directory / "ledger.journal").rmdir()
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
def test_a_resolved_spec_with_a_password_is_private(
    override: str, umask: int, mode: int, tmp_path: Path
):
    spec = load_code_spec(tmp_path, [override])
    before = os.umask(umask)
    try:
        Ledger.open(spec).close()
    finally:
        os.umask(before)
    assert (spec.directory / "spec.yaml").stat().st_mode & 0o777 == mode


def test_a_reader_works_beside_the_writer(spec: SweepSpec):
    with Ledger.open(spec) as writer:
        start(writer)
        with Ledger.open(spec, read_only=True) as reader:
            assert [record.state for record in reader.get_records()] == ["running"]
            writer.complete(0, build_outcome())
            assert [record.state for record in reader.get_records()] == ["complete"]


def test_a_reader_creates_nothing(spec: SweepSpec):
    with pytest.raises(UsageError, match="no sweep"):
        Ledger.open(spec, read_only=True)
    assert not spec.directory.exists()


def test_a_second_writer_is_refused_with_the_name_of_the_first(spec: SweepSpec):
    with Ledger.open(spec), pytest.raises(LedgerHeldError, match=f"process {os.getpid()} on "):
        Ledger.open(spec)
    Ledger.open(spec).close()


def hold(spec: SweepSpec, held: Event) -> None:
    with Ledger.open(spec) as ledger:
        start(ledger)
        held.set()
        time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12
def test_a_killed_holder_leaves_no_lock_behind(spec: SweepSpec):
    processes = multiprocessing.get_context("fork")
    held = processes.Event()
    holder = processes.Process(target=hold, args=(spec, held))
    holder.start()
    assert held.wait(60)
    with pytest.raises(LedgerHeldError, match=f"process {holder.pid} "):
        Ledger.open(spec)
    holder.kill()
    holder.join()
    assert [record.state for record in reopened(spec)] == ["running"]


def test_a_ledger_cut_in_its_last_two_records_opens_with_every_complete_one(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        start(ledger)
        ledger.complete(0, build_outcome())
        start(ledger)
        ledger.fail(1, "broken")
        first = ledger.get_records()[0]
    journal = spec.directory / "ledger.journal"
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
        with Ledger.open(spec) as ledger:
            records = ledger.get_records()
            assert records[0] == first
            # the end is written before the state: once it is there, the trial has ended
            assert records[1].state == ("running" if cut < last else "failed")
            start(ledger)
        assert [record.number for record in reopened(spec)] == [0, 1, 2]


def test_a_ledger_cut_in_a_completion_completes_the_trial_or_runs_it_again(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        start(ledger)
        before = (spec.directory / "ledger.journal").stat().st_size
        done = ledger.complete(0, build_outcome())
    journal = spec.directory / "ledger.journal"
    content = journal.read_bytes()
    outcome_end = content.index(b"\n", before) + 1
    ends = [n + 1 for n, byte in enumerate(content) if byte == 10 and n > before]
    for cut in sorted({before, *ends, *(end - 1 for end in ends)} - {len(content)}):
        journal.write_bytes(content[:cut])
        (record,) = reopened(spec)
        assert record.state == ("complete" if cut >= outcome_end else "running")
        assert record.validation == (done.validation if cut >= outcome_end else {})


@pytest.mark.parametrize("tail", [b"", b"\0" * 64, b"\0\n", b'{"op_code": 5', b"]\n", b"7\n"])
def test_repair_drops_torn_records_at_the_end(tmp_path: Path, tail: bytes):
    journal = tmp_path / "journal"
    whole = b'{"op_code": 0}\n{"op_code": 1}\n'
    journal.write_bytes(whole + tail)
    assert truncate_torn_write(journal) == len(tail)
    assert journal.read_bytes() == whole


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("line", [b"\0\0", b"{}", b"", b"7", b"\xff", b"garb\rage"])
def test_damage_before_the_end_is_refused_with_its_line(
    spec: SweepSpec, line: bytes, read_only: bool
):
    with Ledger.open(spec) as ledger:
        start(ledger)
        start(ledger)
    journal = spec.directory / "ledger.journal"
    whole = journal.read_bytes()
    first, rest = whole.split(b"\n", 1)
    damaged = first + b"\n" + line + b"\n" + rest
    journal.write_bytes(damaged)
    with pytest.raises(UsageError, match=r"ledger.journal:2: this line is not a record.*--fresh"):
        Ledger.open(spec, read_only=read_only)
    assert journal.read_bytes() == damaged
    journal.write_bytes(whole)
    assert len(reopened(spec)) == 2  # the refusal released the lease


@pytest.mark.parametrize("read_only", [True, False])
def test_a_ledger_without_its_first_record_is_refused(spec: SweepSpec, read_only: bool):
    begin(spec)
    journal = spec.directory / "ledger.journal"
    rest = journal.read_bytes().split(b"\n", 1)[1]
    journal.write_bytes(rest)
    with pytest.raises(UsageError, match=r"ledger.journal: its first record.* is gone.*--fresh"):
        Ledger.open(spec, read_only=read_only)
    assert journal.read_bytes() == rest


def test_opening_a_ledger_reads_each_record_once(spec: SweepSpec, monkeypatch: pytest.MonkeyPatch):
    with Ledger.open(spec) as ledger:
        for number in range(10):
            start(ledger)
            ledger.complete(number, build_outcome())
    lines = (spec.directory / "ledger.journal").read_bytes().count(b"\n")
    decoded: list[str] = []
    decode = json.JSONDecoder.decode

    def counted(self: json.JSONDecoder, line: str) -> object:
        decoded.append(line)
        return decode(self, line)

    monkeypatch.setattr(json.JSONDecoder, "decode", counted)
    assert len(reopened(spec)) == 10
    records = [line for line in decoded if '"op_code"' in line]
    assert len(records) == lines + 1  # the last one twice: a crash may have torn it


def test_a_sweep_that_died_while_it_was_created_opens(spec: SweepSpec):
    Ledger.open(spec).close()
    journal = spec.directory / "ledger.journal"
    first_record = journal.read_bytes().index(b"\n") + 1
    for cut in (0, 3, first_record, first_record + 5):
        os.truncate(journal, cut)
        assert reopened(spec) == []
        with pytest.raises(IdentityError):
            Ledger.open(load_code_spec(spec.storage, ["training.steps=61"]))


def test_a_moved_sweep_finds_its_checkpoints(spec: SweepSpec, tmp_path: Path):
    with Ledger.open(spec) as ledger:
        start(ledger)
        policy = ledger.get_trial_directory(0) / "checkpoint-60"
        policy.mkdir(parents=True)
        ledger.complete(0, replace(build_outcome(), checkpoint=policy))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (spec.directory).rename(elsewhere / "sweep")
    (record,) = reopened(load_code_spec(elsewhere))
    assert record.checkpoint == elsewhere / "sweep" / "trials" / "0" / "checkpoint-60"


def test_sessions_record_when_and_where_the_sweep_ran(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        session = ledger.begin_session(time.time(), 2, {"git": "abc"})
        ledger.end_session(session, "all was tried")
        ledger.begin_session(time.time(), 3, {"git": "def"})
    with Ledger.open(spec, read_only=True) as ledger:
        first, second = ledger.get_sessions()
    assert (first["slots"], first["provenance"], second["slots"]) == (2, {"git": "abc"}, 3)
    assert first["finished"] >= first["started"]
    assert first["ending"] == "all was tried"
    assert "finished" not in second  # it was killed


def test_a_killed_session_that_is_found_finished_has_the_ending_of_the_runner(
    spec: SweepSpec, monkeypatch
):
    monkeypatch.setattr(runner, "check_resources", lambda spec: None)
    monkeypatch.setattr(runner, "is_finished", lambda *_: True)
    monkeypatch.setattr(runner, "explain_end", lambda *_: "all was tried")
    with Ledger.open(spec) as ledger:
        ledger.begin_session(time.time(), 2, {})
        hours = ledger.compute_hours()
    assert runner.run_sweep(spec).reason == "all was tried"
    assert runner.run_sweep(spec).sessions[-1]["ending"] == "all was tried"
    with Ledger.open(spec, read_only=True) as ledger:
        assert ledger.compute_hours() == hours
        assert read_sweep(spec.location, "x").ending == "all was tried"


def test_a_cost_that_an_objective_or_constraint_names_is_a_metric(tmp_path: Path):
    objective = "{direction: minimize, reference: 60}"
    spec = load_code_spec(
        tmp_path, [f"objectives.seconds={objective}", 'constraints.cpu_seconds="<= 1"']
    )
    with Ledger.open(spec) as ledger:
        start(ledger)
        halfway = Measurement(1, {}, Cost(64, 1.0, 0.5), build_outcome().validation)
        ledger.record_rung(0, halfway)
        ledger.complete(0, build_outcome())  # 2 s of wall time, 1.5 s of CPU time
        assert ledger.study.trials[0].values[-1] == 2.0
        assert ledger.study.trials[0].constraints["cpu_seconds"] == 0.5
    (record,) = reopened(spec)
    for estimates in (record.validation, record.test):
        assert (estimates["seconds"], estimates["cpu_seconds"]) == (
            Estimate(2, 0),
            Estimate(1.5, 0),
        )
        assert "gpu_hours" not in estimates
    assert record.feasible is False
    assert record.rungs[0].validation["seconds"] == Estimate(1.0, 0)


@pytest.mark.parametrize("record", ['{"op_code": 99, "worker_id": "w"}', '{"op_code": 4}'])
def test_records_that_optuna_cannot_replay_are_refused(spec: SweepSpec, record: str):
    begin(spec)
    journal = spec.directory / "ledger.journal"
    journal.write_text(journal.read_text() + record + "\n")
    for read_only in (True, False):
        with pytest.raises(UsageError, match=r"ledger.journal: Optuna cannot replay .* --fresh"):
            Ledger.open(spec, read_only=read_only)
