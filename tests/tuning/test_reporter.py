"""The `report` of a trial: thinning, and the end of a trial by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Measurement
from gdpo_tune.tracking.run_content import select_curve_values
from gdpo_tune.tuning.attempts import HALT, TrialUpdate, choose_interval, unpack_message
from gdpo_tune.tuning.ray import attempt
from gdpo_tune.tuning.ray.attempt import Reporter
from tests.support.tuning import (
    build_attempt,
    build_measurement,
    build_trial_config,
    record_reports,
)


@pytest.fixture
def config(tmp_path: Path) -> TrialConfig:
    return build_trial_config(tmp_path)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Measurements that were sent to Ray."""
    return record_reports(monkeypatch)


@pytest.mark.parametrize("steps", [1, 7, 20, 21, 59, 60, 61, 100, 119, 199, 200, 400, 1000, 5000])
def test_a_fast_trial_has_20_to_60_points_per_curve(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch, steps: int
):
    """Measurements are thinned twice: for the driver and for the tracker."""
    monkeypatch.setattr(attempt.time, "monotonic", lambda: 100.0)
    training = TrainingSettings(steps=steps)
    report = Reporter(build_attempt(replace(config, training=training)))
    for step in range(1, steps + 1):
        report(Measurement(step, {"train/loss": 1.0}, Cost()), None)
    curve = [m.step for m in sent if select_curve_values(m, training)]
    assert min(steps, 20) <= len(curve) <= 60
    assert curve[-1] == steps
    assert len(sent) <= len(curve) + 1  # the first is sent at once


def test_an_evaluation_is_always_sent(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attempt.time, "monotonic", lambda: 100.0)
    report = Reporter(build_attempt(config))
    for step in range(1, 101):
        plain = Measurement(step, {"train/loss": 1.0}, Cost())
        report(build_measurement(33, format=0.5) if step == 33 else plain, None)
    assert 33 in {m.step for m in sent}


def test_a_trial_that_the_driver_halts_at_a_rung_takes_no_further_step(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    def halt(result: dict[str, Any]) -> None:  # Ray returns once the driver has dealt with it
        message = unpack_message(result)
        assert isinstance(message, TrialUpdate)
        sent.append(message.measurement)
        if message.measurement.has_validation:
            (config.directory / HALT).touch()

    monkeypatch.setattr(attempt.tune, "report", halt)
    report = Reporter(build_attempt(config))
    report(Measurement(1, {}, Cost()), None)
    with pytest.raises(SystemExit):
        report(build_measurement(2, format=0.5), None)
    assert report.stopped
    assert [m.step for m in sent] == [1, 2]


def test_a_process_that_begins_with_a_request_to_halt_ends_at_its_first_step(
    config: TrialConfig, sent: list[Measurement]
):
    (config.directory / HALT).touch()
    with pytest.raises(SystemExit):
        Reporter(build_attempt(config))(Measurement(1, {}, Cost()), None)
    assert not sent


def test_held_measurements_are_sent_with_the_next_result(
    config: TrialConfig, monkeypatch: pytest.MonkeyPatch
):
    """One step per second; every second of 120 steps is kept; one result every five seconds."""
    results: list[Any] = []
    clock = iter(range(1, 1000))
    monkeypatch.setattr(
        attempt.tune, "report", lambda packed: results.append(unpack_message(packed))
    )
    monkeypatch.setattr(attempt.time, "monotonic", lambda: float(next(clock)))
    training = TrainingSettings(steps=120)
    report = Reporter(build_attempt(replace(config, training=training), interval=5.0))
    for step in range(1, 121):
        plain = Measurement(step, {"train/loss": 1.0}, Cost())
        report(build_measurement(step, format=0.5) if step in (33, 120) else plain, None)
    packed = [[m.step for m in (*r.earlier, r.measurement)] for r in results]
    assert packed[:3] == [[1], [2, 4, 6], [8, 10, 11]]
    assert [32, 33] in packed  # what is validated waits for nothing
    assert len(results) <= 27
    assert {step for steps in packed for step in steps} >= set(range(2, 121, 2))


def test_the_report_interval_grows_with_the_number_of_slots():
    assert choose_interval(200) == 0
    assert choose_interval(1000) == 5


def test_a_slow_trial_sends_every_point(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(attempt.time, "monotonic", lambda: float(next(clock)))
    report = Reporter(build_attempt(config))
    for step in range(1, 8):
        report(Measurement(step, {}, Cost()), None)
    assert [m.step for m in sent] == list(range(1, 8))
