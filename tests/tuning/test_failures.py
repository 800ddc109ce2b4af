"""Retries of trials: lost nodes cost no attempt, and the number of attempts is limited."""

import pickle
from types import SimpleNamespace

import psutil
import pytest
from ray import cloudpickle, exceptions
from ray.air.execution._internal import RayActorManager
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
from gdpo_tune.tuning import attempts, lifecycle
from gdpo_tune.tuning.nodes import Nodes
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


def wrap_task_error(error):
    """Wrap an error of a trial's code as Ray passes it to the driver."""
    raised = exceptions.RayTaskError("train", "a long traceback", error).as_instanceof_cause()
    return pickle.loads(cloudpickle.dumps(raised))


NODE_LOST = exceptions.RayActorError(error_msg=f"The actor died because {NODE_DIED}. Node Id: b")
PREEMPTED = exceptions.RayActorError(preempted=True)
DIED = exceptions.ActorDiedError()
CUT_OFF = exceptions.ActorUnavailableError("no route to host", None)
BROKEN = wrap_task_error(ValueError("bad reward"))
OUTAGE = StoreUnreachableError("s3://bucket/night", "no route", 600)
AWAY = wrap_task_error(attempts.AttemptError("store", OUTAGE.summary, OUTAGE))
CROWDED = wrap_task_error(attempts.AttemptError("gpu_contention", "other processes hold memory"))
NO_DIRECTORY = wrap_task_error(attempts.AttemptError("directory", "waited 3 s for it"))
GROWN = wrap_task_error(
    attempts.AttemptError("needs_new_process", "the process has grown too large")
)


@pytest.mark.parametrize(
    ("error", "gone", "expected"),
    [
        (BROKEN, False, "error"),
        (BROKEN, True, "error"),
        (GROWN, False, "needs_new_process"),
        (wrap_task_error(attempts.AttemptError("lost", "a node died")), False, "lost"),
        (AWAY, False, "store"),
        (CROWDED, False, "gpu_contention"),
        (NO_DIRECTORY, True, "directory"),
        (DIED, False, "died"),
        (DIED, True, "lost"),
        (NODE_LOST, False, "lost"),
        (PREEMPTED, False, "lost"),
        (CUT_OFF, False, "lost"),
        (None, False, "error"),
    ],
)
def test_errors_are_classified(error, gone, expected, sweep):
    trial = attempts.OpenTrial(0, "gone" if gone else "a")
    assert sweep.driver.searcher._find_cause(describe_failure(error), trial).cause == expected


@pytest.mark.parametrize("error", [NODE_LOST, PREEMPTED])
def test_a_process_of_several_that_lost_its_node_is_no_failure(error):
    failed = TrainingFailedError("two processes")
    failed.worker_failures = {0: ValueError("connection closed by peer"), 1: error}
    cause = workers.find_cause(failed, 2)
    assert isinstance(cause, attempts.AttemptError)
    assert cause.cause == "lost"


def test_a_process_that_ray_killed_for_memory_has_died():
    """Ray's own manager ends the sweep: it takes the error for one that it does not know."""
    killed = exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")
    seen = []
    actor = SimpleNamespace(actor_id=1, _on_error=lambda _, error: seen.append(error))
    task = SimpleNamespace(_tracked_actor=actor, _on_error=None)
    with pytest.raises(RuntimeError, match="unexpected exception"):
        build_manager(RayActorManager)._actor_task_failed(task, killed)
    assert controller.RayActorManager is tune.ActorManager
    build_manager(tune.ActorManager)._actor_task_failed(task, killed)
    (error,) = seen
    assert "low on memory" in str(error)
    assert describe_failure(error).cause == "died"


def build_manager(kind):
    manager = object.__new__(kind)
    manager._failed_actor_ids = set()
    manager._cleanup_actor = lambda tracked_actor: None
    return manager


def test_a_process_is_excused_if_its_node_turns_out_to_have_died_with_it():
    one, other, late = trials = [
        attempts.OpenTrial(n, node) for n, node in enumerate(["a", "b", "a"])
    ]
    died = attempts.AttemptFailure("died", "")
    assert one.count_failure(died, 100.0)
    assert other.count_failure(died, 100.0)
    assert late.count_failure(died, 39.0)
    assert [trial.excuse("a", 100.0) for trial in trials] == [True, False, False]
    assert not one.excuse("a", 100.0)
    assert [trial.failed for trial in trials] == [0, 1, 1]


class NodeTable:
    """A fake of Ray's table of nodes."""

    def __init__(self, **alive):
        self.alive = alive

    def __call__(self):
        common = {"NodeManagerHostname": "h", "Resources": {"CPU": 2.0}}
        return [{"NodeID": name, "Alive": alive, **common} for name, alive in self.alive.items()]


def test_lost_and_joined_nodes_are_reported_once():
    table, changes = NodeTable(a=True, b=True, dead=False), []
    nodes = Nodes(table)
    nodes.on_change = lambda *changed: changes.append([[n.id for n in each] for each in changed])
    nodes.refresh()
    assert [node.id for node in nodes.list_alive()] == ["a", "b"]
    nodes.mark_lost("b")
    assert not nodes.is_alive("b")
    table.alive = {"a": True, "b": False, "c": True}
    nodes.refresh()
    nodes.refresh()
    assert changes == [[["b"], []], [[], ["c"]]]
    assert str(nodes.list_alive()[0]) == "h (a)"


class RayTrial:
    """A trial of the sweep and Ray's name for its attempt, with what callbacks read of it."""

    def __init__(self, number, name):
        self.number, self.trial_id = number, name
        self.config, self.error = {}, None
        self.evaluated_params, self.metric_analysis, self.metric_n_steps = {}, {}, {}
        self.run_metadata = SimpleNamespace()


class NodeSweep:
    """Two nodes with two trials each, in flight."""

    def __init__(self, ledger, monkeypatch):
        self.ledger = ledger
        self.table = NodeTable(a=True, b=True)
        self.nodes = Nodes(self.table)
        self.driver = Driver(ledger, 4, self.nodes)
        self.searcher = self.driver.searcher
        self.callback = TuneCallback(self.searcher, lambda: None)
        monkeypatch.setattr(tune, "read_error", lambda trial: trial.error)
        self.trials = [RayTrial(number, self.driver.ask()) for number in range(4)]
        for trial, actor in zip(self.trials, ["a", "a", "b", "b"], strict=True):
            self.start(trial, actor)

    def start(self, trial, actor):
        """Start an attempt, unless one is under way, on a node that has room for it."""
        while trial.trial_id not in self.driver.in_flight:
            self.searcher.slots = 4
            name = self.driver.ask()
            number = int(self.driver.in_flight[name].directory.name)
            self.trials[number].trial_id = name
        self.report(trial, attempts.TrialPlaced(f"{actor} {trial.trial_id}", actor))

    def report(self, trial, message):
        self.callback.on_trial_result(0, [], trial, attempts.wrap_for_ray(message))

    def fail(self, trial, error, times=1, restart=False):
        """Let attempts fail, and with `restart` begin the next one."""
        for _ in range(times):
            if trial.trial_id not in self.driver.in_flight:
                self.start(trial, "a")
            self.driver.in_flight.pop(trial.trial_id)
            trial.error = error
            self.callback.on_trial_error(0, [], trial)
            if restart:
                self.start(trial, "a")

    def lose(self, node):
        self.table.alive[node] = False
        self.nodes.refresh()

    def find_reason(self, trial):
        """Return why a trial was given up; None if it goes on."""
        waiting = self.searcher._trials.get(trial.number)
        return waiting.given_up if waiting else self.ledger.get_record(trial.number).reason

    def list_incidents(self):
        events = self.driver.events
        return [str(e.incident) for e in events if isinstance(e, IncidentOccurred)]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    with Ledger.open(load_code_spec(tmp_path, ["search.scheduler={type: fifo}"])) as ledger:
        ledger.begin_session(0.0, 4, {})
        yield NodeSweep(ledger, monkeypatch)


@pytest.fixture
def trial(sweep):
    return sweep.trials[0]


def test_ray_can_write_a_snapshot_where_other_processes_are_known(sweep):
    """A process that had children before the sweep could not start one."""
    others = {psutil.Process()}  # contains a lock
    cloudpickle.dumps(TuneCallback(sweep.searcher, lambda: others.clear()))


def test_a_lost_node_is_reported_once_with_its_trials(sweep):
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


def test_a_node_whose_processes_died_first_excuses_them(sweep):
    trial = sweep.trials[2]
    sweep.fail(trial, DIED, restart=True)
    sweep.lose("b")
    again, lost = sweep.list_incidents()[:2]
    assert again.startswith("trial 2 is tried again: the trial's process died")
    assert lost == "node h (b) was lost, with trials 2, 3"
    sweep.fail(trial, BROKEN, attempts.RETRIES)
    assert sweep.find_reason(trial) is None


def test_a_trial_that_was_given_up_is_excused_with_its_node_unless_it_already_ended(sweep):
    trial, other = sweep.trials[2:]
    for _ in range(attempts.RETRIES):
        sweep.fail(trial, BROKEN)
        sweep.fail(other, BROKEN)
    for broken in (other, trial):
        sweep.start(broken, "b")
        sweep.fail(broken, DIED)
        assert sweep.find_reason(broken)
    sweep.lose("b")
    assert sweep.find_reason(trial) is None
    assert sweep.find_reason(other)


def test_a_node_that_does_not_answer_is_lost_later(sweep):
    sweep.fail(sweep.trials[2], CUT_OFF, restart=True)
    sweep.lose("b")
    sweep.fail(sweep.trials[3], NODE_LOST)
    assert sweep.list_incidents() == [
        "trial 2 was cut off from node h (b)",
        "trial 2 resumes on node h (a)",
        "node h (b) was lost, with trials 2, 3",
    ]


def test_a_trial_that_fails_by_itself_is_given_up(sweep, trial):
    for error, times in ((BROKEN, attempts.RETRIES), (NODE_LOST, 1)):
        sweep.fail(trial, error, times)
        assert sweep.find_reason(trial) is None
    sweep.fail(trial, BROKEN)
    assert sweep.find_reason(trial) == "ValueError: bad reward"
    sweep.driver.ask()
    assert sweep.ledger.get_record(0).state == "failed"
    assert "a long traceback" in (sweep.ledger.get_trial_directory(0) / "error.txt").read_text()


def test_a_trial_that_kills_node_after_node_is_given_up(sweep, trial):
    sweep.fail(trial, CUT_OFF, attempts.LOSSES, restart=True)
    assert sweep.find_reason(trial) is None
    sweep.report(trial, attempts.TrialUpdate(build_measurement(1)))
    for _ in range(attempts.LOSSES):
        sweep.fail(trial, CUT_OFF, restart=True)
        sweep.report(trial, attempts.TrialNotice("waits for the store"))
    assert sweep.find_reason(trial) is None
    sweep.fail(trial, CUT_OFF)
    assert sweep.find_reason(trial) == lifecycle.LOST_AGAIN


def test_a_node_without_the_store_is_avoided_and_costs_no_attempt(sweep, trial):
    sweep.fail(trial, AWAY, attempts.LOSSES, restart=True)
    assert sweep.find_reason(trial) is None
    assert not (sweep.ledger.get_trial_directory(0) / "error.txt").exists()
    assert sweep.list_incidents()[0] == f"trial 0 leaves node h (a): {OUTAGE.summary}"
    sweep.fail(trial, AWAY)
    assert sweep.driver.ask() == sweep.searcher.FINISHED
    assert str(sweep.searcher.fatal) == str(OUTAGE)
    assert sweep.ledger.get_record(0).state == "running"  # the same command resumes it


def test_a_crowded_gpu_costs_no_attempt_and_never_fails_a_trial(sweep, trial):
    sweep.fail(trial, CROWDED, attempts.LOSSES, restart=True)
    assert sweep.find_reason(trial) is None
    assert sweep.list_incidents()[0] == "trial 0 is tried again: other processes hold memory"
    sweep.report(trial, attempts.TrialUpdate(build_measurement(1)))
    sweep.fail(trial, CROWDED, attempts.LOSSES + 1)
    assert sweep.driver.ask() == sweep.searcher.FINISHED
    assert "fix: end the other processes on that GPU" in str(sweep.searcher.fatal)
    assert sweep.ledger.get_record(0).state == "running"  # the same command goes on with it


@pytest.mark.parametrize(
    ("error", "incidents"), [(GROWN, []), (NO_DIRECTORY, ["trial 0 waited 3 s for it"] * 10)]
)
def test_a_change_of_process_or_a_lost_directory_uses_up_no_attempt(sweep, trial, error, incidents):
    sweep.fail(trial, error, 10, restart=True)
    assert sweep.find_reason(trial) is None
    assert sweep.list_incidents() == incidents


def test_a_store_error_can_be_pickled():
    error = attempts.AttemptError("store", OUTAGE.summary, OUTAGE)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), str(again.outage)) == (str(error), str(OUTAGE))


def test_the_number_of_running_trials_follows_the_slots_of_the_nodes(sweep):
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
    info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"n": [1]})
    preempted, runs = PreemptionError(info), []

    class Trainer:
        def __init__(self, function, **settings):
            runs.append(settings)

        def fit(self):
            raise preempted

    monkeypatch.setattr(workers, "TorchTrainer", Trainer)
    monkeypatch.setattr(workers, "TuneReportCallback", UserCallback)  # outside of Tune
    with pytest.raises(attempts.AttemptError) as caught:
        workers.train_in_group(build_attempt(build_trial_config(tmp_path), workers=2))
    assert caught.value.cause == "lost"
    policy = DefaultFailurePolicy(runs[0]["run_config"].failure_config)
    assert policy.make_decision(preempted) is FailureDecision.RAISE
    late = ControllerError(WorkerGroupStartupTimeoutError(2))
    decisions = [policy.make_decision(late) for _ in range(workers.STARTS)]
    assert decisions == [*[FailureDecision.RETRY] * (workers.STARTS - 1), FailureDecision.RAISE]


def test_a_process_resumes_from_what_is_on_disk_when_it_begins(tmp_path, monkeypatch):
    """Ray may start it again after the trial has written checkpoints, and deleted earlier ones."""
    attempt, resumed = build_attempt(build_trial_config(tmp_path), workers=2), []
    directory = attempt.trial.directory
    monkeypatch.setattr(
        workers.registry, "load", lambda _: lambda trial, resume, report: resumed.append(resume)
    )
    monkeypatch.setattr(workers, "read_shared_variables", lambda: None)
    workers.train_in_worker(attempts.wrap_for_ray(attempt))
    for step in (10, 20):
        write_checkpoint(directory, step, Cost(), lambda path: (path / "a").write_text("b"))
    (directory / "checkpoint-10" / "complete.json").unlink()
    workers.train_in_worker(attempts.wrap_for_ray(attempt))
    assert resumed == [None, directory / "checkpoint-20"]
