"""Simulated searches for the tests of comparisons."""

import numpy as np

from gdpo_tune.analysis.sides import build_side
from tests.support.analysis import GOALS, build_trial


def simulate_search(seed, trials, gain=1.0, noise=0.04, **fields):
    """Draw trials of a trade-off between `a` and `b`, multiplied by `gain`."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(trials):
        share = rng.random()
        a, b = gain * np.sqrt([share, 1 - share]) * rng.uniform(0.5, 0.8) + rng.normal(0, noise, 2)
        records.append(build_trial(number, float(a), float(b), **fields))
    return records


def build_simulated_side(seed, trials, gain=1.0, name="x"):
    return build_side(name, simulate_search(seed, trials, gain), GOALS)
