"""Boxes of the Gaussian process, and proposals inside them."""

import math

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import create_trial

from gdpo_tune.core import registry
from gdpo_tune.core.trials import Objective
from gdpo_tune.tuning import samplers
from gdpo_tune.tuning.samplers import BOX_SIDE, BOX_STARTUP, GaussianProcess, shrink_around
from tests.support.tuning import load_code_spec

GOALS = (Objective("up", "maximize", 0.0), Objective("down", "minimize", 1.0))
SPACE = {
    "rate": FloatDistribution(1e-5, 1e-3, log=True),
    "weight": FloatDistribution(0.0, 2.0),
    "mode": CategoricalDistribution(("a", "b")),
}


def build_study(trials):
    """Build a study of complete trials: rate, weight, values, and excess over a constraint."""
    study = optuna.create_study(directions=["maximize", "minimize"])
    for rate, weight, values, excess in trials:
        params, constraints = {"rate": rate, "weight": weight, "mode": "a"}, {"bound": excess}
        common = {"params": params, "distributions": SPACE, "constraints": constraints}
        study.add_trial(create_trial(values=values, **common))
    return study


def draw_trials(seed):
    """Draw trials; only the one with rate 1e-4 and weight 1 is feasible and good."""
    rng = np.random.default_rng(seed)
    others = [
        (10 ** rng.uniform(-5, -3), rng.uniform(0, 2), [-1.0, 0.5], 0.0) for _ in range(BOX_STARTUP)
    ]
    return [*others, (1e-4, 1.0, [0.5, 0.5], 0.0), (5e-4, 0.1, [0.9, 0.1], 0.3)]


def propose(trials, seed, share, monkeypatch):
    """Propose parameters after these trials, with a share of proposals in a box."""
    monkeypatch.setattr(samplers, "BOX_SHARE", share)
    study = build_study(trials)
    study.sampler = GaussianProcess(GOALS, seed, 4)
    return study.ask(SPACE).params


@pytest.mark.parametrize(
    ("value", "name", "low", "high"),
    [
        (1.0, "weight", 1 - BOX_SIDE, 1 + BOX_SIDE),
        (0.0, "weight", 0.0, BOX_SIDE),  # at its end
        (1e-4, "rate", 10 ** (-4 - BOX_SIDE), 10 ** (-4 + BOX_SIDE)),
    ],
)
def test_around_is_a_share_of_the_range_on_its_own_scale(value, name, low, high):
    box = shrink_around(value, SPACE[name])
    assert (box.low, box.high, box.log) == (
        pytest.approx(low),
        pytest.approx(high),
        SPACE[name].log,
    )


@pytest.mark.parametrize(
    "domain", [SPACE["mode"], IntDistribution(1, 8), FloatDistribution(0, 1, step=0.25)]
)
def test_discrete_domains_are_not_narrowed(domain):
    value = "a" if domain is SPACE["mode"] else 1
    assert shrink_around(value, domain) is domain


@pytest.mark.parametrize("seed", range(4))
def test_local_proposals_lie_around_the_trial_that_adds_to_the_hypervolume(seed, monkeypatch):
    params = propose(draw_trials(seed), seed, 1.0, monkeypatch)
    assert abs(params["weight"] - 1) <= BOX_SIDE + 1e-9
    assert abs(math.log10(params["rate"]) + 4) <= BOX_SIDE + 1e-9


HOPELESS = [t for t in draw_trials(0) if t[2] == [-1.0, 0.5] or t[3] > 0]


@pytest.mark.parametrize(
    "trials", [HOPELESS, draw_trials(0)[-BOX_STARTUP + 1 :]], ids=["none feasible", "too few"]
)
def test_without_enough_feasible_trials_proposals_cover_the_whole_space(trials, monkeypatch):
    assert propose(trials, 0, 1.0, monkeypatch) == propose(trials, 0, 0.0, monkeypatch)


def test_private_names_of_optuna_that_speed_up_proposals_exist():
    """Both names are private in Optuna; assigning to other names would have no effect."""
    plain = vars(optuna.samplers.GPSampler())
    ours = vars(GaussianProcess(GOALS, 0, 4))
    changed = {name for name in plain if name.startswith("_n_") and ours[name] != plain[name]}
    assert changed == {"_n_startup_trials", "_n_preliminary_samples", "_n_qmc_samples_ehvi"}


def test_about_half_of_the_proposals_are_local(tmp_path, monkeypatch):
    boxes, study = [], build_study(draw_trials(0))
    sampling = registry.load(registry.SAMPLERS["gp"].target)(load_code_spec(tmp_path))
    monkeypatch.setattr(
        GaussianProcess, "_restrict_to_box", lambda self, _, space: boxes.append(1) or space
    )
    monkeypatch.setattr(optuna.samplers.GPSampler, "sample_relative", lambda *_: {"weight": 1.0})
    for seed in range(60):
        study.sampler = sampling.build(seed)
        study.ask(SPACE)
    assert 20 <= len(boxes) <= 40
