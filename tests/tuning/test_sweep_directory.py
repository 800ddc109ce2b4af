"""The sweep's directory: trials do not fail because it is away."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gdpo_tune.core.errors import DirectoryLostError
from gdpo_tune.core.trials import Cost, Measurement
from gdpo_tune.spec.model import SPEC
from gdpo_tune.tuning.ray import trainable
from gdpo_tune.tuning.ray.messages import (
    AttemptConfig,
    AttemptError,
    Failed,
    Fatal,
    TrialResult,
    pack,
    unpack_message,
)
from gdpo_tune.tuning.ray.reporter import Reporter, has_directory
from gdpo_tune.tuning.ray.trainable import wait_for_directory
from tests.support.tuning import attempt_at, trial_in


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptConfig:
    return attempt_at(trial_in(tmp_path))


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    return tmp_path / SPEC


def test_an_empty_directory_in_its_place_is_not_the_directory(
    attempt: AttemptConfig, spec_file: Path
):
    assert has_directory(attempt.setup)
    spec_file.unlink()
    assert not has_directory(attempt.setup)


def test_on_an_object_store_nothing_can_go_away(tmp_path: Path):
    attempt = attempt_at(trial_in(tmp_path), address="s3://bucket/night")
    (tmp_path / SPEC).unlink()
    assert has_directory(attempt.setup)


def test_it_is_waited_for(attempt: AttemptConfig, spec_file: Path, monkeypatch: pytest.MonkeyPatch):
    spec_file.unlink()
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            spec_file.touch()

    monkeypatch.setattr(time, "sleep", sleep)
    told = wait_for_directory(attempt.setup)
    assert told == "the sweep's directory was away; waited 3 s for it"
    assert waits == [1, 1, 1]


def test_it_is_not_waited_for_for_ever(
    attempt: AttemptConfig, spec_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainable, "PATIENCE", -1.0)
    spec_file.unlink()
    with pytest.raises(DirectoryLostError, match=r"is gone.*\n.*fix: mount it again"):
        wait_for_directory(attempt.setup)


@pytest.mark.parametrize("ends", ["failure", "error"])
def test_an_attempt_during_which_it_is_away_does_not_count(
    attempt: AttemptConfig, spec_file: Path, monkeypatch: pytest.MonkeyPatch, ends: str
):
    def run(attempt: AttemptConfig) -> TrialResult:
        spec_file.unlink()
        if ends == "error":
            raise FileNotFoundError("checkpoint-1")
        return Failed("no task file")

    monkeypatch.setattr(trainable, "run_attempt", run)
    monkeypatch.setattr(trainable, "wait_for_directory", lambda _: "waited")
    with pytest.raises(AttemptError, match="waited"):
        trainable.run_trial(pack(attempt))


def test_a_directory_that_stays_away_ends_the_sweep(
    attempt: AttemptConfig, spec_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainable, "PATIENCE", -1.0)
    monkeypatch.setattr(trainable, "run_attempt", lambda _: spec_file.unlink())
    result = unpack_message(trainable.run_trial(pack(attempt)))
    assert isinstance(result, Fatal)
    assert isinstance(result.error, DirectoryLostError)


def test_otherwise_the_attempt_ends_as_it_does(
    attempt: AttemptConfig, monkeypatch: pytest.MonkeyPatch
):
    def fail(attempt: AttemptConfig) -> TrialResult:
        raise RuntimeError("its own")

    monkeypatch.setattr(trainable, "run_attempt", lambda _: Failed("its own"))
    assert unpack_message(trainable.run_trial(pack(attempt))) == Failed("its own")
    monkeypatch.setattr(trainable, "run_attempt", fail)
    with pytest.raises(RuntimeError, match="its own"):
        trainable.run_trial(pack(attempt))


def test_a_report_while_it_is_away_counts_for_nothing(attempt: AttemptConfig, spec_file: Path):
    report = Reporter(attempt)
    spec_file.unlink()
    with pytest.raises(AttemptError, match="is away"):
        report(Measurement(1, {}, Cost(64, 1.0)), None)
