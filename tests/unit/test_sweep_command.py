"""How the sweep command ends: exit status and the line that continues."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from gdpo_tune import cli, sweep, tuning
from gdpo_tune.errors import UsageError
from gdpo_tune.trials import TrialRecord

SPACE = str(Path(__file__).parents[2] / "search_spaces" / "code.yaml")


def record(number, state, role="search"):
    params = {"normalization": "gdpo", "group_size": 8, "learning_rate": 1e-4}
    weights = {f"reward_weights.{name}": 1.0 for name in ("correctness", "format", "length")}
    return TrialRecord(number, role, state, {**params, **weights}, 0, "model", reason="ran dry")


@pytest.fixture
def end_with(monkeypatch, tmp_path):
    """Let the search end at once with these records; return what the command returns."""
    monkeypatch.chdir(tmp_path)
    Path("runs/code").mkdir(parents=True)
    monkeypatch.setattr(sweep, "probe_environment", lambda spec: {})

    def run(*records, interrupted=False, options=()):
        result = SimpleNamespace(records=records, interrupted=interrupted)
        monkeypatch.setattr(tuning, "run_sweep", lambda *_, **__: result)
        return sweep.main([SPACE, *options])

    return run


def test_a_sweep_with_a_trained_trial_succeeds(end_with):
    assert end_with(record(0, "failed"), record(1, "complete")) == 0


def test_a_sweep_in_which_all_failed_does_not(end_with, capsys):
    assert end_with(record(0, "complete", "untrained"), record(1, "failed")) == 1
    assert "every trial failed" in capsys.readouterr().err


def test_an_interrupted_sweep_prints_the_line_that_continues(end_with, capsys):
    options = ["--fresh", "--set", "search.trials= 8"]
    assert end_with(record(0, "complete"), interrupted=True, options=options) == 130
    line = capsys.readouterr().err.strip().splitlines()[-1].strip()
    assert line == f"python -m gdpo_tune.sweep {SPACE} --set 'search.trials= 8'"


def test_options_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit) as caught:
        sweep.main([SPACE, "--fres"])
    assert caught.value.code == 2
    assert "--fres" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "status"),
    [(lambda _: 0, 0), (UsageError("no"), 2), (KeyboardInterrupt(), 130)],
)
def test_how_a_command_ends(ending, status, capsys):
    def main(arguments):
        if isinstance(ending, BaseException):
            raise ending
        return ending(arguments)

    with pytest.raises(SystemExit) as caught:
        cli.run(main)
    assert caught.value.code == status
    assert (status == 0) == (capsys.readouterr().err == "")
