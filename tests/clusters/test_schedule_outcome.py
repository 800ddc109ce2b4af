"""The figures of a run from its ledger, and its comparison with the last run."""

from __future__ import annotations

import pytest

from gdpo_tune.clusters.outcome import describe_ratio, read_figures
from gdpo_tune.ledger import Ledger
from tests.support.schedule import load_scheduled_sweep
from tests.support.tuning import build_outcome, load_code_spec

TEXT = 'space: search_spaces/code.yaml\nschedule: {cron: "0 2 * * *"}\n'


def search(folder, name, shift=0.0, trials=14, overrides=()):
    """A run of some trials along a trade-off."""
    spec = load_code_spec(folder, ["search.trials=14", *overrides])
    spec = spec.model_copy(update={"name": name, "storage": str(folder / "runs")})
    with Ledger.open(spec) as ledger:
        for number in range(trials):
            weight = 0.05 + 0.1 * number
            params = spec.space.complete_baseline({"reward_weights.format": weight})
            ledger.start(params, "search", "startup", seed=number)
            share = number / trials
            ledger.complete(
                number, build_outcome(0.2 + 0.5 * share + shift, 0.7 - 0.5 * share + shift, 0.5)
            )


def test_figures_of_a_run(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, TEXT)
    search(tmp_path, "nightly-1", trials=5)
    found = read_figures(sweep, "nightly-1", None)
    values = found.details
    assert (values["trials"], values["failed_trials"], values["front"]) == (5, 0, 5)
    assert values["gpu_hours"] == 0.0
    low, high = values["hypervolume_interval"]
    assert 0 < low <= high
    assert "comparison" not in values
    assert found.description.startswith("5 trials, 5 on the front, hypervolume 0.")


@pytest.mark.parametrize(("shift", "verdict"), [(0.25, "better"), (-0.15, "worse"), (0.0, "equal")])
def test_a_run_against_the_last_one(tmp_path, shift, verdict):
    sweep = load_scheduled_sweep(tmp_path, TEXT)
    search(tmp_path, "nightly-1")
    search(tmp_path, "nightly-2", shift)
    figures = read_figures(sweep, "nightly-2", "nightly-1")
    found = figures.details["comparison"]
    assert found["headline"]
    assert (found["with"], found["verdict"]) == ("nightly-1", verdict)
    low, high = found["interval"]
    assert low < found["hypervolume_ratio"] < high
    assert (low > 1) == (verdict == "better")
    assert (high < 1) == (verdict == "worse")
    text = f"Against nightly-1: {verdict}. {found['hypervolume_ratio']:.2f} times its"
    assert text in figures.description


def test_a_run_that_never_began_has_cost_nothing(tmp_path):
    found = read_figures(load_scheduled_sweep(tmp_path, TEXT), "nightly-1", None)
    assert found.details == {"gpu_hours": 0.0}
    assert found.description == ""


def test_a_ledger_that_cannot_be_read_from_here(tmp_path):
    elsewhere = "backend: {kind: ray-job, address: http://head:8265}\n"
    sweep = load_scheduled_sweep(tmp_path, TEXT + elsewhere)
    found = read_figures(sweep, "nightly-1", None)
    assert list(found.details) == ["unknown"]
    assert "Its result is unknown here: nightly-1: there is no sweep" in found.description
    search(tmp_path, "nightly-2", trials=2)
    found = read_figures(sweep, "nightly-2", "nightly-1")
    assert "there is no sweep" in found.details["comparison"]["unknown"]
    assert "Not compared with nightly-1" in found.description


def test_a_run_that_found_nothing(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, TEXT)
    search(tmp_path, "nightly-1", trials=0)
    search(tmp_path, "nightly-2", trials=3)
    found = read_figures(sweep, "nightly-1", "nightly-2")
    values = found.details
    assert values["front"] == 0
    assert "hypervolume" not in values
    assert found.description.startswith(
        "0 trials, 0 on the front. Not compared with nightly-2: nightly-1 cannot be compared: "
        "no configuration of it has ended yet."
    )


def test_a_ratio_without_a_finite_interval_is_json():
    text, found = describe_ratio(1.5, 1.1, float("inf"))
    assert (found["hypervolume_ratio"], found["interval"]) == (1.5, [1.1, None])
    assert text == " 1.50 times its hypervolume (95 %: 1.10 to any)."
