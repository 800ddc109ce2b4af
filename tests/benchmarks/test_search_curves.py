"""The table of learning curves: written, read, and replayed with the noise of real trainings."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from curves import STEPS, list_jobs, print_sheet, write_table
from problems import Curves, Replayed, Surrogate, choose_levels, encode_features, read_table

from gdpo_tune.spec import SweepSpec, first_trials, load_spec
from gdpo_tune.spec.space import Choices, Uniform
from tests.support.paths import ROOT

SPACE = ROOT / "search_spaces" / "math.yaml"
LEVELS = tuple(64 * step for step in STEPS)
COUNT = 48


@pytest.fixture(scope="module")
def spec() -> SweepSpec:
    return load_spec(SPACE)


def true_values(params, share: float) -> dict[str, float]:
    """A trade-off of correctness and length along one weight, which training brings about."""
    weight = math.log(float(params["reward_weights.length"]) / 0.05) / math.log(2 / 0.05)
    ends = {"correctness": 0.9 - 0.5 * weight, "format": 0.8, "length": 0.2 + 0.6 * weight}
    return {name: 0.4 + (end - 0.4) * share for name, end in ends.items()}


def training_of(spec: SweepSpec, index: int, error: float, deviation: float = 0.0):
    params = first_trials.draw_point(spec, index)
    rng = np.random.default_rng(index)
    shift = deviation * rng.standard_normal()

    def measured(split: str, level: int) -> dict:
        true = true_values(params, level / LEVELS[-1])
        values = {
            name: [value + shift + error * rng.standard_normal(), error]
            for name, value in true.items()
        }
        about = {"step": level // 64, "completions": level, "split": split}
        return {**about, "seconds": level / 100, "cpu_seconds": level / 128, "values": values}

    rungs = [measured("validation", level) for level in LEVELS]
    return {"params": params, "rungs": rungs, "test": measured("test", LEVELS[-1])}


def curves_of(spec: SweepSpec, path: Path, error: float = 0.01, deviation: float = 0.0) -> Curves:
    trainings = [training_of(spec, index, error, deviation) for index in range(COUNT)]
    write_table(list_jobs(COUNT, STEPS, ()), trainings, path)
    return read_table(path)


def test_a_table_is_read_as_it_was_written(tmp_path: Path, spec: SweepSpec):
    curves = curves_of(spec, tmp_path / "t.parquet")
    assert curves.levels == LEVELS
    assert curves.params == tuple(first_trials.draw_point(spec, index) for index in range(COUNT))
    training = training_of(spec, 7, 0.01)
    assert curves.means["length"][7, 3] == training["rungs"][3]["values"]["length"][0]
    assert curves.test_means["correctness"][7] == training["test"]["values"]["correctness"][0]
    assert (curves.errors["format"] == 0.01).all()
    assert curves.cpu_seconds[0].tolist() == [level / 128 for level in LEVELS]


def test_a_table_without_some_rung_is_refused(tmp_path: Path, spec: SweepSpec):
    trainings = [training_of(spec, index, 0.01) for index in range(3)]
    del trainings[1]["rungs"][4]
    write_table(list_jobs(3, STEPS, ()), trainings, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="26 rungs of 3 x 9"):
        read_table(tmp_path / "t.parquet")


def test_features_are_shares_of_each_scale():
    domains = {
        "rate": Uniform(low=1e-4, high=1e-2, log=True),
        "share": Uniform(low=2.0, high=4.0),
        "mode": Choices(choices=("a", "b", "c")),
    }
    found = encode_features({"rate": 1e-3, "share": 2.5, "mode": "b"}, domains)
    assert found.tolist() == pytest.approx([0.5, 0.25, 0, 1, 0])


@pytest.mark.slow  # fits surrogates
def test_a_surrogate_tells_noise_of_measurement_from_that_of_training():
    rng = np.random.default_rng(0)
    points = rng.random((160, 2))
    true = np.sin(3 * points[:, 0])
    errors = np.full(160, 0.02)
    values = true + 0.06 * rng.standard_normal(160) + errors * rng.standard_normal(160)
    fit = Surrogate(points, values, errors)
    assert fit.deviation == pytest.approx(0.06, rel=0.25)
    assert fit.predict(np.array([0.5, 0.5])) == pytest.approx(math.sin(1.5), abs=0.04)
    exact = Surrogate(points, true, errors)
    assert exact.deviation < 0.01


def test_left_out_values_are_those_of_processes_without_them():
    rng = np.random.default_rng(1)
    points, errors = rng.random((12, 1)), np.full(12, 0.1)
    values = points[:, 0] ** 2 + 0.1 * rng.standard_normal(12)
    fit = Surrogate(points, values, errors)
    process = fit._process
    scaled = (values - values.mean()) / values.std()
    noise = np.diag(process.alpha)
    covariance = process.kernel_(points) + noise
    for index, predicted in enumerate(fit.predict_left_out()):
        others = np.arange(12) != index
        weights = np.linalg.solve(covariance[np.ix_(others, others)], scaled[others])
        expected = values.mean() + values.std() * covariance[index, others] @ weights
        assert predicted == pytest.approx(expected)


@pytest.mark.slow  # fits surrogates
def test_a_replay_has_the_tables_truth_and_its_noise(tmp_path: Path, spec: SweepSpec):
    curves = curves_of(spec, tmp_path / "t.parquet", error=0.02)
    problem = Replayed(spec, curves, choose_levels(curves.levels))
    params = {**first_trials.draw_point(spec, 1000)}
    true = true_values(params, 1.0)
    assert problem.compute_truth(params, LEVELS[-1]) == pytest.approx(true, abs=0.02)
    trainings = [problem.draw_curve(params, np.random.default_rng(seed)) for seed in range(200)]
    ends = np.array([training(LEVELS[-1])["length"].mean for training in trainings])
    assert ends.mean() == pytest.approx(true["length"], abs=0.02)
    assert ends.std() == pytest.approx(0.02, rel=0.4)
    early = [training(problem.levels[0])["correctness"].mean for training in trainings]
    share = problem.levels[0] / LEVELS[-1]
    expected = true_values(params, share)["correctness"]
    assert np.mean(early) == pytest.approx(expected, abs=0.02)
    assert trainings[0](LEVELS[-1])["length"].se == pytest.approx(0.02)


@pytest.mark.slow  # fits surrogates
def test_the_truth_of_a_checkpoint_lies_before_the_end_as_validation_values_do(
    tmp_path: Path, spec: SweepSpec
):
    curves = curves_of(spec, tmp_path / "t.parquet")
    problem = Replayed(spec, curves, LEVELS[4:], is_paid=True)
    assert (problem.has_checkpoints, problem.evaluation_cost) == (True, 256)
    params = first_trials.draw_point(spec, 1000)
    for level in (LEVELS[4], LEVELS[6]):
        true = true_values(params, level / LEVELS[-1])
        assert problem.compute_truth(params, level) == pytest.approx(true, abs=0.02)
    ends_alone = Replayed(spec, curves, choose_levels(curves.levels))
    assert (ends_alone.has_checkpoints, ends_alone.evaluation_cost) == (False, 0)


@pytest.mark.slow  # fits surrogates
def test_a_training_keeps_its_deviation_from_rung_to_rung(tmp_path: Path, spec: SweepSpec):
    curves = curves_of(spec, tmp_path / "t.parquet", error=0.002, deviation=0.05)
    problem = Replayed(spec, curves, choose_levels(curves.levels))
    params = first_trials.draw_point(spec, 1000)
    trainings = [problem.draw_curve(params, np.random.default_rng(seed)) for seed in range(60)]
    first = [training(problem.levels[-2])["correctness"].mean for training in trainings]
    last = [training(problem.levels[-1])["correctness"].mean for training in trainings]
    assert np.corrcoef(first, last)[0, 1] > 0.95
    again = problem.draw_curve(params, np.random.default_rng(3))
    assert again(LEVELS[-1]) == trainings[3](LEVELS[-1])


@pytest.mark.slow  # fits surrogates
def test_a_replay_stays_within_the_range_of_its_metrics(tmp_path: Path, spec: SweepSpec):
    curves = curves_of(spec, tmp_path / "t.parquet", error=0.4)
    problem = Replayed(spec, curves, choose_levels(curves.levels))
    params = first_trials.draw_point(spec, 5)
    for seed in range(30):
        values = problem.draw_curve(params, np.random.default_rng(seed))(LEVELS[-1])
        assert all(0 <= value.mean <= 1 for value in values.values())


@pytest.mark.slow  # fits surrogates
def test_a_replayed_trial_takes_as_long_as_the_nearest_one(tmp_path: Path, spec: SweepSpec):
    problem = Replayed(spec, curves_of(spec, tmp_path / "t.parquet"), (640, 1280, 3840))
    params = first_trials.draw_point(spec, 3)
    assert problem.compute_seconds(params, 0, 640) == 5.0
    assert problem.compute_seconds(params, 640, 3840) == 25.0
    with pytest.raises(ValueError, match="are not all in the table"):
        Replayed(spec, read_table(tmp_path / "t.parquet"), (100, 3840))


def test_levels_of_a_table_begin_at_a_third():
    assert choose_levels(LEVELS) == tuple(64 * step for step in (20, 30, 40, 50, 60))


def test_the_shipped_table_is_of_the_shipped_search_space(spec: SweepSpec):
    curves = read_table()
    assert len(curves.params) >= 150
    assert curves.levels == LEVELS
    for index, params in enumerate(curves.params):
        assert params == pytest.approx(first_trials.draw_point(spec, index))


@pytest.mark.slow  # fits surrogates
def test_the_sheet_of_the_shipped_table_has_its_figures(
    spec: SweepSpec, capsys: pytest.CaptureFixture[str]
):
    print_sheet(spec, read_table())
    printed = capsys.readouterr().out.splitlines()
    assert "correctness: ends 0.24, 0.50, 0.75, standard error 0.033" in printed
    assert "format: R2 0.96, deviation 0.012, standard error 0.019" in printed
