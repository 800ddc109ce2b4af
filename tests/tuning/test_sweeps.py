"""Whole sweeps on a real Ray: faults, merges, halving, steering, starts, and several workers."""

import errno
import os
import signal
import time

import psutil
import pytest

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.errors import DiskFullError, UsageError
from gdpo_tune.core.events import (
    Outlook,
    SearchStarted,
    SweepFinished,
    SweepStarted,
    TrialFinished,
    TrialStarted,
)
from gdpo_tune.core.system import count_local_cpus
from gdpo_tune.core.trial_files import STEPS_FILE, read_steps
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.steering import Steering
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.first_trials import find_wide_step
from gdpo_tune.tuning import runner
from gdpo_tune.tuning.attempts import RETRIES
from gdpo_tune.tuning.halving import STOPPED
from gdpo_tune.tuning.ray import cluster
from gdpo_tune.tuning.runner import run_sweep
from tests.support.fake_training import list_executions
from tests.support.killed_sweeps import KilledSweep, wait_for_condition
from tests.support.ray_sweeps import MARKS, SPACE, start_sweep, wait_until, write_faults
from tests.support.tuning import ENDS_ONLY, is_asked_to_stop

pytestmark = MARKS
TRAIN = "tests.support.fake_training:train"
FIFO = ("search.sampler=random", "search.scheduler={type: fifo}")
SMALL = (*ENDS_ONLY, *FIFO, "training.steps=4", "search.replicates.max_runs=2")


def load(directory, *overrides):
    return load_spec(SPACE, [f"storage={directory}", *overrides], "sweep")


def get_directory(spec, number):
    return spec.directory / "trials" / str(number)


def list_checkpoints(spec, number):
    return {path.name for path in get_directory(spec, number).glob("checkpoint-*")}


def read_records(spec):
    with Ledger.open(spec, read_only=True) as ledger:
        return ledger.get_records()


def test_a_sweep_with_faults_runs_to_its_end_once_and_can_be_extended(tmp_path, monkeypatch):
    spec = load(tmp_path, *SMALL, "search.trials=6")
    write_faults(spec, t2="raise once", t3="nonfinite", t4="raise", t5="die once", t6="die")
    events = []
    result = run_sweep(spec, listeners=[events.append], train=TRAIN)
    records = result.records
    replicates = [record for record in records if record.role == "replicate"]

    assert not result.exit_status
    assert len(records) == 2 + 6 + len(replicates)
    assert 1 <= len(replicates) <= 2

    reasons = {r.number: r.reason for r in records if r.state == "failed"}
    assert set(reasons) == {3, 4, 6}
    assert reasons[3] == "loss is nan at step 1"
    assert reasons[4] == "RuntimeError: broken at step 1"
    assert "process died" in reasons[6]
    assert "broken at step 1" in (get_directory(spec, 4) / "error.txt").read_text()

    attempts = {n: list_executions(spec.directory, str(n)) for n in range(2, 7)}
    assert [a["from"] for a in attempts[2]] == [0, 1]  # a retry resumes from the checkpoint
    assert [a["from"] for a in attempts[5]] == [0, 1]
    assert len({a["pid"] for a in attempts[5]}) == 2
    assert (len(attempts[3]), len(attempts[4]), len(attempts[6])) == (1, 3, 3)

    kinds = [type(event) for event in events if not isinstance(event, Outlook)]
    assert (kinds[0], kinds[1], kinds[-1]) == (SweepStarted, SearchStarted, SweepFinished)
    assert kinds.count(TrialStarted) == kinds.count(TrialFinished) == len(records)

    front = build_front(records, spec.list_objectives())
    on_front = {number for member in front.members for number in member.numbers}
    assert {r.number for r in records if r.checkpoint is not None} == on_front
    for record in records:
        assert len(list_checkpoints(spec, record.number)) == (record.number in on_front)
    assert not (spec.directory / "ray").exists()

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "open_cluster", None)  # a finished sweep starts nothing
        again = run_sweep(spec, train=TRAIN)
    assert again.records == records
    assert again.reason == result.reason == "all 6 configurations were tried"

    before = len(list_executions(spec.directory))
    write_faults(spec)
    larger = run_sweep(load(tmp_path, *SMALL, "search.trials=7"), train=TRAIN)
    assert larger.records[: len(records)] == records
    new = larger.records[len(records) :]
    assert [record.role for record in new].count("search") == 1
    assert len(list_executions(spec.directory)[before:]) == len(new)
    with Ledger.open(spec, read_only=True) as ledger:
        sessions = ledger.get_sessions()
    names = {"started", "finished", "slots", "provenance", "sampler", "ending", "incidents"}
    assert [set(session) for session in sessions] == [names] * 2
    assert sessions[-1]["ending"] == larger.reason == "all 7 configurations were tried"


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["trial", "ledger"])
def test_a_full_disk_ends_the_sweep_which_then_resumes(tmp_path, monkeypatch, writer):
    spec = load(tmp_path, *SMALL, "search.trials=1", "search.replicates.max_runs=0")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if writer == "trial":
            write_faults(spec, t1="full")
        else:
            patch.setattr(Ledger, "complete", fail)
        with pytest.raises(DiskFullError, match=r"no space left for the \w+ in .* bytes free\n"):
            run_sweep(spec, train=TRAIN)
    write_faults(spec)
    assert "failed" not in {record.state for record in read_records(spec)}
    result = run_sweep(spec, train=TRAIN)
    assert [record.state for record in result.records] == ["complete"] * 3


@pytest.mark.slow
def test_replacing_a_process_that_has_grown_is_no_failure(tmp_path):
    spec = load(tmp_path, *SMALL, "search.trials=2", "search.replicates.max_runs=0")
    write_faults(spec, t0="grow", t1="grow", t2="grow", t3="raise")
    result = run_sweep(spec, train=TRAIN)
    assert [record.state for record in result.records] == ["complete"] * 3 + ["failed"]
    ran = list_executions(spec.directory)
    assert len({entry["pid"] for entry in ran}) == len(ran)
    assert len(list_executions(spec.directory, "3")) == 1 + RETRIES


def test_a_killed_and_then_interrupted_sweep_ends_with_every_trial_once(tmp_path):
    overrides = [*SMALL, "search.trials=3", "training.steps=12"]
    spec = load(tmp_path, *overrides)

    def start():
        return start_sweep(TRAIN, f"storage={tmp_path}", *overrides)

    def is_complete(number):
        return read_records(spec)[number].state == "complete"

    write_faults(spec, t1="slow", t3="slow")
    with start() as process:
        wait_until(lambda: len(list_checkpoints(spec, 1)) >= 2 and is_complete(0))
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in children)
        process.send_signal(signal.SIGKILL)
        process.wait()

    write_faults(spec, t3="slow")
    begun = len(list_executions(spec.directory, "3"))
    with start() as process:
        wait_until(lambda: len(list_executions(spec.directory, "3")) > begun)
        wait_until(lambda: is_complete(1))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        assert process.wait(timeout=120) == 130
    # of the killed run nothing is left: Ray's agents look after a while whether servers still live
    wait_until(lambda: not any(is_alive(child) for child in children), 100.0)
    states = [record.state for record in read_records(spec)]
    assert (states[0], states[1], states[3]) == ("complete", "complete", "running")

    write_faults(spec)
    before = len(list_executions(spec.directory))
    larger = load(tmp_path, *SMALL, "search.trials=6", "training.steps=12")
    result = run_sweep(larger, train=TRAIN)
    ran = list_executions(spec.directory)[before:]
    assert len({entry["pid"] for entry in ran}) <= count_local_cpus()  # warm actors
    assert {record.state for record in result.records} == {"complete"}
    assert [record.role for record in result.records].count("search") == 6
    resumed = [entry["from"] for entry in list_executions(spec.directory, "1")]
    assert len(resumed) == 2
    assert int(str(resumed[1])) >= 2  # from its newest checkpoint
    assert len(list_executions(spec.directory, "0")) == 1  # what was finished is not run again


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


MERGES = (
    "search={sampler: random, trials: 6, merges: {budget: 5}, checkpoints: {budget: 1}}",
    "search.replicates={per_point: 1, max_runs: 3}",
    "training={steps: 4, evaluate_every: 2, checkpoint_every: 2}",
    "constraints={}",
)


def test_merges_join_the_front_and_keep_their_parents(tmp_path):
    spec = load(tmp_path, *MERGES)
    records = run_sweep(spec, train=TRAIN).records
    merges = [record for record in records if record.role == "merge"]
    assert len(merges) == 5
    assert len({record.parts for record in merges}) == 5
    for merge in merges:
        assert sum(part.weight for part in merge.parts) == pytest.approx(1)
        assert all(records[part.trial].is_training for part in merge.parts)
        # none waits for the end of the search
        assert merge.number > max(part.trial for part in merge.parts)
    last_search = max(record.number for record in records if record.role == "search")
    assert min(merge.number for merge in merges) < last_search
    front = build_front(records, spec.list_objectives())
    names = {member.name for member in front.members}
    assert names & {merge.name for merge in merges}  # each is a little above its parents
    kept = {number for member in front.members for number in member.numbers}
    kept |= {part.trial for number in kept for part in records[number].parts}
    for record in read_records(spec):
        found = list_checkpoints(spec, record.number)
        assert bool(found) == (record.number in kept), (record.number, found)
    fresh = [r for r in records if r.role == "replicate"]
    for replicate in filter(lambda record: record.parts, fresh):
        original = records[replicate.replicate_of or 0]
        pairs = zip(replicate.parts, original.parts, strict=True)
        assert all(records[a.trial].replicate_of == b.trial for a, b in pairs)
        assert [p.weight for p in replicate.parts] == [p.weight for p in original.parts]
    assert sum(not r.parts for r in fresh) <= spec.search.replicates.max_runs


@pytest.mark.slow
def test_without_policies_nothing_is_merged(tmp_path):
    records = run_sweep(load(tmp_path, *MERGES, "keep=none"), train=TRAIN).records
    assert {record.role for record in records} <= {"untrained", "published", "search", "replicate"}


@pytest.mark.slow
def test_stopped_trials_take_no_step_past_the_wide_rung_and_leave_no_files(tmp_path):
    budget = ("search.budget.completions=12800", "search.replicates.max_runs=0")
    wide = ("search.scheduler={type: halving}", "search.trials=10", "search.sampler=random")
    spec = load(tmp_path, *ENDS_ONLY, *budget, *wide)
    result = run_sweep(spec, train=TRAIN)
    with Ledger.open(spec, read_only=True) as ledger:
        states = {trial.state.name for trial in ledger.study.trials}
    assert not result.exit_status
    assert states == {"COMPLETE", "PRUNED"}

    pruned = [record for record in result.records if record.state == "pruned"]
    assert pruned
    for record in pruned:
        # the fake training measures after every step
        steps = [rung.step for rung in record.rungs]
        assert steps == list(range(1, find_wide_step(spec) + 1))
        assert record.reason == STOPPED
        assert not list_checkpoints(spec, record.number)
        assert not is_asked_to_stop(get_directory(spec, record.number))

    for record in (r for r in result.records if r.is_training and r.state == "complete"):
        assert [rung.step for rung in record.rungs] == list(range(1, (record.last_step or 0) + 1))
        begun, *continued = list_executions(spec.directory, str(record.number))
        assert begun["from"] == 0
        assert continued
        assert all(execution["from"] for execution in continued), "it goes on where it waited"


WITH_START = ("search.trials=3", "start={steps: 7, completions_per_step: 4}")
START = (*ENDS_ONLY, *FIFO, *WITH_START, "training.steps=4", "search.replicates.max_runs=0")
FIXED_START = ("search.budget.completions=0", 'constraints.correctness=">= 0.2"', *START)


@pytest.mark.slow
def test_a_sweep_killed_in_its_start_resumes_by_the_same_command(tmp_path):
    spec = load(tmp_path, *FIXED_START)
    write_faults(spec, t0="gate")
    with start_sweep(TRAIN, f"storage={tmp_path}", *FIXED_START) as process:
        wait_until(lambda: "checkpoint-2" in list_checkpoints(spec, 0))
        process.kill()
        process.wait()
    write_faults(spec)
    result = run_sweep(spec, train=TRAIN)
    assert not result.exit_status
    assert [r.role for r in result.records][:3] == ["start", "untrained", "published"]
    assert all(record.state == "complete" for record in result.records)
    assert result.records[0].checkpoint == spec.directory.absolute() / "trials/0/checkpoint-7"


def test_a_failed_start_ends_the_command(tmp_path):
    spec = load(tmp_path, *FIXED_START)
    write_faults(spec, t0="nonfinite")
    with pytest.raises(UsageError, match="the supervised training failed: loss is nan"):
        run_sweep(spec, train=TRAIN)


LONG = ("search.trials=3", "training.steps=600", "training.checkpoint_every=600")
# no trial refers to a baseline, so each may stop
STEERED = (*ENDS_ONLY, *FIFO, *LONG, 'constraints.correctness=">= 0.2"')


@pytest.mark.slow
def test_what_a_person_asks_for_is_in_the_ledger_while_every_slot_is_busy(tmp_path):
    sweep = KilledSweep(tmp_path, (*STEERED, "search.replicates.max_runs=0"), fake=True)
    sweep.slow_down()

    def ask(action, **arguments):
        request = steering.request(action, arguments, "anna")
        recorded = steering.wait(request.id, 60.0)
        assert recorded is not None, action
        assert recorded.outcome == "applied"

    def list_states():
        has_all = sweep.has_records(3)
        return [record.state for record in read_records(sweep.spec)] if has_all else []

    def wait(condition):
        wait_for_condition(process, condition, sweep.read_errors)

    with sweep.start() as process:
        # Both slots are busy for minutes, so no suggestion is due.
        wait(lambda: list_states().count("running") == 2 and bool(sweep.read_log()))
        steering = Steering(sweep.spec.directory)
        ask("clone", trial=1, changes={"learning_rate": 2e-4})
        ask("stop", trial=0)
        wait(lambda: list_states() == ["pruned", "running", "running"])
        assert read_records(sweep.spec)[2].params["learning_rate"] == 2e-4
        ask("pause")
        ask("trials", number=1)
        for number in (1, 2):
            ask("stop", trial=number)
        wait(lambda: list_states() == ["pruned"] * 3)
        time.sleep(3)
        assert list_states() == ["pruned"] * 3  # nothing starts, and the process stays
        ask("add", params={"learning_rate": 1e-4, "group_size": 4})  # while nothing runs
        sweep.set_faults({})
        ask("resume")
        assert process.wait(timeout=300) == 0, sweep.read_errors()

    records = read_records(sweep.spec)
    assert [record.reason for record in records[:3]] == ["stopped by anna"] * 3
    assert [r.params["learning_rate"] for r in records if r.request] == [2e-4, 1e-4]
    assert sum(record.role == "search" and not record.request for record in records) == 1
    assert len(steering.list_requests()) == 8
    assert steering.list_pending() == []


TWO_WORKERS = (
    "resources.workers=2",
    "search.sampler=random",
    "search.trials=1",
    "search.replicates.max_runs=0",
    "training={completions_per_step: 16, validation_prompts: 5, test_prompts: 5}",
    "training={steps: 4, checkpoint_every: 1}",
    *ENDS_ONLY,
)
needs_two_cores = pytest.mark.skipif(count_local_cpus() < 2, reason="two workers need two cores")


@needs_two_cores
@pytest.mark.slow
def test_a_sweep_with_two_workers_a_trial(tmp_path):
    spec = load(tmp_path, *TWO_WORKERS, "keep=all")
    assert spec.resources.shards_policy
    result = run_sweep(spec)
    assert [record.state for record in result.records] == ["complete"] * 3
    untrained, *trained = result.records
    assert untrained.cost.completions == 0
    for record in trained:
        directory = get_directory(spec, record.number)
        assert [m.step for m in read_steps(directory)] == [1, 2, 3, 4]
        assert len((directory / STEPS_FILE).read_text().splitlines()) == 4, "one of the two writes"
        assert record.cost.completions == 4 * 16
        assert record.checkpoint == directory / "checkpoint-4"
        assert len(list(record.checkpoint.glob("rng_state_?.pth"))) == 2
        assert record.environment["sandbox"]
        assert all(e.mean >= 0 for e in record.test.values())


@needs_two_cores
@pytest.mark.fault
def test_a_killed_worker_costs_an_attempt_and_an_interruption_nothing(tmp_path):
    overrides = (*TWO_WORKERS, "training.steps=40")
    spec = load(tmp_path, *overrides)
    directory = get_directory(spec, 1)

    def count_lines():
        return len((directory / STEPS_FILE).read_text().splitlines())

    with start_sweep(runner.TRAIN, f"storage={tmp_path}", *overrides) as process:
        wait_until(lambda: list_checkpoints(spec, 1))
        processes = psutil.Process(process.pid).children(recursive=True)
        [p for p in processes if "RayTrainWorker" in " ".join(p.cmdline())][-1].kill()
        lines = count_lines()
        # It resumes in another attempt, from its newest checkpoint and not from the start.
        wait_until(lambda: count_lines() > lines + 3)
        written = [m.step for m in read_steps(directory)]
        assert written == list(range(1, len(written) + 1))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=240) == 130
    before = read_steps(directory)
    result = run_sweep(spec)
    assert [record.state for record in result.records] == ["complete"] * 3
    after = read_steps(directory)
    assert [m.step for m in after] == list(range(1, 41))
    assert after[: len(before)] == before, "nothing was trained twice after the interruption"
