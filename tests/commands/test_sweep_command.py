"""How the sweep command ends: exit status and the line that continues."""

import errno
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from traceback import walk_stack
from unittest.mock import MagicMock

import pytest

from gdpo_tune import cli, sweep
from gdpo_tune.core.errors import ClusterLostError, UsageError
from gdpo_tune.core.events import TrackingState
from gdpo_tune.core.trial_files import Completion, write_completions
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.spec import machine
from gdpo_tune.tuning import runner
from gdpo_tune.tuning.nodes import Nodes
from gdpo_tune.tuning.ray import cluster
from gdpo_tune.tuning.ray.cluster import Cluster
from gdpo_tune.tuning.runner import SweepResult
from tests.support.paths import ROOT

SPACE = str(ROOT / "search_spaces" / "code.yaml")


def build_record(number, state, role="search"):
    params = {"normalization": "gdpo", "group_size": 8, "learning_rate": 1e-4}
    weights = {f"reward_weights.{name}": 1.0 for name in ("correctness", "format", "length")}
    return TrialRecord(number, role, state, {**params, **weights}, 0, "model", reason="ran dry")


@pytest.fixture
def end_with(monkeypatch, tmp_path):
    """A function that runs the command with a search that ends so; its `spec` is the last one."""
    monkeypatch.chdir(tmp_path)
    Path("runs/code").mkdir(parents=True)
    monkeypatch.setattr(cli, "preflight", lambda spec: {})
    monkeypatch.setattr(machine, "list_other_sweeps", lambda: iter(()))  # of other tests

    def run(*records, interrupted=0, options=()):
        def end(spec, **_):
            run.spec = spec
            return SweepResult(records, interrupted, spec)

        monkeypatch.setattr(runner, "run_sweep", end)
        return sweep.main([SPACE, *options])

    return run


def test_a_sweep_fails_where_every_trial_failed(end_with, capsys):
    assert end_with(build_record(0, "failed"), build_record(1, "complete")) == 0
    assert end_with(build_record(0, "complete", "untrained"), build_record(1, "failed")) == 1
    assert "every trial failed" in capsys.readouterr().err


def test_an_interrupted_sweep_prints_the_command_that_resumes_it(end_with, capsys):
    options = ["--fresh", "--set", "search.trials= 8"]
    assert end_with(build_record(0, "complete"), interrupted=143, options=options) == 143
    line = capsys.readouterr().err.strip().splitlines()[-1].strip()
    assert line == f"python -m gdpo_tune.sweep {SPACE} --set 'search.trials= 8'"


def test_a_sweep_that_lost_its_cluster_prints_the_command_that_resumes_it(
    end_with, monkeypatch, capsys
):
    lost = MagicMock(side_effect=ClusterLostError("a server is gone"))
    monkeypatch.setattr(runner, "run_sweep", lost)
    assert sweep.main([SPACE, "--fresh"]) == 1
    resume = f"Resume with:\n  python -m gdpo_tune.sweep {SPACE}\n"
    assert capsys.readouterr().err.endswith(f"error: a server is gone. {resume}")


def test_five_frames_lead_from_the_command_to_ray(end_with, monkeypatch):
    class FakeTuner:
        def __init__(self, trainable, **options):
            pass

        def fit(self):
            frames.extend(frame for frame, _ in walk_stack(sys._getframe(1)))

    def open_cluster(processes, variables):
        node = {"NodeID": "a", "NodeManagerHostname": "h", "Alive": True, "Resources": {"CPU": 2}}
        return nullcontext(Cluster(Nodes(lambda: [node]), lambda: None, lambda: True))

    state = TrackingState("up to date", 0, "")
    sink = MagicMock()
    tracker = sink.__enter__.return_value
    tracker.state.return_value, tracker.link.return_value = state, ""
    frames = []
    monkeypatch.setattr("gdpo_tune.tracking.mlflow_sink.MlflowTracker", lambda spec: sink)
    monkeypatch.setattr("gdpo_tune.cli.write_figures", lambda sweep: None)
    monkeypatch.setattr("gdpo_tune.tuning.ray.tune.Tuner", FakeTuner)
    monkeypatch.setattr(cluster, "open_cluster", open_cluster)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert sweep.main([SPACE]) == 0
    ours = [f.f_code.co_name for f in frames if f.f_globals["__name__"].startswith("gdpo_tune")]
    assert ours == ["_run_tuner", "_with_ray", "run_sweep", "_run_here", "main"]


NO_ROOM = OSError(errno.ENOSPC, "No space left on device", "/a")
NO_QUOTA = OSError(errno.EDQUOT, "Disk quota exceeded", "/a")
TOO_LARGE = OSError(errno.EFBIG, "File too large", "/a")


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        (None, 0, ""),
        (UsageError("no"), 2, "error: no\n"),
        (KeyboardInterrupt(), 130, "Run the same command to resume"),
        (NO_ROOM, 1, "bytes free\n    fix: make room"),
        (NO_QUOTA, 1, "'/a': your quota is used up\n"),
        (TOO_LARGE, 1, "fix: raise the limit (ulimit -f"),
    ],
)
def test_how_a_command_ends(ending, status, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run_command(MagicMock(return_value=0, side_effect=ending))
    assert caught.value.code == status
    error = capsys.readouterr().err
    assert message in error
    assert bool(message) == bool(error)


def test_an_unexpected_error_shows_its_traceback():
    with pytest.raises(PermissionError):
        cli.run_command(MagicMock(side_effect=PermissionError(errno.EACCES, "denied", "/a")))


def test_a_webhook_that_is_not_set_is_listed_in_the_dry_run_and_refused_at_the_start(
    end_with, monkeypatch, capsys, hook
):
    options = ["--set", "notify={webhook_env: HOOK}"]
    assert end_with(build_record(0, "complete"), options=options) == 0
    monkeypatch.delenv("HOOK")
    assert end_with(options=[*options, "--dry-run"]) == 0
    reason = "notify.webhook_env = HOOK: the environment variable is not set"
    assert reason in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"HOOK: the environment variable is not set"):
        end_with(options=options)


@pytest.mark.parametrize("option", [[], ["--dry-run"]], ids=["start", "dry run"])
def test_whom_a_cluster_lets_in_is_said_before_it_is_joined(option, end_with, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(cluster, "describe_access", lambda _: "asks for a token")
    end_with(build_record(0, "complete"), options=option)
    assert "cluster: RAY_ADDRESS = head:6379 asks for a token\n" in capsys.readouterr().out


def test_a_sweep_without_a_signal_ends_with_a_status_of_its_own(end_with, tmp_path, capsys):
    """The status is that of `NoSignalError`."""
    reason = "no signal: every advantage was 0 in 10 steps in a row: format is 0.000"
    records = [build_record(number, "failed") for number in range(1, 4)]
    records = [replace(r, reason=reason, directory=tmp_path / str(r.number)) for r in records]
    write_completions(tmp_path / "1", [Completion("2 + 2 =", "four", {"format": 0.0})] * 3)
    assert end_with(build_record(0, "complete", "untrained"), *records) == 7
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: trial 1 and all others: {reason}"
    assert lines[1:4] == ["    four (format 0.0)"] * 3
