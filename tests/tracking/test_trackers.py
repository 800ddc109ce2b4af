"""Weights & Biases, TensorBoard and Trackio: the real packages, and what they stored, read back."""

import errno
import json
import struct

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gdpo_tune.core import registry
from gdpo_tune.core.events import SweepStarted, TrialFinished
from gdpo_tune.results.open_sweep import read_sweep
from gdpo_tune.tracking import trackers
from gdpo_tune.tracking.trackers import LOG, SENT, Trackers, send_runs
from tests.support.paths import ROOT
from tests.support.published_sweeps import PRIVATE, REASON, make_sweep

NAMES = ["front", *(f"trial-00{n} gdpo" for n in range(4))]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.syspath_prepend(tmp_path)


def make_tracked_sweep(directory, *names, **keys):
    chosen = {"tracking.report_to": json.dumps(names), "tracking.experiment": "nightly"}
    spec = make_sweep(directory, kept=(), **chosen, **keys)
    return read_sweep(str(spec.directory), "the sweep")


def read_tensorboard(sweep):
    """Return run -> its values, by name and step."""
    found = {}
    for directory in (sweep.spec.directory / "tensorboard").iterdir():
        events = EventAccumulator(str(directory)).Reload()
        tags, pictures = events.Tags()["scalars"], events.Tags()["images"]
        found[directory.name] = {(t, e.step): e.value for t in tags for e in events.Scalars(t)}
        is_drawn = directory.name == "front" and (sweep.spec.directory / "front.png").exists()
        assert pictures == ["front"] * is_drawn
    return found


def read_trackio(sweep):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    found = {}
    for run in trackio.Api().runs("nightly"):
        assert run.config["_Group"] == sweep.spec.name
        name = run.name.removeprefix(f"{sweep.spec.name} ")
        assert name not in found, "each run once"
        logs = SQLiteStorage.get_logs("nightly", run.name, run_id=run.id)
        found[name] = {(name, log["step"]): value for log in logs for name, value in log.items()}
    return found


def read_wandb(sweep):
    """Read the files of offline runs: records of protobuf in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for file in (sweep.spec.directory / "wandb").glob("offline-run-*/*.wandb"):
        data, at, parts, values, name = file.read_bytes(), 7, b"", {}, ""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            if left < 7 or not kind:  # the rest of a block
                at += left
                continue
            parts += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # full, or the last part
                record, parts = Record.FromString(parts), b""
                if record.HasField("run"):
                    name = record.run.display_name
                    place = record.run.project, record.run.run_group
                    assert place == ("nightly", sweep.spec.name)
                for item in record.history.item:
                    key = item.key or ".".join(item.nested_key)
                    values[key, record.history.step.num] = json.loads(item.value_json)
                for item in record.summary.update:
                    values[item.key or ".".join(item.nested_key), 0] = json.loads(item.value_json)
        assert name not in found, "each run once"
        found[name] = values
    return found


READERS = {"tensorboard": read_tensorboard, "trackio": read_trackio, "wandb": read_wandb}


@pytest.mark.system
@pytest.mark.parametrize("tracker", registry.TRACKERS)
def test_each_trial_is_there_once_with_its_curve_and_test_values(tracker, tmp_path):
    sweep = make_tracked_sweep(tmp_path, tracker)
    Image.new("RGB", (4, 4)).save(sweep.spec.directory / "front.png")
    for _ in range(2):  # the second time as after a kill: nothing says what was sent
        assert send_runs(sweep) == 0
        found = READERS[tracker](sweep)
        assert sorted(found) == NAMES
        for number in range(3):
            run = found[NAMES[number + 1]]
            assert run["train/loss", 1] == 0.25
            tests = [value for (name, _), value in run.items() if name == "test/correctness"]
            expected = sweep.records[number].test["correctness"].mean
            assert tests[-1] == pytest.approx(expected, abs=1e-6)
        volumes = [value for (name, _), value in found["front"].items() if name == "hypervolume"]
        assert volumes[-1] == pytest.approx(sweep.front.hypervolume, abs=1e-6)
        (sweep.spec.directory / SENT).unlink()


def test_a_run_that_was_sent_is_not_sent_again(tmp_path, monkeypatch):
    sweep = make_tracked_sweep(tmp_path, "wandb")
    written = []

    def write(run):
        if len(written) == 2:
            raise ConnectionError("gone")
        written.append(run.name)

    monkeypatch.setattr("gdpo_tune.tracking.trackers.write_wandb", write)
    assert send_runs(sweep) == 1
    monkeypatch.setattr(
        "gdpo_tune.tracking.trackers.write_wandb", lambda run: written.append(run.name)
    )
    assert [send_runs(sweep), send_runs(sweep)] == [0, 0]
    assert sorted(written) == NAMES
    (sweep.spec.directory / SENT).write_text('{"wandb":')  # a damaged file: as if it were deleted
    assert [send_runs(sweep), send_runs(sweep)] == [0, 0]
    assert sorted(written) == sorted([*NAMES, *NAMES])


@pytest.mark.parametrize("is_private", [False, True])
def test_a_private_sweep_sends_no_text_path_or_host(is_private, tmp_path, monkeypatch):
    sweep = make_tracked_sweep(tmp_path, "wandb", **{"tracking.private": json.dumps(is_private)})
    runs = []
    monkeypatch.setattr("gdpo_tune.tracking.trackers.write_wandb", runs.append)
    assert send_runs(sweep) == 0
    reasons = [run.config["reason"] for run in runs if "reason" in run.config]
    assert reasons == ([] if is_private else [REASON])
    if is_private:
        text = json.dumps([[run.identity, run.name, run.config, run.curves] for run in runs])
        assert not [word for word in PRIVATE if word in text]


@pytest.mark.system
@pytest.mark.parametrize(
    ("package", "seconds", "expected"),
    [
        ("raise ImportError('no wheel')", 60.0, "trackers: wandb: ImportError: no wheel\n"),
        ("import time; time.sleep(600)", 3.0, "not done after 3 s; their process goes on"),
    ],
    ids=["missing", "hanging"],
)
def test_a_tracker_that_is_missing_or_hangs_stops_nothing(
    package, seconds, expected, tmp_path, monkeypatch, capsys
):
    (tmp_path / "wandb.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", seconds)
    sweep = make_tracked_sweep(tmp_path, "wandb")
    started = SweepStarted(tuple(sweep.records))
    with Trackers(sweep.spec) as listener:
        listener(started)
        listener(TrialFinished(sweep.records[0]))
    listener._process.kill()
    listener._process.wait()
    message = capsys.readouterr().err
    assert message.startswith("warning: trackers: "), "the package is there, though broken"
    assert expected in message
    assert f"report {sweep.spec.location} --sync" in message


@pytest.mark.system
def test_the_process_of_a_sweep_writes_what_its_trackers_lack(tmp_path, capsys):
    sweep = make_tracked_sweep(tmp_path, "tensorboard")
    with Trackers(sweep.spec) as listener:
        listener(SweepStarted(tuple(sweep.records)))
    assert capsys.readouterr().err == ""
    assert sorted(read_tensorboard(sweep)) == NAMES
    assert "tensorboard" in json.loads((sweep.spec.directory / SENT).read_text())


def test_a_process_that_cannot_start_stops_nothing(tmp_path, monkeypatch, capsys):
    """A full disk has no room for its log, and a full machine none for the process."""
    sweep = make_tracked_sweep(tmp_path, "wandb")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gdpo_tune.tracking.trackers.subprocess.Popen", refuse)
    with Trackers(sweep.spec) as listener:
        listener(SweepStarted(tuple(sweep.records)))
        listener(TrialFinished(sweep.records[0]))
    assert "trackers: [Errno 28] No space left on device\n" in capsys.readouterr().err


def test_a_sweep_without_trackers_starts_no_process(tmp_path):
    sweep = make_tracked_sweep(tmp_path)
    with Trackers(sweep.spec) as listener:
        listener(SweepStarted(tuple(sweep.records)))
        listener(TrialFinished(sweep.records[0]))
    assert not (sweep.spec.directory / LOG).exists()
    assert listener._process is None
