"""Whole sweeps on a real Ray whose trials share processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from gdpo_tune.core.events import Event, IncidentOccurred, SearchStarted, TrialFinished
from gdpo_tune.core.system import count_local_cpus
from gdpo_tune.core.trial_files import read_steps
from gdpo_tune.results.steering import Steering
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.training import train
from gdpo_tune.tuning.attempts import RETRIES
from gdpo_tune.tuning.runner import run_sweep
from tests.support.fake_training import GATE, list_executions
from tests.support.ray_sweeps import MARKS, SPACE, start_sweep, wait_until, write_faults
from tests.support.tuning import ENDS_ONLY

pytestmark = MARKS

TRAIN = "tests.support.fake_training:SharedWorker"
SHARED = ["resources.pack=3", "model.lora_rank=4"]
SMALL = ["training.steps=4", "search.replicates.max_runs=1"]
FIFO = "search={sampler: random, scheduler: {type: fifo}}"


def load_small_spec(directory: Path, *overrides: str) -> SweepSpec:
    return load_spec(SPACE, [f"storage={directory}", *SHARED, *SMALL, *overrides], "sweep")


def test_trials_share_processes_and_a_fault_costs_its_own_trial_alone(tmp_path: Path):
    spec = load_small_spec(tmp_path, *ENDS_ONLY, FIFO, "search.trials=7")
    faults = {"t2": "raise once", "t3": "nonfinite", "t4": "raise", "t5": "die at gate"}
    write_faults(spec, all="slow", **faults)
    events: list[Event] = []

    def open_gate(_: Event) -> None:
        """Let the process die when the trials with the other faults have ended."""
        ended = {event.record.number for event in events if isinstance(event, TrialFinished)}
        if ended >= {2, 3, 4}:
            (spec.directory / GATE).touch()

    records = run_sweep(spec, listeners=[events.append, open_gate], train=TRAIN).records
    started = [event for event in events if isinstance(event, SearchStarted)]
    assert [event.slots for event in started] == [3 * count_local_cpus()]
    reasons = {r.number: r.reason for r in records if r.state == "failed"}
    assert reasons == {3: "loss is nan at step 1", 4: "RuntimeError: broken at step 1"}
    error = (spec.directory / "trials" / "4" / "error.txt").read_text()
    assert "broken at step 1" in error
    assert "fake_training.py" in error, "the traceback is that of the process that trains"
    attempts = {
        record.number: list_executions(spec.directory, str(record.number)) for record in records
    }
    assert [a["from"] for a in attempts[2]] == [0, 1]
    assert [a["from"] for a in attempts[5]] == [0, 1]
    assert len(attempts[4]) == 1 + RETRIES
    # the process that died is replaced, and no other one is started for a trial
    assert len({a["pid"] for each in attempts.values() for a in each}) <= count_local_cpus() + 1
    died = [
        e.incident for e in events if isinstance(e, IncidentOccurred) if "died" in str(e.incident)
    ]
    assert len(died) == 1
    assert 5 in died[0].trials


@pytest.mark.slow
def test_a_scheduler_merges_and_replicates_decide_as_for_trials_of_their_own(tmp_path: Path):
    budget = "budget: {completions: 12800}, replicates: {per_point: 1, max_runs: 1}"
    spec = load_small_spec(tmp_path, f"search={{sampler: random, {budget}}}", "training.steps=20")
    records = run_sweep(spec, train=TRAIN).records
    assert {record.state for record in records} <= {"complete", "pruned"}
    roles = {record.role for record in records}
    assert {"untrained", "published", "replicate", "merge"} < roles
    assert "pruned" in {record.state for record in records}


@pytest.mark.slow
def test_real_trials_that_share_a_process_equal_trials_alone(tmp_path: Path):
    tiny = (
        "training={steps: 2, completions_per_step: 16, train_prompts: 32, validation_prompts: 4, "
        "test_prompts: 4, evaluate_every: 2, checkpoint_every: 1}"
    )
    few = ["search.trials=2", "search.replicates.max_runs=0", "keep=all"]
    spec = load_small_spec(tmp_path, tiny, *ENDS_ONLY, FIFO, *few)
    records = run_sweep(spec).records
    assert [record.state for record in records] == ["complete"] * 4
    for record in records[1:]:
        directory = tmp_path / "alone" / str(record.number)
        config = spec.build_trial_config(record.params, record.seed, directory)
        outcome = train(config, resume=None, report=lambda *_: None)
        assert (outcome.validation, outcome.test) == (record.validation, record.test)
        assert record.checkpoint is not None
        assert list_metrics(record.checkpoint.parent) == list_metrics(directory)


def list_metrics(directory: Path) -> list[dict[str, float]]:
    """List the metrics of each step, without durations."""
    return [
        {name: value for name, value in step.metrics.items() if "seconds" not in name}
        for step in read_steps(directory)
    ]


def list_steps(spec: SweepSpec, number: int) -> list[int]:
    """List the checkpoints that a trial has written so far, by step."""
    log = spec.directory / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    entries = [json.loads(line) for line in lines]
    return [e["checkpoint"] for e in entries if "checkpoint" in e and e["trial"] == str(number)]


@pytest.mark.fault
def test_a_killed_process_costs_its_trials_no_checkpoint_and_stops_free_places(tmp_path: Path):
    overrides = [*ENDS_ONLY, FIFO, "search.trials=5", "training.steps=40"]
    overrides += ["search.replicates.max_runs=0", f"resources.cpus={count_local_cpus()}"]
    spec = load_small_spec(tmp_path, *overrides)
    write_faults(spec, all="slow", t0="")
    with start_sweep(TRAIN, f"storage={tmp_path}", *SHARED, *SMALL, *overrides) as process:
        wait_until(lambda: min(len(list_steps(spec, number)) for number in (1, 2, 3)) > 2)
        host = int(str(list_executions(spec.directory, "1")[0]["pid"]))
        assert all(list_executions(spec.directory, str(n))[0]["pid"] == host for n in (2, 3))
        psutil.Process(host).kill()
        wait_until(
            lambda: all(len(list_executions(spec.directory, str(n))) == 2 for n in (1, 2, 3))
        )
        Steering(spec.directory).request("stop", {"trial": 2}, "anna")
        wait_until(lambda: list_executions(spec.directory, "4"))
        for number in (1, 3):
            assert len(list_executions(spec.directory, str(number))) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
    for number in (1, 2, 3):
        first, second = list_executions(spec.directory, str(number))
        steps = list_steps(spec, number)
        assert second["from"] in steps, "it resumed from a checkpoint"
        assert steps.count(int(str(second["from"])) + 1) <= 2
        assert first["pid"] != second["pid"]
    write_faults(spec)
    result = run_sweep(spec, train=TRAIN)
    states = [record.state for record in result.records]
    assert states == ["complete"] * 2 + ["pruned"] + ["complete"] * 4
    for number in (1, 3):
        assert list_executions(spec.directory, str(number))[-1]["from"] > 1
        assert sorted(set(list_steps(spec, number))) == list(range(1, 41))
