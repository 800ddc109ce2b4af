"""Boxes of the Gaussian process, and proposals inside them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import create_trial

from gdpo_tune.core import registry
from gdpo_tune.core.trials import Objective
from gdpo_tune.tuning import samplers
from gdpo_tune.tuning.samplers import (
    BOX_SIDE,
    BOX_STARTUP,
    GaussianProcess,
    shrink_around,
)
from tests.support.tuning import load_code_spec

GOALS = (Objective("up", "maximize", 0.0), Objective("down", "minimize", 1.0))
SPACE = {
    "rate": FloatDistribution(1e-5, 1e-3, log=True),
    "weight": FloatDistribution(0.0, 2.0),
    "mode": CategoricalDistribution(("a", "b")),
}


def build_study(*trials: tuple[float, float, list[float], float]) -> optuna.Study:
    """Build a study of complete trials: rate, weight, values, and excess over a constraint."""
    study = optuna.create_study(directions=["maximize", "minimize"])
    for rate, weight, values, excess in trials:
        study.add_trial(
            create_trial(
                params={"rate": rate, "weight": weight, "mode": "a"},
                distributions=SPACE,
                values=values,
                constraints={"bound": excess},
            )
        )
    return study


def draw_trials(seed: int) -> list[tuple[float, float, list[float], float]]:
    """Draw trials; only the one with rate 1e-4 and weight 1 is feasible and good."""
    rng = np.random.default_rng(seed)
    others = [
        (10 ** rng.uniform(-5, -3), rng.uniform(0, 2), [-1.0, 0.5], 0.0) for _ in range(BOX_STARTUP)
    ]
    return [*others, (1e-4, 1.0, [0.5, 0.5], 0.0), (5e-4, 0.1, [0.9, 0.1], 0.3)]


def test_around_is_a_share_of_the_range_on_its_own_scale():
    linear = shrink_around(1.0, SPACE["weight"])
    assert isinstance(linear, FloatDistribution)
    assert (linear.low, linear.high) == pytest.approx((1 - BOX_SIDE, 1 + BOX_SIDE))
    log = shrink_around(1e-4, SPACE["rate"])
    assert isinstance(log, FloatDistribution)
    assert log.log
    assert math.log10(log.high) - math.log10(log.low) == pytest.approx(2 * BOX_SIDE)
    assert math.sqrt(log.low * log.high) == pytest.approx(1e-4)
    at_end = shrink_around(0.0, SPACE["weight"])
    assert isinstance(at_end, FloatDistribution)
    assert (at_end.low, at_end.high) == (0.0, pytest.approx(BOX_SIDE))


@pytest.mark.parametrize(
    "domain", [SPACE["mode"], IntDistribution(1, 8), FloatDistribution(0, 1, step=0.25)]
)
def test_discrete_domains_are_not_narrowed(domain: optuna.distributions.BaseDistribution):
    value = "a" if domain is SPACE["mode"] else 1
    assert shrink_around(value, domain) is domain


@pytest.mark.parametrize("seed", range(4))
def test_local_proposals_lie_around_the_trial_that_adds_to_the_hypervolume(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(samplers, "BOX_SHARE", 1.0)
    study = build_study(*draw_trials(seed))
    study.sampler = GaussianProcess(GOALS, seed, 4)
    params = study.ask(SPACE).params
    assert abs(params["weight"] - 1) <= BOX_SIDE + 1e-9
    assert abs(math.log10(params["rate"]) + 4) <= BOX_SIDE + 1e-9


HOPELESS = [t for t in draw_trials(0) if t[2] == [-1.0, 0.5] or t[3] > 0]


@pytest.mark.parametrize(
    "trials", [HOPELESS, draw_trials(0)[-BOX_STARTUP + 1 :]], ids=["none feasible", "too few"]
)
def test_without_enough_feasible_trials_proposals_cover_the_whole_space(
    trials: list[tuple[float, float, list[float], float]], monkeypatch: pytest.MonkeyPatch
):
    proposed: list[dict[str, object]] = []
    for share in (1.0, 0.0):
        monkeypatch.setattr(samplers, "BOX_SHARE", share)
        study = build_study(*trials)
        study.sampler = GaussianProcess(GOALS, 0, 4)
        proposed.append(study.ask(SPACE).params)
    assert proposed[0] == proposed[1]


def test_private_names_of_optuna_that_speed_up_proposals_exist():
    """Both names are private in Optuna; assigning to other names would have no effect."""
    plain = vars(optuna.samplers.GPSampler())
    ours = vars(GaussianProcess(GOALS, 0, 4))
    changed = {name for name in plain if name.startswith("_n_") and ours[name] != plain[name]}
    assert changed == {"_n_startup_trials", "_n_preliminary_samples", "_n_qmc_samples_ehvi"}


def test_about_half_of_the_proposals_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    boxes: list[int] = []
    sampling = registry.load(registry.SAMPLERS["gp"].target)(load_code_spec(tmp_path))
    study = build_study(*draw_trials(0))
    for seed in range(60):
        sampler = sampling.build(seed)
        monkeypatch.setattr(sampler, "_restrict_to_box", lambda _, space: boxes.append(1) or space)
        monkeypatch.setattr(
            optuna.samplers.GPSampler, "sample_relative", lambda *_: {"weight": 1.0}
        )
        study.sampler = sampler
        study.ask(SPACE)
    assert 20 <= len(boxes) <= 40
