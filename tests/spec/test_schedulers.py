"""Where successive halving compares trials, and files in which it would compare none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import AshaSettings
from gdpo_tune.spec.spec_warnings import list_warnings
from tests.support.tuning import load_code_spec


@pytest.mark.parametrize(
    ("grace", "steps", "factor", "expected"),
    [
        (0.1, 60, 3, (7, 20)),
        (0.1, 27, 3, (3, 9)),
        (0.0, 27, 3, (1, 3, 9)),
        (0.5, 60, 3, ()),
        (0.4, 60, 2, (30,)),
        (0.1, 2, 3, (1,)),
        (0.1, 1, 3, ()),
        (0.0, 3, 1.5, (1, 2)),
    ],
)
def test_rungs_part_the_budget(grace: float, steps: int, factor: float, expected: tuple[int, ...]):
    assert AshaSettings(grace=grace, reduction_factor=factor).list_rungs(steps) == expected


def doubts(spec: SweepSpec) -> list[str]:
    return [doubt for doubt in list_warnings(spec) if "no rung lies before the last step" in doubt]


@pytest.mark.parametrize("steps", [2, 3, 4, 10, 60])
def test_the_defaults_compare_trials_of_two_steps_and_more(tmp_path: Path, steps: int):
    spec = load_code_spec(tmp_path, [f"training.steps={steps}"])
    assert AshaSettings().list_rungs(steps)
    assert not doubts(spec)


def test_trials_too_short_to_be_compared_are_doubted_and_run(tmp_path: Path):
    one = load_code_spec(tmp_path, ["training.steps=1"])
    (doubt,) = doubts(one)
    assert doubt.startswith("training.steps = 1: ")
    assert not doubts(
        load_code_spec(tmp_path, ["training.steps=1", "search.scheduler={type: fifo}"])
    )
    close = "search.scheduler={type: asha, reduction_factor: 1.05, grace: 0.95}"
    assert doubts(load_code_spec(tmp_path, ["training.steps=4", close]))
    assert not doubts(load_code_spec(tmp_path, [close]))
