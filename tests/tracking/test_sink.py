"""The sink spools everything once, whatever earlier processes spooled."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

from gdpo_tune.core.events import (
    SweepFinished,
    SweepStarted,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.tracking import MlflowSink, front_projection, mlflow_sink
from gdpo_tune.tracking.spool import ServerUnavailable
from tests.support.tracking import (
    make_complete_trial,
    make_measurement,
    make_running_trial,
    make_tiny_spec,
)

LONG = 30.0


class Store:
    """A stand-in for MLflow that keeps messages, and merges them as MLflow would."""

    def __init__(self):
        self.messages = []
        self.identities = []
        self.unavailable = False

    def writer(self, uri, identity, delivered):
        self.identities.append(identity)
        return self

    def deliver(self, messages):
        if self.unavailable:
            raise ServerUnavailable("nobody there")
        self.messages += messages
        return []

    def reset(self):
        pass

    def delete_duplicates(self):
        pass

    def get_front_link(self):
        return "#/experiments/1"

    def contents(self, run, field):
        return [m[field] for m in self.messages if m["run"] == run and field in m]

    def tags(self, run):
        return {k: v for tags in self.contents(run, "tags") for k, v in tags.items()}

    def points(self, run, name):
        metrics = [point for metrics in self.contents(run, "metrics") for point in metrics]
        return [(step, value) for key, value, _, step in metrics if key == name]

    def artifacts(self):
        return [m["artifact"] for m in self.messages if "artifact" in m]


class Immediate:
    """An executor that works at once."""

    def __init__(self, *_):
        pass

    def submit(self, work, *arguments):
        job = Future()
        job.set_result(work(*arguments))
        return job

    def shutdown(self):
        pass


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(mlflow_sink, "MlflowWriter", store.writer)
    return store


@pytest.fixture
def spec(tmp_path):
    return make_tiny_spec(tmp_path)


def play(spec, *events):
    """One process of the sweep, from its first event to its end; returns the warning."""
    sink = MlflowSink(spec)
    for event in events:
        sink(event)
    return sink.close(LONG)


def steps(number, first, last):
    return [TrialProgress(number, make_measurement(step)) for step in range(first, last + 1)]


def test_measurements_that_a_trial_held_back_are_one_message(spec, store):
    earlier = [make_measurement(step) for step in (1, 2, 3)]
    play(
        spec,
        SweepStarted((), 1),
        TrialStarted(make_running_trial(0)),
        TrialProgress(0, make_measurement(4), earlier),
        SweepFinished((make_running_trial(0),), interrupted=True),
    )
    curves = [m["metrics"] for m in store.messages if m["run"] == "0" and "metrics" in m]
    losses = [[step for name, _, _, step in c if name == "train/loss"] for c in curves]
    assert losses == [[1, 2, 3, 4]]
    times = [when for name, _, when, _ in curves[0] if name == "train/loss"]
    assert times == sorted(times)
    spent = make_measurement(4).cost.seconds - make_measurement(1).cost.seconds
    assert times[3] - times[0] == int(1000 * spent)


def test_the_file_of_a_trial_that_is_spooled_as_ended_is_not_read_again(spec, store, monkeypatch):
    first = replace(make_complete_trial(0, 0.9, 0.1), directory=spec.directory / "0")
    second = replace(make_complete_trial(1, 0.4, 0.05), directory=spec.directory / "1")
    read = []
    monkeypatch.setattr(mlflow_sink, "read_steps", lambda directory: read.append(directory) or [])
    play(spec, SweepStarted((), 2), TrialStarted(make_running_trial(0)), TrialFinished(first))
    assert read == []
    play(spec, SweepStarted((first, second), 2))
    assert read == [second.directory]


def test_a_sweep_from_start_to_end(spec, store):
    first, second = make_complete_trial(0, 0.9, 0.1), make_complete_trial(1, 0.4, 0.05)
    failed = make_running_trial(2, state="failed", reason="loss is nan", finished=3000.0)
    warning = play(
        spec,
        SweepStarted((), 3),
        TrialStarted(make_running_trial(0)),
        *steps(0, 1, 40),
        TrialFinished(first),
        TrialStarted(make_running_trial(1)),
        TrialFinished(second),
        TrialStarted(make_running_trial(2)),
        TrialFinished(failed),
        SweepFinished((first, second, failed), interrupted=False),
    )
    assert warning == ""
    assert store.contents("sweep", "status") == ["RUNNING", "FINISHED"]
    assert store.tags("sweep")["identity"] == spec.compute_identity()
    assert store.tags("sweep")["role"] == "sweep"
    assert store.contents("0", "status") == ["RUNNING", "FINISHED"]
    assert store.contents("2", "status") == ["RUNNING", "FAILED"]
    assert store.tags("2")["reason"] == "loss is nan"
    assert store.contents("0", "name") == ["trial-000 gdpo"]
    assert [step for step, _ in store.points("0", "train/loss")] == list(range(1, 41))
    assert store.points("0", "validation/correctness") == [(20, 0.2), (40, 0.4)]
    assert store.points("0", "test/correctness") == [(0, 0.9)]
    assert store.tags("0")["pareto"] == "true"
    assert store.tags("1")["pareto"] == "false"
    assert store.tags("2")["pareto"] == "false"
    assert [step for step, _ in store.points("sweep", "hypervolume")] == [0, 1, 2]
    names = {a["name"] for a in store.artifacts()}
    assert names == {"spec.yaml", "front.csv", "policy/README.md"}
    assert store.tags("0")["mlflow.runColor"] == "#0072b2"
    assert store.tags("1")["mlflow.runColor"] != "#0072b2"
    assert [entry["context"] for entry in store.contents("0", "inputs")[0]] == [
        "training",
        "validation",
        "testing",
    ]
    assert store.contents("sweep", "models")[0]["versions"][0]["trial"] == "0"


def test_only_changes_of_the_front_are_spooled(spec, store, monkeypatch):
    monkeypatch.setattr(front_projection, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(front_projection, "TIME_SHARE", float("inf"))
    monkeypatch.setattr(front_projection, "ThreadPoolExecutor", Immediate)
    records = [
        make_complete_trial(0, 0.5, 0.5),
        make_complete_trial(1, 0.6, 0.4),
        make_complete_trial(2, 0.7, 0.7),
    ]
    finished = [TrialFinished(record) for record in records]
    play(spec, SweepStarted((), 3), *finished, SweepFinished(tuple(records), interrupted=False))
    assert [t["pareto"] for t in store.contents("0", "tags") if "pareto" in t] == ["true", "false"]
    assert [value for _, value in store.points("0", "pareto/rank")] == [0.0, 1.0]
    assert [value for _, value in store.points("2", "pareto/rank")] == [0.0]
    assert [value for _, value in store.points("sweep", "pareto/size")] == [1.0, 2.0, 1.0]


def test_the_tag_of_a_deleted_checkpoint_is_removed(spec, store, tmp_path):
    record = make_complete_trial(0, 0.9, 0.1, checkpoint=tmp_path / "checkpoint-40")
    pruned = replace(record, checkpoint=None)
    play(spec, SweepStarted((), 1), TrialFinished(record), SweepFinished((pruned,), False))
    assert [t["checkpoint"] for t in store.contents("0", "tags") if "checkpoint" in t] == [
        str(tmp_path / "checkpoint-40"),
        "",
    ]


def test_a_finished_sweep_spools_nothing_new(spec, store):
    record = make_complete_trial(0, 0.9, 0.1)
    end = SweepFinished((record,), interrupted=False)
    play(spec, SweepStarted((), 1), TrialStarted(make_running_trial(0)), TrialFinished(record), end)
    before = len(store.messages)
    play(spec, SweepStarted((record,), 1), end)
    assert store.messages[before:] == []
    assert store.identities[0].sweep_id == store.identities[1].sweep_id


def test_a_finished_sweep_runs_again_once_a_trial_is_added(spec, store):
    record = make_complete_trial(0, 0.9, 0.1)
    end = SweepFinished((record,), interrupted=False)
    play(spec, SweepStarted((), 1), TrialStarted(make_running_trial(0)), TrialFinished(record), end)
    more = make_complete_trial(1, 0.5, 0.5)
    end = SweepFinished((record, more), interrupted=False)
    play(
        spec,
        SweepStarted((record,), 2),
        TrialStarted(make_running_trial(1)),
        TrialFinished(more),
        end,
    )
    assert store.contents("sweep", "status") == ["RUNNING", "FINISHED", "RUNNING", "FINISHED"]


def test_a_sweep_that_crashes_before_its_first_trial_has_failed(spec, store):
    play(spec, SweepStarted((), 1))
    assert store.contents("sweep", "status") == ["FAILED"]


def test_records_that_a_crash_kept_from_the_spool_are_added_at_the_next_start(spec, store):
    play(spec, SweepStarted((), 2), TrialStarted(make_running_trial(0)))
    records = (
        make_complete_trial(0, 0.9, 0.1),
        make_complete_trial(1, 0.1, 0.9),
    )  # the ledger knows more
    play(spec, SweepStarted(records, 2))
    assert store.contents("0", "status")[-1] == "FINISHED"
    assert store.points("1", "test/length") == [(0, 0.9)]


def test_step_metrics_are_spooled_once_over_an_interruption(spec, store):
    play(spec, SweepStarted((), 1), TrialStarted(make_running_trial(0)), *steps(0, 1, 30))
    again = [TrialStarted(make_running_trial(0)), *steps(0, 21, 40)]
    play(spec, SweepStarted((make_running_trial(0),), 1), *again)
    assert [step for step, _ in store.points("0", "train/loss")] == list(range(1, 41))


def test_step_metrics_that_were_written_but_not_reported_are_read(spec, store):
    directory = spec.directory / "trials" / "0"
    for step in range(1, 13):
        append_step(directory, make_measurement(step))
    play(spec, SweepStarted((), 1), TrialStarted(make_running_trial(0)), *steps(0, 1, 10))
    play(spec, SweepStarted((make_running_trial(0, directory=directory),), 1))
    assert [step for step, _ in store.points("0", "train/loss")] == list(range(1, 13))


def test_an_interruption_ends_running_trials(spec, store):
    end = SweepFinished((make_running_trial(0),), interrupted=True)
    play(spec, SweepStarted((), 1), TrialStarted(make_running_trial(0)), end)
    assert store.contents("0", "status") == ["RUNNING", "KILLED"]
    assert store.contents("sweep", "status") == ["RUNNING", "KILLED"]
    play(spec, SweepStarted((make_running_trial(0),), 1), TrialStarted(make_running_trial(0)))
    assert store.contents("0", "status")[2] == "RUNNING"


def test_a_sweep_that_crashes_has_failed(spec, store):
    play(spec, SweepStarted((), 1), TrialStarted(make_running_trial(0)))
    assert store.contents("sweep", "status") == ["RUNNING", "FAILED"]
    assert store.contents("0", "status") == ["RUNNING", "KILLED"]


def test_another_ledger_under_the_same_name_has_runs_of_its_own(spec, store):
    play(spec, SweepStarted((), 1), TrialStarted(make_running_trial(0)))
    play(spec, SweepStarted((), 1))
    first, second = store.identities
    assert first.sweep_id != second.sweep_id
    assert not second.adopt


def test_a_sweep_whose_spool_is_lost_adopts_the_earlier_runs(spec, store):
    play(spec, SweepStarted((make_complete_trial(0, 0.5, 0.5),), 1))
    assert store.identities[0].adopt


def test_a_number_that_is_used_again_replaces_its_run(spec, store):
    play(
        spec,
        SweepStarted((), 2),
        TrialStarted(make_running_trial(0)),
        TrialStarted(make_running_trial(1)),
    )
    other = make_running_trial(1, params={"learning_rate": 7.0})
    play(spec, SweepStarted((make_running_trial(0),), 2), TrialStarted(other))
    renewed = [m for m in store.messages if m.get("renew")]
    assert [(m["run"], m["params"]["learning_rate"]) for m in renewed] == [("1", "7.0")]
    assert renewed[0]["name"] == "trial-001 gdpo"


def test_pictures_are_attached_if_they_exist(spec, store):
    with MlflowSink(spec) as sink:
        sink(SweepStarted((), 0))
        (spec.directory / "report.html").write_text("<html>")
        sink.log_figures()
    files = [artifact["file"] for artifact in store.artifacts() if "file" in artifact]
    assert files == [str(spec.directory / "report.html")]


def test_pictures_are_sent_again_only_if_they_changed(spec, store):
    for content in ("first", "first", "second"):
        with MlflowSink(spec) as sink:
            sink(SweepStarted((), 0))
            (spec.directory / "front.png").write_text(content)
            sink.log_figures()
            sink.log_figures()
    files = [artifact for artifact in store.artifacts() if "file" in artifact]
    assert [artifact["file"] for artifact in files] == [str(spec.directory / "front.png")] * 2


def test_a_password_in_the_uri_is_not_spooled(tmp_path, store):
    uri = "postgresql://me:secret@127.0.0.1:1/db"
    play(make_tiny_spec(tmp_path, f"tracking.uri={uri}"), SweepStarted((), 0))
    assert "secret" not in str(store.messages)


def test_messages_that_are_left_are_reported_and_sent_by_the_next_process(spec, store):
    store.unavailable = True
    sink = MlflowSink(spec)
    sink(SweepStarted((), 1))
    sink(TrialStarted(make_running_trial(0)))
    warning = sink.close(0.01)
    assert "updates did not reach sqlite" in warning
    assert "sent the next time the same command runs" in warning
    assert store.messages == []

    store.unavailable = False
    assert play(spec, SweepStarted((make_running_trial(0),), 1)) == ""
    assert store.contents("0", "name") == ["trial-000 gdpo"]


def test_the_warning_is_printed_at_the_end(spec, store, capsys, monkeypatch):
    monkeypatch.setattr(mlflow_sink, "CLOSING_SECONDS", 0.01)
    store.unavailable = True
    with MlflowSink(spec) as sink:
        sink(SweepStarted((), 1))
    assert capsys.readouterr().err.startswith("warning: ")


def test_only_a_final_front_is_registered(spec, store):
    record = make_complete_trial(0, 0.9, 0.1)
    play(spec, SweepStarted((), 1), TrialFinished(record), SweepFinished((record,), True))
    assert store.contents("sweep", "models") == []
    play(spec, SweepStarted((record,), 1), SweepFinished((record,), False))
    play(spec, SweepStarted((record,), 1), SweepFinished((record,), False))
    assert len(store.contents("sweep", "models")) == 1


def test_views_are_spooled_once(spec, store):
    play(spec, SweepStarted((), 1))
    play(spec, SweepStarted((), 1))
    (tags,) = store.contents("sweep", "experiment")
    assert len(tags) == 5
    assert "mlflow.note.content" in tags


def test_state_and_link(spec, store):
    sink = MlflowSink(spec)
    assert sink.get_state() is None
    assert sink.get_front_link() == ""
    sink(SweepStarted((), 1))
    assert sink.close(LONG) == ""
    assert sink.get_state() is None
    assert sink.get_front_link() == "#/experiments/1"


def test_nothing_is_touched_before_the_ledger_is_held(spec, store):
    with MlflowSink(spec) as sink:
        sink.log_figures()
    assert not spec.directory.exists()
    assert store.identities == []
