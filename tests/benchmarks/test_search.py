"""The comparison of samplers: what is simulated, and the figures made of it, in closed form."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import Plan, build_rows, render_markdown, run_job
from jobs import finish, read_done
from optuna.samplers import TPESampler
from problems import Curve, Problem, build_exact_estimates, compute_branin, compute_currin
from simulator import (
    History,
    Visit,
    compute_median,
    evaluate_at_budgets,
    find_budget_to_reach,
    simulate,
    trace_hypervolume,
)
from tuners import PROBLEMS, OptunaAlone, Product, RayOptuna

from gdpo_tune.core.trials import Params
from gdpo_tune.spec.model import Constraint, ObjectiveSpec
from gdpo_tune.spec.space import Uniform


class Line(Problem):
    """Gain and thrift trade off along x; a trial earns in proportion to its training."""

    name = "line"
    levels = (1, 3, 9)
    domains: Mapping[str, Uniform] = {"x": Uniform(low=0.0, high=1.0)}
    objectives: Mapping[str, ObjectiveSpec] = {
        "gain": ObjectiveSpec(direction="maximize", reference=0.0),
        "loss": ObjectiveSpec(direction="minimize", reference=2.0),
    }
    best: Mapping[str, float] = {"gain": 1.0, "loss": 0.0}
    constraints: Mapping[str, Constraint] = {"gain": Constraint(op=">=", bound=0.1)}

    def draw_curve(self, params: Params, rng: np.random.Generator) -> Curve:
        noise = float(rng.standard_normal())
        return lambda level: build_exact_estimates(
            {**{k: v * level / 9 for k, v in self.compute_truth(params).items()}, "noise": noise}
        )

    def compute_truth(self, params: Params, level: int = 9) -> Mapping[str, float]:
        return {"gain": float(params["x"]), "loss": 2 * float(params["x"])}


class Scripted:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.noise: dict[int, float] = {}

    def start(self, number: int) -> Params:
        return {"x": 0.1 * (number + 1)}

    def observe(self, number, level, values) -> None:
        self.noise[number] = values["noise"].mean

    def finish(self, number, values) -> None:
        self.finished.append(number)


# --- problems -------------------------------------------------------------------------------------


def test_branin_has_its_three_minima_at_full_fidelity():
    for across, up in ((-math.pi, 12.275), (math.pi, 2.275), (9.42478, 2.475)):
        assert compute_branin((across + 5) / 15, up / 15, 1.0) == pytest.approx(0.397887, abs=1e-5)
    assert compute_branin((math.pi + 5) / 15, 2.275 / 15, 0.5) > 0.5


def test_currin_is_damped_at_low_fidelity_alone():
    assert compute_currin(0.0, 0.5, 1.0) == 3.0
    assert compute_currin(0.0, 0.5, 0.0) == pytest.approx(3.0 * (1 - 0.1 * math.exp(-1)))
    assert compute_currin(0.0, 0.0, 0.0) == 3.0


def test_botorch_has_the_same_functions():
    torch = pytest.importorskip("torch")
    problems = pytest.importorskip("botorch.test_functions.multi_objective_multi_fidelity")
    theirs = problems.MOMFBraninCurrin(negate=False)
    for x1, x2, fidelity in np.random.default_rng(0).random((20, 3)):
        first, second = theirs(torch.tensor([[x1, x2, fidelity]], dtype=torch.float64))[0].tolist()
        assert first == pytest.approx((compute_branin(x1, x2, fidelity) - 21) / 22)
        assert second == pytest.approx((compute_currin(x1, x2, fidelity) - 14) / 15)


def test_pymoo_constraints_are_met_at_zero_or_less():
    pytest.importorskip("pymoo")
    problem = PROBLEMS["bnh"]()
    truth = problem.compute_truth({"x1": 0.0, "x2": 0.0}, 1)
    assert truth["f1"] == 0.0
    assert truth["f2"] == 50.0
    assert problem.constraints["g1"].holds(truth["g1"])
    assert len(PROBLEMS["dtlz2"]().objectives) == 3


# --- simulated time -------------------------------------------------------------------------------


def test_the_budget_is_what_was_measured_and_nothing_starts_after_it():
    tuner = Scripted()
    history = simulate(tuner, Line(), workers=1, seed=0, budget=18)
    assert [(v.number, v.level, v.spent) for v in history.visits] == [
        *((0, 1, 1), (0, 3, 3), (0, 9, 9)),
        *((1, 1, 10), (1, 3, 12), (1, 9, 18)),
    ]
    assert tuner.finished == [0, 1] == list(history.params) == history.list_completed()


def test_trials_in_flight_interleave_and_the_unfinished_are_lost():
    history = simulate(Scripted(), Line(), workers=4, seed=0, budget=36)
    assert {v.number for v in history.visits[:4]} == {0, 1, 2, 3}
    assert len(history.params) == 4 + len(history.list_completed()) - 1
    times = [visit.time for visit in history.visits]
    assert times == sorted(times)


def test_a_trial_is_the_same_whatever_else_happens():
    alone, beside = Scripted(), Scripted()
    simulate(alone, Line(), workers=1, seed=5, budget=27)
    simulate(beside, Line(), workers=3, seed=5, budget=27)
    assert {n: alone.noise[n] for n in (0, 1, 2)} == {n: beside.noise[n] for n in (0, 1, 2)}


# --- figures --------------------------------------------------------------------------------------


def history_of(*trials: tuple[float, int]) -> History:
    """Trials that were completed, each with its x and what had been spent by then."""
    history = History(params={n: {"x": x} for n, (x, _) in enumerate(trials)})
    for number, (x, spent) in enumerate(trials):
        values = build_exact_estimates(Line().compute_truth({"x": x}))
        history.visits.append(Visit(spent, spent, number, 9, values, True))
    return history


def test_hypervolume_is_a_share_of_the_box_and_of_feasible_trials():
    # gain x, loss 2x: a box of x (2 - 2x) of 2, so x (1 - x)
    assert trace_hypervolume(history_of((0.5, 9)), Line()) == [(9, pytest.approx(0.25))]
    steps = trace_hypervolume(history_of((0.05, 9), (0.25, 18), (0.25, 27), (0.75, 36)), Line())
    assert [spent for spent, _ in steps] == [18, 36]
    assert steps[0][1] == pytest.approx(0.25 * 0.75)
    assert steps[1][1] == pytest.approx(0.25 * 0.75 + 0.5 * 0.25)


def test_what_was_not_trained_to_the_end_has_no_hypervolume():
    history = history_of((0.5, 9))
    history.visits[0] = Visit(9, 9.0, 0, 3, history.visits[0].values, False)
    assert trace_hypervolume(history, Line()) == []


class Checkpointed(Line):
    """A line whose checkpoints are candidates, and whose measurements cost 2 completions."""

    has_checkpoints = True
    evaluation_cost = 2

    def compute_truth(self, params: Params, level: int = 9) -> Mapping[str, float]:
        return {"gain": float(params["x"]), "loss": 2 * float(params["x"]) + (9 - level) / 9}


def checkpoint(history: History, number: int, spent: int, gain: float, loss: float) -> None:
    values = build_exact_estimates({"gain": gain, "loss": loss})
    history.visits.append(Visit(spent, spent, number, 3, values, False))


def test_a_checkpoint_counts_at_its_true_value_while_nothing_measured_dominates_it():
    history = History(params={0: {"x": 0.5}, 1: {"x": 0.25}})
    checkpoint(history, 0, 3, 0.9, 0.1)  # measured better than it is: loss 1 + 6 / 9
    assert trace_hypervolume(history, Checkpointed()) == [(3, pytest.approx(0.5 / 6))]
    assert trace_hypervolume(history, Line()) == []
    checkpoint(history, 1, 6, 0.8, 0.2)  # dominated: only its end would count
    assert len(trace_hypervolume(history, Checkpointed())) == 1
    ended = build_exact_estimates({"gain": 0.3, "loss": 0.9})
    history.visits.append(Visit(9, 9, 1, 9, ended, True))  # dominated too, but an end
    assert trace_hypervolume(history, Checkpointed())[1] == (
        9,
        pytest.approx((0.25 * 1.5 + 0.25 * 1 / 3) / 2),
    )


def test_a_checkpoint_that_breaks_a_constraint_where_it_was_measured_does_not_count():
    history = History(params={0: {"x": 0.5}, 1: {"x": 0.25}})
    checkpoint(history, 0, 3, 0.01, 0.0)  # nothing dominates it, but its gain is below the bound
    checkpoint(history, 1, 6, 0.25, 1.0)
    volumes = dict(trace_hypervolume(history, Checkpointed()))
    assert volumes[6] == pytest.approx(0.25 * (2 - 0.5 - 6 / 9) / 2)


def test_the_budget_pays_for_measurements():
    history = simulate(Scripted(), Checkpointed(), workers=1, seed=0, budget=30)
    assert [visit.spent for visit in history.visits] == [3, 7, 15, 18, 22, 30]
    assert Checkpointed().full_cost == 15


def test_a_curve_is_a_step_function():
    steps = [(2.0, 0.25), (5.0, 0.5)]
    assert evaluate_at_budgets(steps, [0, 1.9, 2, 4.9, 5, 99]).tolist() == [
        0,
        0,
        0.25,
        0.25,
        0.5,
        0.5,
    ]
    assert evaluate_at_budgets([], [1, 2]).tolist() == [0, 0]


def test_the_interval_of_a_median():
    odd = compute_median(np.array([[1.0, 7.0], [2.0, 7.0], [9.0, 7.0]]))
    assert [part.tolist() for part in odd] == [[2.0, 7.0], [1.0, 7.0], [9.0, 7.0]]
    _, low, high = compute_median(np.random.default_rng(0).normal(size=(400, 1)))
    # a sample median of a standard normal has a standard error of sqrt(pi / 2n)
    expected = 1.96 * math.sqrt(math.pi / 800)
    assert high[0] - low[0] == pytest.approx(2 * expected, rel=0.25)


def test_the_budget_at_which_the_median_reaches_a_target():
    seeds = [[(1, 0.2), (4, 0.6)], [(2, 0.5)], [(3, 0.4), (9, 0.9)]]
    assert find_budget_to_reach(seeds, 0.4, 10) == 3
    assert find_budget_to_reach(seeds, 0.5, 10) == 4
    assert find_budget_to_reach(seeds, 0.6, 8) is None
    assert find_budget_to_reach(seeds, 0.6, 9) == 9
    assert find_budget_to_reach([[], []], 0.1, 10) is None


# --- contestants ----------------------------------------------------------------------------------


def test_the_product_learns_from_trials_under_way_and_from_ends(monkeypatch: pytest.MonkeyPatch):
    tuner = Product(Line(), "random", trials=5, seed=0)
    told = Spied(monkeypatch, tuner._projection, "observe")
    history = simulate(tuner, Line(), workers=1, seed=0, budget=9)
    records = [record for record, *_ in told.heard]
    assert [record.state for record in records] == ["running"] * 3 + ["complete"]
    assert [len(record.rungs) for record in records] == [0, 1, 2, 3]
    assert records[-1].test == history.visits[-1].values
    assert tuner.compute_model_share() == 0.0


def test_the_products_model_is_asked_after_its_start():
    tuner = Product(Line(), "tpe", trials=12, seed=0)
    simulate(tuner, Line(), workers=2, seed=0, budget=12 * 9)
    assert tuner.compute_model_share() >= 0.5


def test_optuna_alone_is_told_values_and_constraints():
    tuner = OptunaAlone(Line(), TPESampler(seed=0))
    simulate(tuner, Line(), workers=2, seed=0, budget=27)
    finished = [trial for trial in tuner._study.trials if trial.state.is_finished()]
    assert len(finished) == 3
    for trial in finished:
        assert trial.values == [trial.params["x"], 2 * trial.params["x"]]
        assert trial.constraints == {"gain": pytest.approx(0.1 - trial.params["x"])}


class Spied:
    """Keeps what an object's method is called with, and calls it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: Any, method: str) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self._method = getattr(of, method)
        monkeypatch.setattr(of, method, self)

    def __call__(self, *arguments: Any) -> Any:
        self.heard.append(arguments)
        return self._method(*arguments)


@pytest.mark.slow  # imports Ray
def test_rays_searcher_is_told_the_end_of_each_trial(monkeypatch: pytest.MonkeyPatch):
    tuner = RayOptuna(Line(), 0)
    told = Spied(monkeypatch, tuner._search, "on_trial_complete")
    history = simulate(tuner, Line(), workers=1, seed=0, budget=9)
    ended = {name: value.mean for name, value in history.visits[-1].values.items()}
    assert told.heard == [("0", {name: ended[name] for name in Line.objectives})]
    known = [t.values for t in tuner._search._ot_study.trials if t.state.is_finished()]
    assert known == [[ended["gain"], ended["loss"]]]


def test_what_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tuners.find_spec", lambda package: None)
    plan = Plan("p", ["branin_currin", "zdt1"], ["optuna tpe", "botorch qnehvi"], 3, 5)
    installed, lacking = plan.drop_missing()
    assert (installed.problems, installed.contestants) == (["branin_currin"], ["optuna tpe"])
    assert lacking == {"zdt1": "pymoo", "botorch qnehvi": "optuna_integration"}
    jobs = [job["contestant"] for job in plan.list_jobs() if job["problem"] == "zdt1"]
    # proposals of the slow one take minutes
    assert (jobs.count("optuna tpe"), jobs.count("botorch qnehvi")) == (5, 3)


# --- runs and reports -----------------------------------------------------------------------------


def doubled(job: Mapping[str, int]) -> dict[str, int]:
    return {"twice": 2 * job["of"]}


def refused(job: Mapping[str, int]) -> dict[str, int]:
    raise AssertionError(f"{job} was done already")


def test_a_run_goes_on_after_the_last_whole_line(tmp_path: Path):
    kept, jobs = tmp_path / "folder" / "kept.jsonl", [{"of": 1}, {"of": 2}]
    assert finish(jobs[:1], doubled, kept, 1) == [{"twice": 2}]
    with kept.open("a") as file:
        file.write('{"job": {"of": 2}, "res')
    assert finish(jobs, doubled, kept, 1) == [{"twice": 2}, {"twice": 4}]
    assert finish(jobs[::-1], refused, kept, 1) == [{"twice": 4}, {"twice": 2}]
    assert len(read_done(kept)) == 2


def test_whole_lines_are_never_written_again(tmp_path: Path):
    kept = tmp_path / "kept.jsonl"
    finish([{"of": 1}], doubled, kept, 1)
    os.utime(kept, ns=(0, 0))
    assert len(read_done(kept)) == 1
    assert kept.stat().st_mtime_ns == 0


def test_a_sweep_is_the_same_every_time_and_its_figures_are_in_the_table():
    jobs = Plan("p", ["branin_currin"], ["gdpo_tune random", "optuna random"], 6, 2).list_jobs()
    results = [run_job(job) for job in jobs]
    assert run_job(jobs[0])["steps"] == results[0]["steps"] != results[2]["steps"]
    ours, peer = build_rows(jobs, results, 6)
    finals = [evaluate_at_budgets(result["steps"], [6])[0] for result in results[1::2]]
    assert peer.median == pytest.approx(np.median(finals), abs=1e-4)
    assert (peer.to_reach, peer.model_share, ours.model_share) == (None, None, 0.0)
    assert ours.started > ours.complete
    assert f"| optuna random | {peer.median:.3f} [" in render_markdown([ours, peer], 6)
