"""The sweep's directory: trials do not fail while it is missing."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from gdpo_tune.core.errors import DirectoryLostError
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.trials import Cost, Measurement
from gdpo_tune.tuning.attempts import (
    AttemptConfig,
    AttemptError,
    Failed,
    Fatal,
    TrialPlaced,
    TrialResult,
    pack,
    unpack_message,
)
from gdpo_tune.tuning.ray import attempt as adapter
from gdpo_tune.tuning.ray.attempt import Reporter, has_directory
from tests.support.tuning import build_attempt, build_trial_config


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttemptConfig:
    monkeypatch.setattr(adapter, "describe_place", lambda: TrialPlaced("process", "node"))
    monkeypatch.setattr(adapter.tune, "report", lambda _: None)
    return build_attempt(build_trial_config(tmp_path))


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    return tmp_path / SPEC


def test_an_empty_directory_in_its_place_is_not_the_directory(
    attempt: AttemptConfig, spec_file: Path
):
    assert has_directory(attempt.setup)
    spec_file.unlink()
    assert not has_directory(attempt.setup)


def test_an_object_store_has_no_directory_to_lose(tmp_path: Path):
    attempt = build_attempt(build_trial_config(tmp_path), address="s3://bucket/night")
    (tmp_path / SPEC).unlink()
    assert has_directory(attempt.setup)


@pytest.mark.parametrize("ends", ["failure", "error"])
def test_an_attempt_without_the_directory_waits_for_it_and_does_not_count(
    attempt: AttemptConfig, spec_file: Path, monkeypatch: pytest.MonkeyPatch, ends: str
):
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            spec_file.touch()

    def run(attempt: AttemptConfig) -> TrialResult:
        spec_file.unlink()
        if ends == "error":
            raise FileNotFoundError("checkpoint-1")
        return Failed("no task file")

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(adapter, "run_attempt", run)
    with pytest.raises(AttemptError, match="waited 3 s for it"):
        adapter.run_trial(pack(attempt))
    assert waits == [1, 1, 1]


def test_a_directory_that_stays_missing_ends_the_sweep(
    attempt: AttemptConfig, spec_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter, "PATIENCE", -1.0)
    monkeypatch.setattr(adapter, "run_attempt", lambda _: spec_file.unlink())
    result = unpack_message(adapter.run_trial(pack(attempt)))
    assert isinstance(result, Fatal)
    assert isinstance(result.error, DirectoryLostError)
    assert re.search(r"is gone.*\n.*fix: mount it again", str(result.error))


def test_other_failures_are_returned_unchanged(
    attempt: AttemptConfig, monkeypatch: pytest.MonkeyPatch
):
    def fail(attempt: AttemptConfig) -> TrialResult:
        raise RuntimeError("its own")

    monkeypatch.setattr(adapter, "run_attempt", lambda _: Failed("its own"))
    assert unpack_message(adapter.run_trial(pack(attempt))) == Failed("its own")
    monkeypatch.setattr(adapter, "run_attempt", fail)
    with pytest.raises(RuntimeError, match="its own"):
        adapter.run_trial(pack(attempt))


def test_a_report_without_the_directory_is_ignored(attempt: AttemptConfig, spec_file: Path):
    report = Reporter(attempt)
    spec_file.unlink()
    with pytest.raises(AttemptError, match="is away"):
        report(Measurement(1, {}, Cost(64, 1.0)), None)
