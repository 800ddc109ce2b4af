"""The `report` of a trial: thinning, and how it ends the trial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trials import Cost, Measurement, TrialConfig
from gdpo_tune.tracking.run_content import select_curve_values
from gdpo_tune.tuning.ray import reporter
from gdpo_tune.tuning.ray.messages import TrialUpdate, unpack_message
from gdpo_tune.tuning.ray.reporter import Reporter, choose_interval
from gdpo_tune.tuning.ray.stopping import HALT
from tests.support.tuning import attempt_at, measured, sent_to_ray, trial_in


@pytest.fixture
def config(tmp_path: Path) -> TrialConfig:
    return trial_in(tmp_path)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Measurements that reached Ray."""
    return sent_to_ray(monkeypatch)


@pytest.mark.parametrize("steps", [1, 7, 20, 21, 59, 60, 61, 100, 119, 199, 200, 400, 1000, 5000])
def test_a_fast_trial_ends_with_at_least_twenty_points_a_curve_and_at_most_sixty(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch, steps: int
):
    """Through both that thin: what goes to the driver, and what of that goes to the tracker."""
    monkeypatch.setattr(reporter.time, "monotonic", lambda: 100.0)
    training = TrainingSettings(steps=steps)
    report = Reporter(attempt_at(replace(config, training=training)))
    for step in range(1, steps + 1):
        report(Measurement(step, {"train/loss": 1.0}, Cost()), None)
    curve = [m.step for m in sent if select_curve_values(m, training)]
    assert min(steps, 20) <= len(curve) <= 60
    assert curve[-1] == steps
    assert len(sent) <= len(curve) + 1  # the first is sent at once


def test_an_evaluation_is_always_sent(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reporter.time, "monotonic", lambda: 100.0)
    report = Reporter(attempt_at(config))
    for step in range(1, 101):
        plain = Measurement(step, {"train/loss": 1.0}, Cost())
        report(measured(33, format=0.5) if step == 33 else plain, None)
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

    monkeypatch.setattr(reporter.tune, "report", halt)
    report = Reporter(attempt_at(config))
    report(Measurement(1, {}, Cost()), None)
    with pytest.raises(SystemExit):
        report(measured(2, format=0.5), None)
    assert report.stopped
    assert [m.step for m in sent] == [1, 2]


def test_a_process_that_begins_with_a_request_to_halt_ends_at_its_first_step(
    config: TrialConfig, sent: list[Measurement]
):
    (config.directory / HALT).touch()
    with pytest.raises(SystemExit):
        Reporter(attempt_at(config))(Measurement(1, {}, Cost()), None)
    assert not sent


def test_what_is_held_back_goes_with_the_next_result(
    config: TrialConfig, monkeypatch: pytest.MonkeyPatch
):
    """A step a second, of 120 steps every second one is kept; a result every five seconds."""
    results: list[Any] = []
    clock = iter(range(1, 1000))
    monkeypatch.setattr(reporter.tune, "report", lambda told: results.append(unpack_message(told)))
    monkeypatch.setattr(reporter.time, "monotonic", lambda: float(next(clock)))
    training = TrainingSettings(steps=120)
    report = Reporter(attempt_at(replace(config, training=training), interval=5.0))
    for step in range(1, 121):
        plain = Measurement(step, {"train/loss": 1.0}, Cost())
        report(measured(step, format=0.5) if step in (33, 120) else plain, None)
    told = [[m.step for m in (*r.earlier, r.measurement)] for r in results]
    assert told[:3] == [[1], [2, 4, 6], [8, 10, 11]]
    assert [32, 33] in told  # what is validated waits for nothing
    assert len(results) <= 27
    assert {step for steps in told for step in steps} >= set(range(2, 121, 2))


def test_few_slots_hold_nothing_back_and_many_share_what_the_driver_takes():
    assert choose_interval(200) == 0
    assert choose_interval(1000) == 5


def test_a_slow_trial_sends_every_point(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(reporter.time, "monotonic", lambda: float(next(clock)))
    report = Reporter(attempt_at(config))
    for step in range(1, 8):
        report(Measurement(step, {}, Cost()), None)
    assert [m.step for m in sent] == list(range(1, 8))
