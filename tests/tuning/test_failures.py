"""Retries of trials: lost nodes cost no attempt, and the number of attempts is limited."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError
from ray.train import TrainingFailedError

from gdpo_tune.core.errors import EngineDiedError, StoreUnreachableError
from gdpo_tune.core.events import Incident, IncidentOccurred
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning.ray import failures, workers
from gdpo_tune.tuning.ray.failures import FOR_EVER, Attempts, classify_error
from gdpo_tune.tuning.ray.messages import (
    NODE_DIED,
    AttemptError,
    Failed,
    Fatal,
    TrialNotice,
    TrialPlaced,
    TrialUpdate,
    pack,
    unpack_attempt,
    unpack_message,
)
from gdpo_tune.tuning.ray.nodes import ClusterNode, Nodes
from gdpo_tune.tuning.ray.trainable import run_trial
from gdpo_tune.tuning.ray.trial_history import DEATHS, LOSSES, RETRIES, TrialHistory
from tests.support.search_driver import Driver
from tests.support.tuning import build_attempt, build_measurement, load_code_spec

NODE_LOST = RayActorError(error_msg=f"The actor died because {NODE_DIED}. Node Id: b")
DIED = ActorDiedError()
BROKEN = ValueError("bad reward")


def wrap_task_error(error: Exception) -> RayTaskError:
    """Wrap an error of a trial's code as Ray passes it to the driver."""
    raised = RayTaskError("train", "a long traceback", error).as_instanceof_cause()
    return pickle.loads(cloudpickle.dumps(raised))


@pytest.mark.parametrize(
    ("error", "gone", "expected"),
    [
        (wrap_task_error(BROKEN), False, "own"),
        (wrap_task_error(BROKEN), True, "own"),
        (
            wrap_task_error(AttemptError("changed", "the process has grown too large")),
            False,
            "changed",
        ),
        (wrap_task_error(AttemptError("lost", "a node died")), False, "lost"),
        (wrap_task_error(AttemptError("store", "no route")), False, "store"),
        (wrap_task_error(AttemptError("crowded", "no memory")), False, "crowded"),
        (wrap_task_error(AttemptError("directory", "waited 3 s for it")), True, "directory"),
        (DIED, False, "died"),
        (DIED, True, "lost"),
        (NODE_LOST, False, "lost"),
        (RayActorError(preempted=True), False, "lost"),
        (ActorUnavailableError("no route to host", None), False, "lost"),
        (None, False, "own"),
    ],
)
def test_errors_are_classified(error, gone, expected):
    assert classify_error(error, node_lost=gone) == expected


def test_a_process_of_several_that_lost_its_node_is_no_failure():
    failed = TrainingFailedError("two processes")
    failed.worker_failures = {0: ValueError("connection closed by peer"), 1: NODE_LOST}
    cause = workers.find_cause(failed, 2)
    assert isinstance(cause, AttemptError)
    assert cause.cause == "lost"


def test_failures_of_a_trial_are_counted():
    history = TrialHistory()
    assert [history.count("own", "a", 0.0) for _ in range(RETRIES + 1)] == [True] * RETRIES + [
        False
    ]
    assert TrialHistory().count("own", "a", 0.0)


def test_lost_nodes_are_counted_apart_from_failures():
    history = TrialHistory()
    assert all(history.count("lost", "a", 0.0) for _ in range(LOSSES))
    assert history.count("own", "a", 0.0)
    assert not history.count("store", "a", 0.0)


def test_a_process_is_excused_if_its_node_turns_out_to_have_died_with_it():
    one, other, late = TrialHistory(), TrialHistory(), TrialHistory()
    assert one.count("died", "node1", 100.0)
    assert other.count("died", "node2", 100.0)
    assert late.count("died", "node1", 39.0)
    assert [history.reclassify_as_node_loss("node1", 100.0) for history in (one, other, late)] == [
        True,
        False,
        False,
    ]
    assert not one.reclassify_as_node_loss("node1", 100.0)
    assert [history.failed for history in (one, other, late)] == [0, 1, 1]


class NodeTable:
    """A fake of Ray's table of nodes."""

    def __init__(self, **alive: bool) -> None:
        self.alive = alive

    def __call__(self) -> list[dict[str, Any]]:
        resources = {"CPU": 2.0}
        return [
            {"NodeID": name, "Alive": alive, "NodeManagerHostname": "h", "Resources": resources}
            for name, alive in self.alive.items()
        ]


def test_lost_and_joined_nodes_are_reported_once():
    table = NodeTable(a=True, b=True, dead=False)
    nodes, changes = Nodes(table), list[tuple[list[str], list[str]]]()

    def listen(lost: Sequence[ClusterNode], joined: Sequence[ClusterNode]) -> None:
        changes.append(([node.id for node in lost], [node.id for node in joined]))

    nodes.on_change = listen
    nodes.refresh()
    assert [node.id for node in nodes.list_alive()] == ["a", "b"]
    nodes.mark_lost("b")
    assert not nodes.is_alive("b")
    table.alive = {"a": True, "b": False, "c": True}
    nodes.refresh()
    nodes.refresh()
    assert changes == [(["b"], []), ([], ["c"])]
    assert str(nodes.list_alive()[0]) == "h (a)"


class RayTrial:
    """A fake of Ray's trial, with the attributes that callbacks read."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.trial_id, self.config, self.max_failures = name, config, -1
        self.temporary_state = SimpleNamespace(ray_actor="")
        self.error: BaseException | None = None
        self.evaluated_params, self.metric_analysis, self.metric_n_steps = {}, {}, {}
        self.run_metadata = SimpleNamespace()


class NodeSweep:
    """Two nodes with two trials each, in flight."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger, self.driver = ledger, Driver(ledger, slots=4)
        self.table = NodeTable(a=True, b=True)
        self.nodes = Nodes(self.table)
        self.attempts = Attempts(self.driver.searcher, self.nodes, lambda: None)
        monkeypatch.setattr(failures, "read_error", lambda trial: trial.error)
        monkeypatch.setattr(failures, "find_node", str)
        self.trials = [RayTrial(*self._request_trial()) for _ in range(4)]
        for trial, actor in zip(self.trials, ["a", "a", "b", "b"], strict=True):
            self.start(trial, actor)

    def _request_trial(self) -> tuple[str, dict[str, Any]]:
        name = self.driver.ask()
        return name, pack(build_attempt(self.driver.in_flight[name]))

    def start(self, trial: RayTrial, actor: str) -> None:
        trial.temporary_state.ray_actor = actor
        self.attempts.on_trial_start(0, [], trial)

    def fail(self, trial: RayTrial, error: BaseException) -> None:
        trial.error = error
        self.attempts.on_trial_recover(0, [], trial)

    def get_reason_to_give_up(self, trial: RayTrial) -> str | Exception | None:
        return unpack_attempt(trial.config).given_up

    def list_incidents(self) -> list[str]:
        events = self.driver.events
        return [str(e.incident) for e in events if isinstance(e, IncidentOccurred)]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Ledger.open(load_code_spec(tmp_path, ["search.scheduler={type: fifo}"])) as ledger:
        ledger.begin_session(0.0, 4, {})
        yield NodeSweep(ledger, monkeypatch)


def test_ray_can_write_a_snapshot_where_other_processes_are_known(sweep):
    """A process that had children before the sweep could not start one."""
    others = {psutil.Process()}  # contains a lock
    attempts = Attempts(sweep.driver.searcher, sweep.nodes, lambda: others.clear())
    cloudpickle.dumps(attempts)


def test_a_lost_node_is_reported_once_with_its_trials(sweep: NodeSweep):
    for trial in sweep.trials[2:]:
        sweep.fail(trial, NODE_LOST)
    for trial in sweep.trials[2:]:
        sweep.start(trial, "a")
    assert sweep.list_incidents() == [
        "node h (b) was lost, with trials 2, 3",
        "trial 2 resumes on node h (a)",
        "trial 3 resumes on node h (a)",
    ]
    (session,) = sweep.ledger.get_sessions()
    assert [str(incident) for incident in session["incidents"]] == sweep.list_incidents()
    assert all(isinstance(incident, Incident) for incident in session["incidents"])


def test_a_node_whose_processes_died_first_excuses_them(sweep: NodeSweep):
    trial = sweep.trials[2]
    sweep.fail(trial, DIED)
    sweep.start(trial, "a")
    sweep.table.alive["b"] = False
    sweep.nodes.refresh()
    assert sweep.list_incidents()[0].startswith("trial 2 is tried again: the trial's process died")
    assert sweep.list_incidents()[1] == "node h (b) was lost, with trials 2, 3"
    for _ in range(RETRIES):
        sweep.fail(trial, wrap_task_error(BROKEN))
    assert sweep.get_reason_to_give_up(trial) is None


def test_a_trial_that_was_given_up_is_excused_with_its_node_unless_it_already_ended(
    sweep: NodeSweep,
):
    trial, other = sweep.trials[2], sweep.trials[3]
    for _ in range(RETRIES):
        sweep.fail(trial, wrap_task_error(BROKEN))
        sweep.fail(other, wrap_task_error(BROKEN))
    for broken in (trial, other):
        sweep.start(broken, "b")
        sweep.fail(broken, DIED)
        assert sweep.get_reason_to_give_up(broken)
    sweep.start(other, "a")  # where it finds that it is given up
    sweep.table.alive["b"] = False
    sweep.nodes.refresh()
    assert sweep.get_reason_to_give_up(trial) is None
    assert trial.max_failures == FOR_EVER
    assert sweep.get_reason_to_give_up(other)


def test_a_node_that_does_not_answer_is_lost_later(sweep: NodeSweep):
    sweep.fail(sweep.trials[2], ActorUnavailableError("connection reset", None))
    sweep.start(sweep.trials[2], "a")
    sweep.table.alive["b"] = False
    sweep.nodes.refresh()
    sweep.fail(sweep.trials[3], NODE_LOST)
    assert sweep.list_incidents() == [
        "trial 2 was cut off from node h (b)",
        "trial 2 resumes on node h (a)",
        "node h (b) was lost, with trials 2, 3",
    ]


def test_a_trial_that_fails_by_itself_is_given_up(sweep: NodeSweep):
    trial = sweep.trials[0]
    for _ in range(RETRIES):
        sweep.fail(trial, wrap_task_error(BROKEN))
        assert sweep.get_reason_to_give_up(trial) is None
    sweep.fail(trial, NODE_LOST)
    assert sweep.get_reason_to_give_up(trial) is None
    sweep.fail(trial, wrap_task_error(BROKEN))
    assert sweep.get_reason_to_give_up(trial) == "ValueError: bad reward"
    assert trial.max_failures == 0
    assert unpack_message(run_trial(trial.config)) == Failed("ValueError: bad reward")
    error_file = unpack_attempt(trial.config).trial.directory / "error.txt"
    assert "a long traceback" in error_file.read_text()


def test_a_trial_that_cannot_report_its_end_is_given_up(sweep: NodeSweep):
    trial = sweep.trials[0]
    for _ in range(RETRIES + 1):
        sweep.fail(trial, wrap_task_error(BROKEN))
    trial.error = DIED
    sweep.attempts.on_trial_error(0, [], trial)
    record = sweep.ledger.get_record(0)
    assert (record.state, record.reason) == ("failed", "ValueError: bad reward")
    assert trial.config == {}


def test_a_trial_that_kills_node_after_node_is_given_up(sweep: NodeSweep):
    trial = sweep.trials[0]
    for _ in range(LOSSES):
        sweep.fail(trial, RayActorError(preempted=True))
        sweep.start(trial, "a")
    assert sweep.get_reason_to_give_up(trial) is None
    sweep.attempts.on_trial_result(0, [], trial, pack(TrialUpdate(build_measurement(1))))
    for _ in range(LOSSES):
        sweep.fail(trial, RayActorError(preempted=True))
        sweep.attempts.on_trial_result(0, [], trial, pack(TrialNotice("waits for the store")))
    assert sweep.get_reason_to_give_up(trial) is None
    for _ in range(1):
        sweep.fail(trial, RayActorError(preempted=True))
    assert sweep.get_reason_to_give_up(trial) == failures.LOST_AGAIN


def test_a_node_without_the_store_is_avoided_and_costs_no_attempt(sweep: NodeSweep):
    trial = sweep.trials[0]
    away = StoreUnreachableError("s3://bucket/night", "no route", 600)
    for _ in range(LOSSES):
        sweep.fail(trial, wrap_task_error(AttemptError("store", away.summary, away)))
        sweep.start(trial, "a")
    assert sweep.get_reason_to_give_up(trial) is None
    assert not (unpack_attempt(trial.config).trial.directory / "error.txt").exists()
    assert sweep.list_incidents()[0] == f"trial 0 leaves node h (a): {away.summary}"
    sweep.fail(trial, wrap_task_error(AttemptError("store", away.summary, away)))
    ended = run_trial(trial.config)
    result = unpack_message(ended)
    assert isinstance(result, Fatal)
    assert str(result.error) == str(away)
    sweep.driver.searcher.on_trial_complete(trial.trial_id, ended)
    assert sweep.driver.searcher.fatal is result.error
    assert sweep.ledger.get_record(0).state == "running"  # the same command resumes it


def test_a_crowded_gpu_costs_no_attempt_and_never_fails_a_trial(sweep: NodeSweep):
    trial = sweep.trials[0]
    crowded = wrap_task_error(AttemptError("crowded", "other processes hold memory"))
    for _ in range(LOSSES):
        sweep.fail(trial, crowded)
        sweep.start(trial, "a")
    assert sweep.get_reason_to_give_up(trial) is None
    assert sweep.list_incidents()[0] == "trial 0 is tried again: other processes hold memory"
    sweep.attempts.on_trial_result(0, [], trial, pack(TrialUpdate(build_measurement(1))))
    for _ in range(LOSSES + 1):
        sweep.fail(trial, crowded)
    ended = run_trial(trial.config)
    result = unpack_message(ended)
    assert isinstance(result, Fatal)
    assert "fix: end the other processes on that GPU" in str(result.error)
    sweep.driver.searcher.on_trial_complete(trial.trial_id, ended)
    assert sweep.ledger.get_record(0).state == "running"  # the same command goes on with it


def test_an_engine_that_dies_is_tried_again_and_its_last_words_are_the_reason(sweep: NodeSweep):
    trial = sweep.trials[0]
    died = wrap_task_error(EngineDiedError("vLLM died after 3 optimizer steps: CUDA error"))
    for _ in range(RETRIES):
        sweep.fail(trial, died)
        assert sweep.get_reason_to_give_up(trial) is None
    sweep.fail(trial, died)
    assert str(sweep.get_reason_to_give_up(trial)).endswith("optimizer steps: CUDA error")


def test_a_store_error_can_be_pickled():
    outage = StoreUnreachableError("s3://bucket/night", "no route", 600)
    error = AttemptError("store", outage.summary, outage)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(again.outage) == str(outage)


def test_a_change_of_process_uses_up_no_attempt(sweep: NodeSweep):
    trial = sweep.trials[0]
    for _ in range(10):
        sweep.fail(
            trial, wrap_task_error(AttemptError("changed", "the process has grown too large"))
        )
        sweep.start(trial, "a")
    assert sweep.get_reason_to_give_up(trial) is None
    assert sweep.list_incidents() == []


HOST_DIED = wrap_task_error(AttemptError("host", "the process that it shared died"))


class SharedSweep(NodeSweep):
    """Two nodes with a process each, which two trials share."""

    def start(self, trial: RayTrial, actor: str, host: str = "") -> None:
        attempt = unpack_attempt(trial.config)
        trial.config = pack(replace(attempt, setup=replace(attempt.setup, pack=2)))
        super().start(trial, "head")  # the trial's own process trains nothing
        placed = TrialPlaced(host or f"host on {actor}", actor)
        self.attempts.on_trial_result(0, [], trial, pack(placed))

    def report(self, trial: RayTrial, step: int) -> None:
        self.attempts.on_trial_result(0, [], trial, pack(TrialUpdate(build_measurement(step))))

    def is_alone(self, trial: RayTrial) -> bool:
        return unpack_attempt(trial.config).alone


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Ledger.open(load_code_spec(tmp_path, ["search.scheduler={type: fifo}"])) as ledger:
        ledger.begin_session(0.0, 4, {})
        yield SharedSweep(ledger, monkeypatch)


def test_the_death_of_a_shared_process_is_reported_once_and_blames_no_trial(shared: SharedSweep):
    for turn in range(RETRIES + 2):
        for trial in shared.trials[:2]:
            shared.report(trial, 50 * turn + 1)
        for trial in shared.trials[:2]:
            shared.fail(trial, HOST_DIED)
        for trial in shared.trials[:2]:
            shared.start(trial, "a", f"host {turn}")
    assert shared.list_incidents() == [
        "each of trials 0, 1 is tried again: the process that it shared died"
    ] * (RETRIES + 2)
    for trial in shared.trials[:2]:
        assert shared.get_reason_to_give_up(trial) is None
        assert not shared.is_alone(trial), "there was progress between the deaths"


def test_trials_whose_shared_processes_die_without_progress_are_tried_alone(shared: SharedSweep):
    first, second = shared.trials[:2]
    for turn in range(DEATHS):
        assert not shared.is_alone(first)
        for trial in (first, second):
            shared.report(trial, 1)
            shared.fail(trial, HOST_DIED)
        for trial in (first, second):
            shared.start(trial, "a", f"host {turn}")
    assert shared.is_alone(first)
    assert shared.is_alone(second)
    shared.start(second, "b")
    for turn in range(RETRIES + 1):
        assert shared.get_reason_to_give_up(first) is None
        shared.start(first, "a", f"alone {turn}")
        shared.fail(first, HOST_DIED)
    assert "died" in str(shared.get_reason_to_give_up(first))
    assert shared.get_reason_to_give_up(second) is None


def test_a_trial_that_was_alone_in_its_process_is_blamed_for_its_death(shared: SharedSweep):
    trial = shared.trials[0]
    for turn in range(RETRIES + 1):
        shared.start(trial, "a", f"host {turn}")
        shared.fail(trial, HOST_DIED)
    assert "died" in str(shared.get_reason_to_give_up(trial))


def test_a_shared_process_that_died_with_its_node_is_a_lost_node(shared: SharedSweep):
    first, second = shared.trials[2:]
    shared.fail(first, HOST_DIED)
    shared.start(first, "a")
    shared.table.alive["b"] = False
    shared.nodes.refresh()
    shared.fail(second, HOST_DIED)
    shared.start(second, "a")
    assert shared.list_incidents() == [
        "each of trials 2, 3 is tried again: the process that it shared died",
        "node h (b) was lost, with trials 2, 3",
        "trial 3 resumes on node h (a)",
    ]
    for trial in (first, second):
        shared.fail(trial, HOST_DIED)
        assert not shared.is_alone(trial)


def test_the_number_of_running_trials_follows_the_slots_of_the_nodes(sweep: NodeSweep):
    assert sweep.driver.ask() is None
    sweep.table.alive["c"] = True
    sweep.nodes.refresh()
    assert sweep.list_incidents() == ["node h (c) has joined"]
    assert [sweep.driver.ask() is None for _ in range(3)] == [False, False, True]
    sweep.table.alive = {}
    sweep.nodes.refresh()
    for name in list(sweep.driver.in_flight):
        sweep.driver.end(name)
    assert sweep.driver.ask() is None
    waits = "the sweep waits for nodes: a trial needs 1 CPU and 0 GPUs, which no node has"
    assert any(incident.startswith(waits) for incident in sweep.list_incidents())
    sweep.table.alive["d"] = True
    sweep.nodes.refresh()
    assert sweep.driver.ask() is not None
