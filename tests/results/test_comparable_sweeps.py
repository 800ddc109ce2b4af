"""Sweeps that cannot be compared, because their objectives mean different things."""

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.results.comparison_report import compare_sweeps
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT


def load_sweep(name: str, *overrides: str) -> Sweep:
    """Return a sweep without trials."""
    spec = load_spec(ROOT / "search_spaces" / f"{name}.yaml", [*overrides, f"storage={name}"])
    return Sweep(spec, ())


@pytest.mark.parametrize(
    ("left", "right", "difference"),
    [
        (("tools",), ("math",), "task = tools, not math"),
        (("tools",), ("tools", "scoring=released", "name=other"), "scoring = strict, not released"),
    ],
)
def test_another_task_or_scoring_is_not_compared(left, right, difference):
    with pytest.raises(UsageError, match=difference):
        compare_sweeps(load_sweep(*left), load_sweep(*right))
