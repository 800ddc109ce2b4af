"""What Optuna and its dashboard see: names, values, constraints and costs of trials."""

import json
from dataclasses import replace

import optuna
import pytest

from gdpo_tune import load_sweep
from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.trials import Cost, Estimate, Measurement
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.trial_encoding import encode_outcome
from gdpo_tune.tuning.proposals import SamplerView
from tests.support.tuning import build_measurement, build_outcome, load_code_spec


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path)


def start(ledger, role="search", **params):
    complete = {**ledger.spec.space.complete_baseline({}), **params}
    return ledger.start(complete, role, "model", seed=1)


def run(ledger, role, correctness):
    record = start(ledger, role, learning_rate=1e-4 * (1 + correctness))
    return ledger.complete(record.number, build_outcome(correctness))


def reopened(spec):
    with Ledger.open(spec) as ledger:
        return ledger.get_records()


def set_outcome(ledger, number):
    """Record an outcome as if the process was killed before the trial had its new state."""
    outcome = encode_outcome(build_outcome(), ledger.directory)
    study = ledger.study
    study._storage.set_trial_user_attr(study.trials[number]._trial_id, "outcome", outcome)


def read_study(journal):
    """Read a journal as `optuna-dashboard` does, without this package."""
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    storage = optuna.storages.JournalStorage(backend)
    (found,) = storage.get_all_studies()
    return optuna.load_study(study_name=found.study_name, storage=storage)


def test_a_study_has_the_names_of_its_sweep_and_the_values_of_its_objectives(spec):
    with Ledger.open(spec) as ledger:
        start(ledger)
        ledger.complete(0, build_outcome(0.1, 0.2, 0.3, test_shift=0.05))
        assert [direction.name for direction in ledger.study.directions] == ["MAXIMIZE"] * 3
    journal = spec.directory / "ledger.journal"
    study = read_study(journal)
    assert study.study_name == spec.name
    assert study.metric_names == list(spec.objectives)
    assert study.trials[0].values == [0.1, 0.2, 0.3], "on validation prompts, in order"
    shown = {key: v for key, v in study.trials[0].user_attrs.items() if key.startswith("test/")}
    assert shown == pytest.approx(
        {"test/correctness": 0.15, "test/format": 0.25, "test/length": 0.35}
    )
    (record,) = reopened(spec)  # nothing is named again
    assert record.test["correctness"].mean == pytest.approx(0.15)
    assert journal.read_text().count("metric_names") == 1


def test_a_renamed_sweep_keeps_its_study(spec, tmp_path):
    with Ledger.open(spec) as ledger:
        start(ledger)
    spec.directory.rename(tmp_path / "renamed")
    assert len(reopened(spec.model_copy(update={"name": "renamed"}))) == 1
    lines = (tmp_path / "renamed" / "ledger.journal").read_text().splitlines()
    assert [json.loads(line)["op_code"] for line in lines].count(0) == 1


def test_a_copy_of_the_study_has_the_names(spec):
    with Ledger.open(spec) as ledger:
        for number in range(3):
            start(ledger)
            ledger.complete(number, build_outcome(0.6 - 0.1 * number, 0.1 * number))
    figure = optuna.visualization.plot_pareto_front(load_sweep(str(spec.directory)).study)
    assert figure.layout.scene.xaxis.title.text == "correctness"


def test_optuna_parameters_are_the_searched_active_ones_inside_of_their_domain(tmp_path):
    spec = load_code_spec(tmp_path, ["space.reward_weights.length={log: [0.05, 0.5]}"])
    with Ledger.open(spec) as ledger:
        start(ledger, **{"reward_weights.length": 1.0})
        params = ledger.study.trials[0].params
    assert set(params) == {"normalization", "group_size", "reward_weights.format", "learning_rate"}


@pytest.mark.parametrize(("correctness", "feasible"), [(0.2, True), (0.19, False)])
def test_every_complete_trial_carries_its_constraints(spec, correctness, feasible):
    with Ledger.open(spec) as ledger:
        assert run(ledger, "search", correctness).feasible is feasible
        assert ledger.study.trials[0].constraints["correctness"] == pytest.approx(0.2 - correctness)


def test_budget_and_constraints_may_change(spec, tmp_path):
    with Ledger.open(spec) as ledger:
        run(ledger, "search", 0.25)
    stricter = load_code_spec(tmp_path, ["search.trials=40", "constraints.format='>= 0.6'"])
    assert [record.feasible for record in reopened(stricter)] == [False]


@pytest.mark.parametrize(("bound", "feasible"), [("<= 90", True), ("<= 1", False)])
def test_a_sweep_continues_with_a_new_constraint_on_a_cost(spec, tmp_path, bound, feasible):
    measured = build_measurement(20, Cost(completions=1280, seconds=1.5), format=0.5)
    with Ledger.open(spec) as ledger:
        for _ in range(3):
            start(ledger)
        ledger.record_rung(0, measured)
        ledger.complete(0, build_outcome())
        ledger.record_rung(1, measured)
        set_outcome(ledger, 2)
    with Ledger.open(load_code_spec(tmp_path, [f"constraints.seconds='{bound}'"])) as ledger:
        done, under_way, closed = ledger.get_records()
        excess = 2.0 - float(bound.removeprefix("<= "))
        assert ledger.study.trials[2].constraints["seconds"] == excess
    assert [r.state for r in (done, under_way, closed)] == ["complete", "running", "complete"]
    assert [done.feasible, under_way.feasible, closed.feasible] == [feasible, None, feasible]
    assert done.validation["seconds"] == done.test["seconds"] == Estimate(2.0, 0.0)
    assert not under_way.validation
    for rung in (*done.rungs, *under_way.rungs):
        assert rung.validation["seconds"] == Estimate(1.5, 0.0)


def test_a_new_constraint_on_a_missing_metric_is_not_met(spec, tmp_path):
    with Ledger.open(spec) as ledger:
        run(ledger, "search", 0.5)
        start(ledger)
        set_outcome(ledger, 1)
    records = reopened(load_code_spec(tmp_path, ["constraints.bug_rate='<= 0.5'"]))
    assert [(record.state, record.feasible) for record in records] == [("complete", False)] * 2


def test_a_stored_cost_metric_does_not_change_with_the_resources(tmp_path):
    judged = "constraints.gpu_hours='<= 1'"
    spent = Cost(completions=640, seconds=1800.0)
    with Ledger.open(load_code_spec(tmp_path, [judged, "resources.gpus=1"])) as ledger:
        start(ledger)
        ledger.record_rung(0, build_measurement(20, spent, format=0.5))
        ledger.complete(0, replace(build_outcome(), cost=spent))
    (record,) = reopened(load_code_spec(tmp_path, [judged, "resources.gpus=0.25"]))
    assert record.feasible
    assert record.validation["gpu_hours"] == record.rungs[0].validation["gpu_hours"]
    assert record.validation["gpu_hours"] == Estimate(0.5, 0.0)


def test_a_cost_that_an_objective_or_constraint_names_is_a_metric(tmp_path):
    objective = "objectives.seconds={direction: minimize, reference: 60}"
    spec = load_code_spec(tmp_path, [objective, 'constraints.cpu_seconds="<= 1"'])
    with Ledger.open(spec) as ledger:
        start(ledger)
        halfway = Measurement(1, {}, Cost(64, 1.0, 0.5), build_outcome().validation)
        ledger.record_rung(0, halfway)
        ledger.complete(0, build_outcome())  # 2 s of wall time, 1.5 s of CPU time
        assert ledger.study.trials[0].values[-1] == 2.0
        assert ledger.study.trials[0].constraints["cpu_seconds"] == 0.5
    (record,) = reopened(spec)
    costs = {"seconds": Estimate(2, 0), "cpu_seconds": Estimate(1.5, 0)}
    for estimates in (record.validation, record.test):
        assert {name: estimates[name] for name in estimates if name not in halfway.validation} == (
            costs
        )
    assert record.feasible is False
    assert record.rungs[0].validation["seconds"] == Estimate(1.0, 0)


@pytest.fixture
def relative(tmp_path):
    bound = 'constraints.correctness=">= untrained - 0.1"'
    return load_code_spec(tmp_path, [bound, "search.sampler=gp"])


def test_a_bound_applies_once_its_baseline_is_measured(relative):
    view = SamplerView(relative)
    with Ledger.open(relative) as ledger, Ledger.open(relative, read_only=True) as reader:
        view.observe(run(ledger, "search", 0.3))
        assert [t.constraints for t in view.study.trials] == [{"correctness": 0.0}]
        for opened in (ledger, reader):
            assert [record.feasible for record in opened.get_records()] == [True]
        view.observe(run(ledger, "untrained", 0.6))
        (violation,) = [t.constraints["correctness"] for t in view.study.trials]
        assert round(violation, 9) == 0.2
        run(ledger, "search", 0.55)
        for opened in (ledger, reader):
            assert [record.feasible for record in opened.get_records()] == [False, True, True]
    with Ledger.open(relative) as ledger:
        assert [record.feasible for record in ledger.get_records()] == [False, True, True]
        assert ledger.spec.constraints["correctness"].limit == 0.5


@pytest.mark.parametrize("bound", [">= untrained + 2", "<= published - 1.5"])
def test_a_bound_beyond_every_value_is_refused(tmp_path, bound):
    with pytest.raises(SpecError, match="no trial can ever meet this"):
        load_code_spec(tmp_path, [f'constraints={{correctness: "{bound}"}}'])
