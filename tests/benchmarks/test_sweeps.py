"""The benchmark of real sweeps: what two of them had come to when as much was spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core.trials import Cost, Estimate, State, TrialRecord
from sweeps import Sweep, build_figures, build_panels, compute_medians, read_sweep, render_markdown
from tests.support.tuning import load_code_spec


def trial(number: int, state: State, worth: float, completions: int, seconds: float) -> TrialRecord:
    found = {name: Estimate(worth, 0.01) for name in ("correctness", "format", "length")}
    return TrialRecord(
        number=number,
        role="search",
        state=state,
        params={},
        seed=number,
        proposer="model",
        cost=Cost(completions, seconds, seconds),
        started=0.0,
        finished=float(number + 1),
        feasible=True,
        test=found if state == "complete" else {},
        validation=found if state == "complete" else {},
    )


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Sweep, Sweep]:
    session = {"sampler": "gp (the default)", "slots": 2}
    fifo = [trial(0, "complete", 0.2, 100, 10.0), trial(1, "complete", 0.4, 100, 10.0)]
    asha = [
        trial(0, "complete", 0.2, 100, 12.0),
        trial(1, "pruned", 0.0, 50, 6.0),
        trial(2, "complete", 0.5, 50, 6.0),
    ]
    return (
        read_sweep(load_code_spec(tmp_path, ["search.scheduler={type: fifo}"]), fifo, session),
        read_sweep(load_code_spec(tmp_path), asha, session),
    )


def test_each_side_at_the_budget_of_the_first(pair: tuple[Sweep, Sweep]) -> None:
    found = build_figures(*pair)
    by_cpu, by_completions = found["cpu_seconds"], found["completions"]
    assert (by_cpu["budget"], by_completions["budget"]) == (20.0, 200)
    assert by_completions["fifo"]["hypervolume"] == pytest.approx(0.4**3)
    assert by_completions["asha"]["hypervolume"] == pytest.approx(0.5**3)
    assert by_cpu["asha"]["hypervolume"] == pytest.approx(0.2**3)  # its third trial ends too late
    assert by_cpu["asha"]["ended"] == 2
    assert by_cpu["asha"]["complete"] == 1


def test_where_the_other_reaches_the_first(pair: tuple[Sweep, Sweep]) -> None:
    found = build_figures(*pair)
    assert found["completions"]["fifo"]["reaches_fifo_at"] == 1.0
    assert found["completions"]["asha"]["reaches_fifo_at"] == 1.0
    assert found["cpu_seconds"]["asha"]["reaches_fifo_at"] is None
    table = render_markdown([found])
    assert "| 0 | cpu seconds | asha | 0.008 | 0.000 | 1 of 2 | 24 | — |" in table
    assert compute_medians([found])["asha_hypervolume_at_equal_completions"] == 0.125


def test_a_panel_a_seed_and_one_of_all(pair: tuple[Sweep, Sweep]) -> None:
    lines = build_panels([pair])
    assert [line.problem for line in lines] == ["seed 0"] * 2 + ["all seeds"] * 2
    assert lines[1].steps[-1] == (200, pytest.approx(0.125))
