"""MLflow ends up with what the ledger holds, once, whatever happened on the way."""

import time
from dataclasses import replace
from importlib import import_module

import pytest
from mlflow.exceptions import MlflowException

from gdpo_tune.core.events import (
    SweepFinished,
    SweepStarted,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.tracking import desired_runs, mlflow_sink, mlflow_store
from gdpo_tune.tracking.mlflow_sink import MlflowTracker
from tests.support.fake_mlflow import REFUSED, FakeMlflow
from tests.support.tracking import (
    make_complete_trial,
    make_measurement,
    make_running_trial,
    make_tiny_spec,
)

LONG = 60.0


@pytest.fixture
def mlflow(monkeypatch):
    import_module("mlflow.store.db.utils")  # takes seconds, which are not those of a test
    fake = FakeMlflow()
    monkeypatch.setattr("mlflow.MlflowClient", fake)
    monkeypatch.setattr(mlflow_sink, "INTERVAL", 0.001)
    monkeypatch.setattr(mlflow_sink, "CLOSING_INTERVAL", 0.001)
    return fake


@pytest.fixture
def spec(tmp_path):
    return make_tiny_spec(tmp_path, "tracking.uri=http://mlflow")


def started(*records, sweep_id="s"):
    return SweepStarted(records, sweep_id=sweep_id)


def start_tracker(spec, *events):
    sink = MlflowTracker(spec)
    for event in events:
        sink(event)
    return sink


def send(spec, *events, timeout=LONG):
    """One process of the sweep, from its first event to its end; returns the warning."""
    return start_tracker(spec, *events).close(timeout)


def play(spec, *events):
    """The same, where everything arrives."""
    assert send(spec, *events) == ""


def wait_until_sent(sink):
    deadline = time.monotonic() + LONG
    while sink.get_state().pending:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_until_away(sink):
    deadline = time.monotonic() + LONG
    while sink.get_state().kind != "away":
        assert time.monotonic() < deadline
        time.sleep(0.001)


def train(spec, first, last):
    """Train trial 0 from step `first` to `last`: its events, and the lines of its file."""
    events = [TrialStarted(make_running_trial(0, directory=spec.directory / "trials" / "0"))]
    for step in range(first, last + 1):
        append_step(spec.directory / "trials" / "0", make_measurement(step))
        events.append(TrialProgress(0, make_measurement(step)))
    return events


def curve(run, name):
    return [(step, value) for key, value, _, step in run.points if key == name]


def list_steps(mlflow):
    """Return the steps of trial 0 for which MLflow has a loss."""
    return [step for step, _ in curve(mlflow.by_key()["0"], "train/loss")]


def fail_with(error, *methods):
    """Return a function that fails requests of some methods, or of all."""

    def fail(method, *_):
        if not methods or method in methods:
            raise error

    return fail


AWAY = MlflowException("nobody there")


def test_a_sweep_from_start_to_end(spec, mlflow):
    mlflow.experiment_tags["mlflow.note.content"] = "a line of another sweep"
    first = make_complete_trial(0, 0.9, 0.1, directory=spec.directory / "trials" / "0")
    second = make_complete_trial(1, 0.4, 0.05)
    failed = make_running_trial(2, state="failed", reason="loss is nan", finished=3000.0)
    play(
        spec,
        *(started(), *train(spec, 1, 40), TrialFinished(first)),
        *(TrialStarted(make_running_trial(1)), TrialFinished(second)),
        *(TrialStarted(make_running_trial(2)), TrialFinished(failed)),
        SweepFinished((first, second, failed), interrupted=False),
    )
    runs = mlflow.by_key()
    assert [runs[key].status for key in ("sweep", "0", "2")] == ["FINISHED", "FINISHED", "FAILED"]
    assert [runs[key].end for key in "02"] == [2_000_000, 3_000_000]
    assert runs["sweep"].end == pytest.approx(1000 * time.time(), abs=3_600_000)
    assert runs["sweep"].tags["identity"] == spec.compute_identity()
    assert runs["2"].tags["reason"] == "loss is nan"
    assert runs["1"].name == "trial-001 gdpo"
    assert list_steps(mlflow) == list(range(1, 41))
    assert curve(runs["0"], "validation/correctness") == [(20, 0.2), (40, 0.4)]
    assert curve(runs["0"], "test/correctness") == [(0, 0.9)]
    assert [runs[key].tags["pareto"] for key in "012"] == ["true", "false", "false"]
    assert [step for step, _ in curve(runs["sweep"], "hypervolume")] == [0, 1, 2]
    files = {("sweep", "spec.yaml"), ("sweep", "front.csv"), ("0", "policy/README.md")}
    assert set(mlflow.files) == files
    assert len(runs["0"].inputs) == 3
    assert [version.tags["trial"] for version in mlflow.versions.values()] == ["0"]
    assert len(mlflow.experiment_tags) == 5
    note = mlflow.experiment_tags.pop("mlflow.note.content").splitlines()
    assert (len(note), note[0]) == (2, "a line of another sweep")
    assert all(view.startswith("{") for view in mlflow.experiment_tags.values())


def test_the_same_again_writes_nothing(spec, mlflow):
    record = make_complete_trial(0, 0.9, 0.1)
    end = SweepFinished((record,), interrupted=False)
    play(spec, started(), TrialStarted(make_running_trial(0)), TrialFinished(record), end)
    done = len(mlflow.requests)
    play(spec, started(record), end)
    reading = {"get_experiment_by_name", "search_runs", "get_experiment"}
    registry = {"search_registered_models", "search_model_versions", "set_registered_model_alias"}
    assert {name for name, *_ in mlflow.requests[done:]} <= reading | registry


def test_the_file_of_a_trial_that_mlflow_shows_as_ended_is_not_read(spec, mlflow, monkeypatch):
    first = make_complete_trial(0, 0.9, 0.1, directory=spec.directory / "0")
    second = make_complete_trial(1, 0.4, 0.05, directory=spec.directory / "1")
    play(spec, started(), TrialStarted(make_running_trial(0)), TrialFinished(first))
    read = []

    class Reader(desired_runs.StepsReader):
        def __init__(self, directory):
            read.append(directory)
            super().__init__(directory)

    monkeypatch.setattr(desired_runs, "StepsReader", Reader)
    play(spec, started(first, second))
    assert read == [second.directory]


def test_a_trial_that_ran_again_within_one_comparison_lacks_no_point(spec, mlflow):
    record = make_complete_trial(0, 0.9, 0.1, directory=spec.directory / "trials" / "0")
    play(spec, started(), *train(spec, 1, 20), TrialFinished(record))
    play(spec, started(record), *train(spec, 21, 40), TrialFinished(record))
    assert list_steps(mlflow) == list(range(1, 41))


def test_only_changes_of_the_front_are_sent(spec, mlflow, monkeypatch):
    monkeypatch.setattr(desired_runs, "MIN_INTERVAL", 0.0)
    monkeypatch.setattr(desired_runs, "MAX_CPU_SHARE", float("inf"))
    values = [(0.5, 0.5), (0.6, 0.4), (0.7, 0.7)]
    records = [make_complete_trial(number, *value) for number, value in enumerate(values)]
    sink = start_tracker(spec, started())
    for record in records:
        sink(TrialFinished(record))
        wait_until_sent(sink)
    sink(SweepFinished(tuple(records), interrupted=False))
    sink.close(LONG)
    runs = mlflow.by_key()
    ranks = {key: [value for _, value in curve(runs[key], "pareto/rank")] for key in "02"}
    assert ranks == {"0": [0.0, 1.0], "2": [0.0]}
    assert [value for _, value in curve(runs["sweep"], "pareto/size")] == [1.0, 2.0, 1.0]


def test_the_tag_of_a_deleted_checkpoint_is_removed(spec, mlflow, tmp_path):
    record = make_complete_trial(0, 0.9, 0.1, checkpoint=tmp_path / "checkpoint-40")
    play(spec, started(), TrialFinished(record))
    assert mlflow.by_key()["0"].tags["checkpoint"] == str(tmp_path / "checkpoint-40")
    pruned = replace(record, checkpoint=None)
    play(spec, started(pruned), SweepFinished((pruned,), interrupted=False))
    assert mlflow.by_key()["0"].tags["checkpoint"] == ""


def test_a_finished_sweep_runs_again_once_a_trial_is_added(spec, mlflow):
    record, more = make_complete_trial(0, 0.9, 0.1), make_complete_trial(1, 0.5, 0.5)
    play(spec, started(), TrialStarted(make_running_trial(0)), SweepFinished((record,), False))
    sink = start_tracker(spec, started(record), TrialStarted(make_running_trial(1)))
    wait_until_sent(sink)
    sink(SweepFinished((record, more), interrupted=False))
    sink.close(LONG)
    assert mlflow.by_key()["sweep"].statuses == ["RUNNING", "FINISHED", "RUNNING", "FINISHED"]


@pytest.mark.parametrize("news", [[], [TrialStarted(make_running_trial(0))]])
def test_a_sweep_that_crashes_has_failed(spec, mlflow, news):
    play(spec, started(), *news)
    runs = mlflow.by_key()
    assert runs["sweep"].status == "FAILED"
    assert [runs[key].status for key in runs if key != "sweep"] == ["KILLED"] * len(news)


def test_a_finished_sweep_that_goes_on_and_crashes_before_it_sends_has_failed(spec, mlflow):
    record = make_complete_trial(0, 0.9, 0.1)
    play(spec, started(), SweepFinished((record,), interrupted=False))
    play(spec, started(record))
    assert mlflow.by_key()["sweep"].status == "FINISHED", "it has started nothing"
    play(spec, started(record), TrialStarted(make_running_trial(1)))
    runs = mlflow.by_key()
    assert [runs[key].status for key in ("sweep", "0", "1")] == ["FAILED", "FINISHED", "KILLED"]


def test_records_that_a_crash_kept_from_mlflow_are_added_at_the_next_start(spec, mlflow):
    play(spec, started(), TrialStarted(make_running_trial(0)))
    play(spec, started(make_complete_trial(0, 0.9, 0.1), make_complete_trial(1, 0.1, 0.9)))
    assert mlflow.by_key()["0"].status == "FINISHED"
    assert curve(mlflow.by_key()["1"], "test/length") == [(0, 0.9)]


def test_step_metrics_are_stored_once_over_an_interruption(spec, mlflow):
    """A trial that resumes from a checkpoint repeats steps that MLflow has."""
    play(spec, started(), *train(spec, 1, 30))
    before = list(mlflow.by_key()["0"].points)
    record = make_running_trial(0, directory=spec.directory / "trials" / "0")
    play(spec, started(record), *train(spec, 21, 40))
    points = mlflow.by_key()["0"].points
    assert points[: len(before)] == before
    assert list_steps(mlflow) == list(range(1, 41))


def test_step_metrics_that_were_written_but_not_reported_are_read(spec, mlflow):
    *events, _, _ = train(spec, 1, 12)
    play(spec, started(), *events)
    assert list_steps(mlflow) == list(range(1, 13))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("batches", [0, 1, 2, 5])
def test_a_kill_between_two_batches_loses_and_repeats_nothing(spec, mlflow, monkeypatch, batches):
    monkeypatch.setattr(mlflow_store, "METRICS_PER_BATCH", 10)
    directory, done = spec.directory / "trials" / "0", []
    train(spec, 1, 40)

    def kill(method, *arguments):
        done.extend([True] * (method == "log_batch" and len(mlflow.runs) > 1))
        if len(done) > batches:
            raise SystemExit

    mlflow.fail = kill
    record = make_complete_trial(0, 0.9, 0.1, directory=directory)
    send(spec, started(record))
    before = list(mlflow.by_key()["0"].points)
    assert len(before) == 10 * batches
    assert "state" not in mlflow.by_key()["0"].tags
    mlflow.fail = lambda *_: None
    play(spec, started(record))
    points = mlflow.by_key()["0"].points
    assert points[: len(before)] == before
    assert len({(name, step) for name, _, _, step in points}) == len(points)
    assert list_steps(mlflow) == list(range(1, 41))
    assert mlflow.by_key()["0"].tags["state"] == "complete"


def test_a_point_has_the_time_at_which_its_step_was_measured(spec, mlflow):
    directory = spec.directory / "trials" / "0"
    for step, when in [(1, 5000.0), (2, 7000.0)]:
        append_step(directory, replace(make_measurement(step), time=when))
    play(spec, started(make_running_trial(0, directory=directory)))
    times = [when for name, _, when, _ in mlflow.by_key()["0"].points if name == "train/loss"]
    assert times == [5_000_000, 7_000_000]


@pytest.mark.parametrize("state", ["running", "complete", "failed"])
def test_measurements_on_an_object_store_are_read_there(spec, mlflow, tmp_path, state):
    store, copy = tmp_path / "store" / "trials" / "0", spec.directory / "trials" / "0"
    places = {"directory": copy, "address": f"file://{store}"}
    for step in range(1, 41):
        append_step(store, make_measurement(step))
    append_step(copy, make_measurement(1))
    events = [TrialStarted(make_running_trial(0, **places)), TrialProgress(0, make_measurement(40))]
    if state != "running":
        events.append(TrialFinished(make_complete_trial(0, 0.9, 0.1, state=state, **places)))
    play(spec, started(), *events)
    assert list_steps(mlflow) == list(range(1, 41))


def test_a_sweep_that_has_ended_is_sent_at_once(spec, mlflow, monkeypatch):
    monkeypatch.setattr(mlflow_sink, "INTERVAL", 10 * LONG)
    record = make_complete_trial(0, 0.9, 0.1)
    sink = start_tracker(spec, started(record), SweepFinished((record,), interrupted=False))
    wait_until_sent(sink)
    assert mlflow.by_key()["sweep"].status == "FINISHED"
    sink.close(LONG)


def test_an_interruption_ends_running_trials(spec, mlflow):
    end = SweepFinished((make_running_trial(0),), interrupted=True)
    play(spec, started(), TrialStarted(make_running_trial(0)), end)
    runs = mlflow.by_key()
    assert (runs["sweep"].status, runs["0"].status) == ("KILLED", "KILLED")
    assert mlflow.versions == {}, "only a final front is registered"
    again = make_running_trial(0)
    sink = start_tracker(spec, started(again), TrialStarted(again))
    wait_until_sent(sink)
    assert runs["0"].status == "RUNNING"
    sink.close(LONG)


def test_another_ledger_under_the_same_name_has_runs_of_its_own(spec, mlflow):
    play(spec, started(), TrialStarted(make_running_trial(0)))
    play(spec, started(sweep_id="other"))
    assert [run.tags["role"] for run in mlflow.runs.values()].count("sweep") == 2


def test_of_runs_that_were_created_twice_the_one_with_more_content_stays(spec, mlflow):
    """A server that hung may carry out a request after it was repeated; others' runs stay."""
    record = make_complete_trial(0, 0.5, 0.5)
    play(spec, started(record))
    runs, sweep = dict(mlflow.runs), mlflow.by_key()["sweep"]
    for run in runs.values():
        mlflow.create_run("1", tags={**run.tags, "pareto_view": ""})
    mlflow.create_run("1", tags={**sweep.tags, "sweep": "huge"}, run_name="of another sweep")
    for name in ("notes", "more notes"):  # of people
        mlflow.create_run("1", tags={"mlflow.parentRunId": sweep.id}, run_name=name)
    play(spec, started(record))
    others = [run.name for id, run in mlflow.runs.items() if id not in runs]
    assert runs.keys() < mlflow.runs.keys()
    assert others == ["of another sweep", "notes", "more notes"]


def test_a_number_that_is_used_again_replaces_its_run(spec, mlflow):
    play(spec, started(), TrialStarted(make_running_trial(1)))
    other = make_running_trial(1, params={"learning_rate": 7.0})
    play(spec, started(), TrialStarted(other))
    assert mlflow.by_key()["1"].params["learning_rate"] == "7.0"
    assert len(mlflow.runs) == 2


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("key", ["0", "sweep"])
def test_a_run_that_a_person_deleted_stays_deleted(spec, mlflow, key, during):
    """mlflow-export-import#178: what a person did in MLflow was undone; all else is sent."""
    first, second = make_complete_trial(0, 0.9, 0.1), make_complete_trial(1, 0.5, 0.5)
    sink = start_tracker(spec, started(), TrialStarted(make_running_trial(0)))
    wait_until_sent(sink)
    if not during:
        sink.close(LONG)
        sink = MlflowTracker(spec)
    mlflow.delete_run(mlflow.by_key()[key].id)
    if not during:
        sink(started())
    end = SweepFinished((first, second), interrupted=False)
    for event in (TrialFinished(first), TrialFinished(second), end):
        sink(event)
    assert sink.close(LONG) == ""
    assert set(mlflow.by_key()) == {"sweep": {"0"}, "0": {"sweep", "1"}}[key]
    (deleted,) = mlflow.deleted.values()
    assert deleted.status != "FINISHED"


def test_a_name_that_a_person_gave_stays(spec, mlflow):
    """mlflow-export-import#178: a renamed run was renamed again; one of ours follows the knee."""
    records = [make_complete_trial(0, 0.9, 0.1), make_complete_trial(1, 0.5, 0.5)]
    play(spec, started(records[0]), SweepFinished((records[0],), interrupted=False))
    assert mlflow.by_key()["0"].name == "trial-000 gdpo, knee"
    mlflow.by_key()["0"].tags["mlflow.runName"] = mlflow.by_key()["0"].name = "the one we ship"
    mlflow.by_key()["sweep"].tags["mlflow.runName"] = "nightly of May"
    play(spec, started(*records), SweepFinished(tuple(records), interrupted=False))
    assert mlflow.by_key()["0"].name == "the one we ship"
    assert mlflow.by_key()["sweep"].tags["mlflow.runName"] == "nightly of May"
    better = make_complete_trial(2, 0.9, 0.9)
    play(spec, started(*records, better), SweepFinished((*records, better), interrupted=False))
    assert mlflow.by_key()["1"].name == "trial-001 gdpo"
    assert mlflow.by_key()["2"].name == "trial-002 gdpo, knee"


def test_pictures_are_sent_again_only_if_they_changed(spec, mlflow):
    spec.directory.mkdir(parents=True)
    for content in ("first", "first", "second"):
        with MlflowTracker(spec) as sink:
            sink(started())
            write_atomically(spec.directory / "front.png", content)
            sink.log_figures()
            sink.log_figures()
    assert mlflow.files.count(("sweep", "front.png")) == 2


def test_a_server_that_is_away_gets_everything_later(spec, mlflow):
    mlflow.fail = fail_with(AWAY)
    sink = start_tracker(spec, started(), *train(spec, 1, 10))
    wait_until_away(sink)
    assert "are kept and will be sent: MlflowException: nobody there" in str(sink.get_state())
    mlflow.fail = lambda *_: None
    assert sink.close(LONG) == ""
    assert list_steps(mlflow) == list(range(1, 11))


def test_updates_that_are_left_are_reported_and_sent_by_the_next_process(spec, mlflow):
    mlflow.fail = fail_with(AWAY)
    warning = send(spec, started(), TrialStarted(make_running_trial(0)), timeout=0.05)
    assert "updates did not reach http://mlflow" in warning
    assert "sent the next time the same command runs" in warning
    mlflow.fail = lambda *_: None
    play(spec, started(make_running_trial(0)))
    assert mlflow.by_key()["0"].name == "trial-000 gdpo"


def test_a_refused_run_does_not_delay_the_others(spec, mlflow):
    def fail(method, *arguments):
        if method == "create_run" and len(arguments) > 2 and arguments[2]["trial"] == "0":
            raise MlflowException("never", REFUSED)

    mlflow.fail = fail
    events = [TrialStarted(make_running_trial(number)) for number in (0, 1)]
    assert "refused updates of trial 0" in send(spec, started(), *events)
    assert set(mlflow.by_key()) == {"sweep", "1"}


def test_a_decoration_that_is_refused_costs_itself_alone(spec, mlflow):
    """mlflow#16215: MLflow 2.22 takes tags of at most 5,000 characters, and our views have more."""

    def fail(method, *arguments):
        if method == "set_experiment_tag" and "View" in arguments[1]:
            raise MlflowException("exceeds the maximum length of 5000 characters", REFUSED)

    mlflow.fail = fail
    mlflow.refused_keys = {"normalization"}
    warning = send(spec, started(), TrialFinished(make_complete_trial(0, 0.9, 0.1)))
    assert "refused updates of the experiment's views: MlflowException: exceeds" in warning
    assert "refused updates of trial 0: normalization: MlflowException: not this one" in warning
    assert "updates did not reach" not in warning
    run = mlflow.by_key()["0"]
    assert run.status == "FINISHED"
    assert "test/correctness" in [name for name, *_ in run.points]
    assert "group_size" in run.params
    assert "normalization" not in run.params
    assert "mlflow.note.content" in mlflow.experiment_tags


def test_files_that_cannot_be_stored_delay_nothing_and_are_tried_again(spec, mlflow, monkeypatch):
    record = make_complete_trial(0, 0.9, 0.1)
    mlflow.fail = fail_with(MlflowException("no room"), "log_text")
    sink = start_tracker(spec, started(), TrialFinished(record))
    send_all = sink._send

    def send_in_time(store, *, is_closing):
        """Let the time be over with the first pass at the end, however long that takes."""
        send_all(store, is_closing=is_closing)
        sink._deadline = 0.0 if is_closing else sink._deadline

    monkeypatch.setattr(sink, "_send", send_in_time)
    warning = sink.close(LONG)
    assert "files of the sweep could not be stored: MlflowException: no room" in warning
    assert mlflow.by_key()["0"].status == "FINISHED"
    mlflow.fail = lambda *_: None
    play(spec, started(record))
    assert ("sweep", "spec.yaml") in mlflow.files


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_crashes_is_reported(spec, mlflow, monkeypatch):
    monkeypatch.setattr(desired_runs.DesiredRuns, "refresh_front", lambda *_: 1 / 0)
    assert "crashed" in send(spec, started(), TrialStarted(make_running_trial(0)))
    mlflow.fail = fail_with(AWAY)
    sink = start_tracker(spec, started())
    wait_until_away(sink)
    monkeypatch.setattr(desired_runs.DesiredRuns, "take", lambda *_: 1 / 0)
    sink(TrialStarted(make_running_trial(0)))
    assert "the tracking thread crashed" in sink.close(LONG), "that MLflow was away is not why"


def test_state_and_link(spec, mlflow):
    sink = MlflowTracker(spec)
    assert sink.get_state() is None
    assert sink.get_front_link() == ""
    sink(started())
    assert sink.close(LONG) == ""
    assert sink.get_state() is None
    assert sink.get_front_link().startswith("http://mlflow/#/experiments/1/runs?")


def test_nothing_is_touched_before_the_ledger_is_held(spec, mlflow):
    with MlflowTracker(spec) as sink:
        sink.log_figures()
    assert not spec.directory.exists()
    assert mlflow.requests == []
