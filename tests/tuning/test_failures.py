"""Retries of trials: lost nodes cost no attempt, and the number of attempts is limited."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray import cloudpickle
from ray.air.execution._internal import RayActorManager
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from ray.train import TrainingFailedError, UserCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2.api.exceptions import ControllerError, PreemptionError
from ray.train.v2.api.preemption import PreemptionInfo
from ray.tune.execution import tune_controller as controller

from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.events import Incident, IncidentOccurred
from gdpo_tune.core.trials import Cost
from gdpo_tune.ledger import Ledger
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning import lifecycle
from gdpo_tune.tuning.attempts import (
    LOSSES,
    RETRIES,
    AttemptError,
    AttemptFailure,
    OpenTrial,
    TrialNotice,
    TrialPlaced,
    TrialUpdate,
    wrap_for_ray,
)
from gdpo_tune.tuning.nodes import ClusterNode, Nodes
from gdpo_tune.tuning.ray import tune, workers
from gdpo_tune.tuning.ray.attempt import NODE_DIED
from gdpo_tune.tuning.ray.tune import TuneCallback, describe_failure
from tests.support.search_driver import Driver
from tests.support.tuning import (
    build_attempt,
    build_measurement,
    build_trial_config,
    load_code_spec,
)

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
        (wrap_task_error(BROKEN), False, "error"),
        (wrap_task_error(BROKEN), True, "error"),
        (
            wrap_task_error(AttemptError("needs_new_process", "the process has grown too large")),
            False,
            "needs_new_process",
        ),
        (wrap_task_error(AttemptError("lost", "a node died")), False, "lost"),
        (wrap_task_error(AttemptError("store", "no route")), False, "store"),
        (wrap_task_error(AttemptError("gpu_contention", "no memory")), False, "gpu_contention"),
        (wrap_task_error(AttemptError("directory", "waited 3 s for it")), True, "directory"),
        (DIED, False, "died"),
        (DIED, True, "lost"),
        (NODE_LOST, False, "lost"),
        (RayActorError(preempted=True), False, "lost"),
        (ActorUnavailableError("no route to host", None), False, "lost"),
        (None, False, "error"),
    ],
)
def test_errors_are_classified(error, gone, expected, sweep):
    trial = OpenTrial(0, "gone" if gone else "a")
    assert sweep.driver.searcher._find_cause(describe_failure(error), trial).cause == expected


def test_a_process_that_ray_killed_for_memory_has_died():
    """Ray's own manager ends the sweep: it takes the error for one that it does not know."""
    killed = OutOfMemoryError("Task was killed due to the node running low on memory.")
    seen: list[Exception] = []

    def keep(_: Any, error: Exception) -> None:
        seen.append(error)

    actor = SimpleNamespace(actor_id=1, _on_error=keep)
    task: Any = SimpleNamespace(_tracked_actor=actor, _on_error=None)
    with pytest.raises(RuntimeError, match="unexpected exception"):
        RayActorManager._actor_task_failed(build_manager(RayActorManager), task, killed)
    assert controller.RayActorManager is tune.ActorManager
    build_manager(tune.ActorManager)._actor_task_failed(task, killed)
    (error,) = seen
    assert "low on memory" in str(error)
    assert describe_failure(error).cause == "died"


def build_manager(kind: Any) -> Any:
    manager = object.__new__(kind)
    manager._failed_actor_ids = set()
    manager._cleanup_actor = lambda tracked_actor: None
    return manager


def test_a_process_of_several_that_lost_its_node_is_no_failure():
    failed = TrainingFailedError("two processes")
    failed.worker_failures = {0: ValueError("connection closed by peer"), 1: NODE_LOST}
    cause = workers.find_cause(failed, 2)
    assert isinstance(cause, AttemptError)
    assert cause.cause == "lost"


def test_a_process_is_excused_if_its_node_turns_out_to_have_died_with_it():
    one, other, late = trials = [OpenTrial(n, node) for n, node in enumerate(["a", "b", "a"])]
    died = AttemptFailure("died", "")
    assert one.count_failure(died, 100.0)
    assert other.count_failure(died, 100.0)
    assert late.count_failure(died, 39.0)
    assert [trial.excuse("a", 100.0) for trial in trials] == [True, False, False]
    assert not one.excuse("a", 100.0)
    assert [trial.failed for trial in trials] == [0, 1, 1]


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
    """A trial of the sweep and Ray's name for its attempt, with what callbacks read of it."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.trial_id = number, name
        self.config: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.evaluated_params, self.metric_analysis, self.metric_n_steps = {}, {}, {}
        self.run_metadata = SimpleNamespace()


class NodeSweep:
    """Two nodes with two trials each, in flight."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger = ledger
        self.table = NodeTable(a=True, b=True)
        self.nodes = Nodes(self.table)
        self.driver = Driver(ledger, 4, self.nodes)
        self.callback = TuneCallback(self.driver.searcher, lambda: None)
        monkeypatch.setattr(tune, "read_error", lambda trial: trial.error)
        self.trials = [RayTrial(number, self.driver.ask()) for number in range(4)]
        for trial, actor in zip(self.trials, ["a", "a", "b", "b"], strict=True):
            self.start(trial, actor)

    def start(self, trial: RayTrial, actor: str) -> None:
        """Start an attempt, unless one is under way, on a node that has room for it."""
        searcher = self.driver.searcher
        while trial.trial_id not in searcher._running:
            searcher.slots = 4
            name = self.driver.ask()
            number = int(self.driver.in_flight[name].directory.name)
            next(other for other in self.trials if other.number == number).trial_id = name
        self.report(trial, TrialPlaced(f"{actor} {trial.trial_id}", actor))

    def report(self, trial: RayTrial, message: Any) -> None:
        self.callback.on_trial_result(0, [], trial, wrap_for_ray(message))

    def fail(self, trial: RayTrial, error: BaseException) -> None:
        if trial.trial_id not in self.driver.searcher._running:
            self.start(trial, "a")
        self.driver.in_flight.pop(trial.trial_id)
        trial.error = error
        self.callback.on_trial_error(0, [], trial)

    def get_reason_to_give_up(self, trial: RayTrial) -> str | Exception | None:
        waiting = self.driver.searcher._trials.get(trial.number)
        return waiting.given_up if waiting else self.ledger.get_record(trial.number).reason

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
    cloudpickle.dumps(TuneCallback(sweep.driver.searcher, lambda: others.clear()))


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
    for broken in (other, trial):
        sweep.start(broken, "b")
        sweep.fail(broken, DIED)
        assert sweep.get_reason_to_give_up(broken)
    sweep.table.alive["b"] = False
    sweep.nodes.refresh()
    assert sweep.get_reason_to_give_up(trial) is None
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
    sweep.driver.ask()
    assert sweep.ledger.get_record(0).state == "failed"
    assert "a long traceback" in (sweep.ledger.get_trial_directory(0) / "error.txt").read_text()


def test_a_trial_that_kills_node_after_node_is_given_up(sweep: NodeSweep):
    trial = sweep.trials[0]
    for _ in range(LOSSES):
        sweep.fail(trial, ActorUnavailableError("no route", None))
        sweep.start(trial, "a")
    assert sweep.get_reason_to_give_up(trial) is None
    sweep.report(trial, TrialUpdate(build_measurement(1)))
    for _ in range(LOSSES):
        sweep.fail(trial, ActorUnavailableError("no route", None))
        sweep.start(trial, "a")
        sweep.report(trial, TrialNotice("waits for the store"))
    assert sweep.get_reason_to_give_up(trial) is None
    for _ in range(1):
        sweep.fail(trial, ActorUnavailableError("no route", None))
    assert sweep.get_reason_to_give_up(trial) == lifecycle.LOST_AGAIN


def test_a_node_without_the_store_is_avoided_and_costs_no_attempt(sweep: NodeSweep):
    trial = sweep.trials[0]
    away = StoreUnreachableError("s3://bucket/night", "no route", 600)
    for _ in range(LOSSES):
        sweep.fail(trial, wrap_task_error(AttemptError("store", away.summary, away)))
        sweep.start(trial, "a")
    assert sweep.get_reason_to_give_up(trial) is None
    assert not (sweep.ledger.get_trial_directory(0) / "error.txt").exists()
    assert sweep.list_incidents()[0] == f"trial 0 leaves node h (a): {away.summary}"
    sweep.fail(trial, wrap_task_error(AttemptError("store", away.summary, away)))
    assert sweep.driver.ask() == sweep.driver.searcher.FINISHED
    assert str(sweep.driver.searcher.fatal) == str(away)
    assert sweep.ledger.get_record(0).state == "running"  # the same command resumes it


def test_a_crowded_gpu_costs_no_attempt_and_never_fails_a_trial(sweep: NodeSweep):
    trial = sweep.trials[0]
    crowded = wrap_task_error(AttemptError("gpu_contention", "other processes hold memory"))
    for _ in range(LOSSES):
        sweep.fail(trial, crowded)
        sweep.start(trial, "a")
    assert sweep.get_reason_to_give_up(trial) is None
    assert sweep.list_incidents()[0] == "trial 0 is tried again: other processes hold memory"
    sweep.report(trial, TrialUpdate(build_measurement(1)))
    for _ in range(LOSSES + 1):
        sweep.fail(trial, crowded)
    assert sweep.driver.ask() == sweep.driver.searcher.FINISHED
    assert "fix: end the other processes on that GPU" in str(sweep.driver.searcher.fatal)
    assert sweep.ledger.get_record(0).state == "running"  # the same command goes on with it


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
            trial,
            wrap_task_error(AttemptError("needs_new_process", "the process has grown too large")),
        )
        sweep.start(trial, "a")
    assert sweep.get_reason_to_give_up(trial) is None
    assert sweep.list_incidents() == []


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


def test_preemptions_and_starts_that_fail_are_no_endless_retries_of_ray(tmp_path, monkeypatch):
    # Source: `DefaultFailurePolicy.make_decision` of Ray Train, which retries both by default.
    runs = []

    class Trainer:
        def __init__(self, function, **settings):
            runs.append(settings)

        def fit(self):
            raise PREEMPTED

    monkeypatch.setattr(workers, "TorchTrainer", Trainer)
    monkeypatch.setattr(workers, "TuneReportCallback", UserCallback)  # outside of Tune
    attempt = build_attempt(build_trial_config(tmp_path), workers=2)
    with pytest.raises(AttemptError) as caught:
        workers.train_in_group(attempt)
    assert caught.value.cause == "lost"
    policy = DefaultFailurePolicy(runs[0]["run_config"].failure_config)
    assert policy.make_decision(PREEMPTED) is FailureDecision.RAISE
    late = ControllerError(WorkerGroupStartupTimeoutError(2))
    decisions = [policy.make_decision(late) for _ in range(workers.STARTS)]
    assert decisions == [*[FailureDecision.RETRY] * (workers.STARTS - 1), FailureDecision.RAISE]


def test_a_preempted_process_is_a_lost_node():
    failed = TrainingFailedError("two processes")
    failed.worker_failures = {0: ValueError("peer"), 1: RayActorError(preempted=True)}
    cause = workers.find_cause(failed, 2)
    assert isinstance(cause, AttemptError)
    assert cause.cause == "lost"


def test_a_process_resumes_from_what_is_on_disk_when_it_begins(tmp_path, monkeypatch):
    """Ray may start it again after the trial has written checkpoints, and deleted earlier ones."""
    attempt = build_attempt(build_trial_config(tmp_path), workers=2)
    directory = attempt.trial.directory
    resumed = []
    monkeypatch.setattr(
        workers.registry, "load", lambda _: lambda trial, resume, report: resumed.append(resume)
    )
    monkeypatch.setattr(workers, "read_shared_variables", lambda: None)
    workers.train_in_worker(wrap_for_ray(attempt))
    for step in (10, 20):
        write_checkpoint(directory, step, Cost(), lambda path: (path / "a").write_text("b"))
    (directory / "checkpoint-10" / "complete.json").unlink()
    workers.train_in_worker(wrap_for_ray(attempt))
    assert resumed == [None, directory / "checkpoint-20"]


PREEMPTED = PreemptionError(PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"n": [1]}))
