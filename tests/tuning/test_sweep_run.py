"""Whole sweeps on a real Ray, with the fake training and its faults."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import psutil
import pytest

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.errors import DiskFullError
from gdpo_tune.core.events import (
    Event,
    Outlook,
    SearchStarted,
    SweepFinished,
    SweepStarted,
    TrialFinished,
    TrialStarted,
)
from gdpo_tune.core.system import count_local_cpus
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.tuning.attempts import RETRIES
from gdpo_tune.tuning.ray import cluster
from gdpo_tune.tuning.runner import run_sweep
from tests.support.fake_training import list_executions
from tests.support.ray_sweeps import MARKS, SPACE, start_sweep, wait_until, write_faults
from tests.support.tuning import ENDS_ONLY

pytestmark = MARKS

TRAIN = "tests.support.fake_training:train"
SMALL = [
    *ENDS_ONLY,
    "search.sampler=random",
    "search.scheduler={type: fifo}",
    "training.steps=4",
    "search.replicates.max_runs=2",
]


def load_small_spec(directory: Path, *overrides: str) -> SweepSpec:
    return load_spec(SPACE, [f"storage={directory}", *SMALL, *overrides], "sweep")


def test_a_sweep_with_faults_runs_to_its_end_once_and_can_be_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = load_small_spec(tmp_path, "search.trials=6")
    write_faults(spec, t2="raise once", t3="nonfinite", t4="raise", t5="die once", t6="die")
    events: list[Event] = []
    result = run_sweep(spec, listeners=[events.append], train=TRAIN)
    records = {record.number: record for record in result.records}
    replicates = [record for record in result.records if record.role == "replicate"]

    assert not result.exit_status
    assert len(records) == 2 + 6 + len(replicates)
    assert 1 <= len(replicates) <= 2

    reasons = {number: r.reason for number, r in records.items() if r.state == "failed"}
    assert set(reasons) == {3, 4, 6}
    assert reasons[3] == "loss is nan at step 1"
    assert reasons[4] == "RuntimeError: broken at step 1"
    assert "process died" in reasons[6]
    assert "broken at step 1" in (spec.directory / "trials" / "4" / "error.txt").read_text()

    attempts = {n: list_executions(spec.directory, str(n)) for n in range(2, 7)}
    assert [a["from"] for a in attempts[2]] == [0, 1]  # a retry resumes from the checkpoint
    assert [a["from"] for a in attempts[5]] == [0, 1]
    assert len({a["pid"] for a in attempts[5]}) == 2
    assert (len(attempts[3]), len(attempts[4]), len(attempts[6])) == (1, 3, 3)

    kinds = [type(event) for event in events if not isinstance(event, Outlook)]
    assert (kinds[0], kinds[1], kinds[-1]) == (SweepStarted, SearchStarted, SweepFinished)
    assert kinds.count(TrialStarted) == kinds.count(TrialFinished) == len(records)

    front = build_front(result.records, spec.list_objectives())
    on_front = {number for member in front.members for number in member.numbers}
    with_checkpoint = {n for n, r in records.items() if r.checkpoint is not None}
    assert with_checkpoint == on_front
    for number in records:
        left = list((spec.directory / "trials" / str(number)).glob("checkpoint-*"))
        assert len(left) == (number in on_front)
    assert not (spec.directory / "ray").exists()

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "open_cluster", refuse_training)
        again = run_sweep(spec, train=TRAIN)
    assert again.records == result.records
    assert again.reason == result.reason == "all 6 configurations were tried"

    before = len(list_executions(spec.directory))
    write_faults(spec)
    larger = run_sweep(load_small_spec(tmp_path, "search.trials=7"), train=TRAIN)
    assert larger.records[: len(records)] == result.records
    new = larger.records[len(records) :]
    assert [record.role for record in new].count("search") == 1
    ran = list_executions(spec.directory)[before:]
    assert len(ran) == len(new)
    with Ledger.open(spec, read_only=True) as ledger:
        assert [set(s) for s in ledger.get_sessions()] == [
            {"started", "finished", "slots", "provenance", "sampler", "ending", "incidents"}
        ] * 2
        assert ledger.get_sessions()[-1]["ending"] == "all 7 configurations were tried"
        assert larger.reason == ledger.get_sessions()[-1]["ending"]


def refuse_training() -> None:
    raise AssertionError("a finished sweep starts nothing")


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["trial", "ledger"])
def test_a_full_disk_ends_the_sweep_which_then_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
):
    spec = load_small_spec(tmp_path, "search.trials=1", "search.replicates.max_runs=0")
    with monkeypatch.context() as patch:
        if writer == "trial":
            write_faults(spec, t1="full")
        else:
            patch.setattr(Ledger, "complete", raise_disk_full)
        with pytest.raises(DiskFullError, match=r"no space left for the \w+ in .* bytes free\n"):
            run_sweep(spec, train=TRAIN)
    write_faults(spec)
    with Ledger.open(spec, read_only=True) as ledger:
        assert "failed" not in {record.state for record in ledger.get_records()}
    result = run_sweep(spec, train=TRAIN)
    assert [record.state for record in result.records] == ["complete"] * 3


def raise_disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_replacing_a_process_that_has_grown_is_no_failure(tmp_path: Path):
    spec = load_small_spec(tmp_path, "search.trials=2", "search.replicates.max_runs=0")
    write_faults(spec, t0="grow", t1="grow", t2="grow", t3="raise")
    result = run_sweep(spec, train=TRAIN)
    assert [record.state for record in result.records] == ["complete"] * 3 + ["failed"]
    ran = list_executions(spec.directory)
    assert len({entry["pid"] for entry in ran}) == len(ran)
    assert len(list_executions(spec.directory, "3")) == 1 + RETRIES


def list_checkpoints(spec: SweepSpec, number: int) -> list[Path]:
    return list((spec.directory / "trials" / str(number)).glob("checkpoint-*"))


def test_a_killed_and_then_interrupted_sweep_ends_with_every_trial_once(tmp_path: Path):
    size = ["search.trials=3", "training.steps=12"]
    overrides = [f"storage={tmp_path}", *SMALL, *size]
    spec = load_small_spec(tmp_path, *size)
    write_faults(spec, t1="slow", t3="slow")
    with start_sweep(TRAIN, *overrides) as process:
        wait_until(
            lambda: len(list_checkpoints(spec, 1)) >= 2 and read_state(spec, 0) == "complete"
        )
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in children)
        process.send_signal(signal.SIGKILL)
        process.wait()

    write_faults(spec, t3="slow")
    begun = len(list_executions(spec.directory, "3"))
    with start_sweep(TRAIN, *overrides) as process:
        wait_until(lambda: len(list_executions(spec.directory, "3")) > begun)
        wait_until(lambda: read_state(spec, 1) == "complete")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        assert process.wait(timeout=120) == 130
    # of the killed run nothing is left: Ray's agents look after a while whether servers still live
    wait_until(lambda: not any(is_alive(child) for child in children), 100.0)
    with Ledger.open(spec) as ledger:
        states = {record.number: record.state for record in ledger.get_records()}
    assert (states[0], states[1], states[3]) == ("complete", "complete", "running")

    write_faults(spec)
    before = len(list_executions(spec.directory))
    larger = load_small_spec(tmp_path, "search.trials=6", "training.steps=12")
    result = run_sweep(larger, train=TRAIN)
    ran = list_executions(spec.directory)[before:]
    assert len({entry["pid"] for entry in ran}) <= count_local_cpus()  # warm actors
    assert {record.state for record in result.records} == {"complete"}
    assert [record.role for record in result.records].count("search") == 6
    resumed = [entry["from"] for entry in list_executions(spec.directory, "1")]
    assert len(resumed) == 2
    assert int(str(resumed[1])) >= 2  # from its newest checkpoint
    assert len(list_executions(spec.directory, "0")) == 1  # what was finished is not run again


def read_state(spec: SweepSpec, number: int) -> str:
    with Ledger.open(spec, read_only=True) as ledger:
        return {record.number: record.state for record in ledger.get_records()}[number]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
