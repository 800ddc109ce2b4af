"""Colours of marks, which MLflow shows without their symbols."""

import itertools

import numpy as np
import pytest

from gdpo_tune.core.text import CANDIDATE_COLORS, MODE_COLORS

DEUTERANOPIA = np.array(
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]
)
"""Of linear RGB. Source: Machado, Oliveira and Fernandes 2009, table 1, severity 1.0."""
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
"""Of linear sRGB, for white D65."""
WHITE = np.array([0.95047, 1.0, 1.08883])


def convert_to_lab(color, simulation):
    """CIE 1976 L*a*b* of `#rrggbb`, as seen under a simulation (a 3 x 3 matrix)."""
    shares = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    ratios = XYZ @ np.clip(simulation @ linear, 0, 1) / WHITE
    f = np.where(ratios > 216 / 24389, np.cbrt(ratios), (24389 / 27 * ratios + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def measure_distance(first, second, simulation=DEUTERANOPIA):
    """CIE76: 2.3 is just noticeable."""
    ends = [convert_to_lab(color, simulation) for color in (first, second)]
    return float(np.linalg.norm(ends[0] - ends[1]))


def test_the_arithmetic_gives_known_distances():
    assert measure_distance("#ffffff", "#000000", np.eye(3)) == pytest.approx(100, abs=0.1)
    assert measure_distance("#ff0000", "#00ff00", np.eye(3)) == pytest.approx(170.6, abs=0.3)
    assert measure_distance("#0072b2", "#7b3294") == pytest.approx(10.2, abs=0.1)


def test_dots_of_common_kinds_differ_under_deuteranopia():
    """wandb/docs#1600: gdpo against merge had a distance of 10 in MLflow, which has dots alone."""
    common = {mode: MODE_COLORS[mode] for mode in ("gdpo", "grpo", "grpo_no_std")}
    pairs = itertools.combinations({**common, **CANDIDATE_COLORS}.items(), 2)
    near = {(a, b) for (a, x), (b, y) in pairs if measure_distance(x, y) < 20}
    assert near == set()
    others = [measure_distance(CANDIDATE_COLORS["merge"], x) for x in MODE_COLORS.values()]
    assert min(others) >= 20
