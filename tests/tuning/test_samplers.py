"""The trials as a sampler sees them, and its proposals."""

import itertools
import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from gdpo_tune.core import registry
from gdpo_tune.core.trials import Cost, Part, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.opening import copy_study
from gdpo_tune.ledger.trial_encoding import convert_to_distribution
from gdpo_tune.spec import first_trials
from gdpo_tune.tuning.proposals import SamplerView
from gdpo_tune.tuning.samplers import ParzenEstimator, SamplerFactory
from tests.support.search_driver import Driver
from tests.support.tuning import build_measurement, build_outcome, build_trade_off, load_code_spec

CONDITIONAL = """
task: code
objectives:
  correctness: {direction: maximize, reference: 0}
  format: {direction: maximize, reference: 0}
space:
  normalization: [gdpo, grpo]
  reward_weights: {format: {log: [0.1, 2]}}
  beta: {range: [0.25, 0.75], when: {normalization: [gdpo]}}
search: {trials: 30}
"""


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path)


@pytest.fixture
def view(spec):
    return SamplerView(spec)


@pytest.fixture
def conditional(tmp_path):
    path = tmp_path / "conditional.yaml"
    path.write_text(CONDITIONAL)
    return load_code_spec(tmp_path, ["search.sampler=tpe"], path)


def build_record(number, params, measured=None, role="search", proposer="model", state="running"):
    state, validation = (state, {}) if measured is None else ("complete", measured.validation)
    return TrialRecord(number, role, state, params, number, proposer, validation=validation)


def build_point(spec, **changes):
    return {**spec.space.complete_baseline({}), **changes}


def load_view(spec, records):
    view = SamplerView(spec)
    view.load(records)
    return view


def list_entries(view):
    """List state and values of every configuration in the sampler's study."""
    trials = view.study.trials
    return [(t.state.name, t.values) for t in trials if t.state != TrialState.FAIL]


def test_merges_and_checkpoints_change_no_proposal(spec):
    params = build_point(spec)
    trained = build_record(0, params, build_outcome())
    checkpoint = build_record(1, params, build_outcome(0.1, 0.1), "checkpoint", "candidate")
    checkpoint = replace(checkpoint, parts=(Part(0, 20, 1.0),))
    again = replace(checkpoint, number=2, role="replicate", replicate_of=1)
    merge = replace(checkpoint, number=3, role="merge", params={}, parts=(Part(0, 20, 0.5),) * 2)
    alone, beside = load_view(spec, [trained]), load_view(spec, [trained, checkpoint, again])
    beside.observe(merge)
    assert list_entries(beside) == list_entries(alone)
    assert beside.propose() == alone.propose()


def run_trials(view, trials, width=2):
    """Propose `trials` times with `width` trials in flight, which end in order of start."""
    suggestions, flying = [], []
    for number in range(trials):
        suggestion = view.propose()
        suggestions.append(suggestion)
        flying.append(build_record(number, suggestion.params, proposer=suggestion.proposer))
        view.observe(flying[-1])
        if len(flying) == width:
            done = flying.pop(0)
            view.observe(replace(done, state="complete", validation=measure(done.params)))
    return suggestions


def measure(params):
    return build_trade_off(params).validation


def test_running_is_pending_and_complete_has_validation_values(spec, view):
    params = build_point(spec)
    view.observe(build_record(0, params))
    assert list_entries(view) == [("RUNNING", None)]
    view.observe(build_record(0, params, build_outcome(0.1, 0.2, 0.3, test_shift=0.5)))
    assert list_entries(view) == [("COMPLETE", [0.1, 0.2, 0.3])]
    assert view.study.trials[0].constraints == {"correctness": pytest.approx(0.1)}


def test_seeds_of_one_configuration_are_one_entry_with_their_mean(spec, view):
    params = build_point(spec)
    view.observe(build_record(0, params, build_outcome(0.2), role="published", proposer="baseline"))
    view.observe(build_record(1, params, build_outcome(0.4), role="search"))
    view.observe(build_record(2, params, role="replicate"))
    assert list_entries(view) == [("COMPLETE", [pytest.approx(0.3), 0.5, 0.5])]
    view.observe(build_record(2, params, build_outcome(0.6), role="replicate"))
    assert list_entries(view) == [("COMPLETE", [pytest.approx(0.4), 0.5, 0.5])]
    assert view.study.trials[0].constraints == {"correctness": pytest.approx(-0.2)}


def test_a_failed_configuration_stays_pending(spec, view):
    view.observe(build_record(0, build_point(spec), state="failed"))
    assert list_entries(view) == [("RUNNING", None)]


def test_trials_without_information_are_not_in_the_study(tmp_path):
    spec = load_code_spec(tmp_path, ["space.reward_weights.length={log: [0.05, 0.5]}"])
    view, weight = SamplerView(spec), "reward_weights.length"
    inside, outside = (build_point(spec, **{weight: value}) for value in (0.5, 1.0))
    elsewhere = {**inside, "temperature": 0.7}  # fixed at 1 in this space
    for role, params in (("untrained", inside), ("published", outside), ("published", elsewhere)):
        view.observe(build_record(0, params, build_outcome(), role, "baseline"))
    assert list_entries(view) == []


def test_an_inactive_parameter_has_the_middle_value_of_its_domain(conditional):
    view = SamplerView(conditional)
    params = conditional.space.complete({"normalization": "grpo", "reward_weights.format": 1.0})
    view.observe(build_record(0, params, build_outcome()))
    assert view.study.trials[0].params["beta"] == 0.5
    assert params["beta"] == 0.0  # what the trial itself runs with


def test_proposals_of_a_conditional_space_leave_out_inactive_parameters(conditional):
    view = SamplerView(conditional)
    suggestions = run_trials(view, 30)
    without = [s for s in suggestions if s.params["normalization"] == "grpo"]
    assert {s.params["beta"] for s in without} == {0.0}
    entries = [t for t in view.study.trials if t.state != TrialState.FAIL]
    assert len(entries) == len(suggestions)
    assert {t.params["beta"] for t in entries if t.params["normalization"] == "grpo"} == {0.5}
    assert any(s.proposer == "model" for s in without)


@pytest.mark.parametrize("sampler", sorted(registry.SAMPLERS))
def test_every_sampler_proposes_complete_points_of_the_space(tmp_path, sampler):
    spec = load_code_spec(tmp_path, [f"search.sampler={sampler}", "search.trials=6"])
    view, learns = SamplerView(spec), registry.SAMPLERS[sampler].learns
    assert view.propose().params == view.propose().params, "until a trial starts"
    assert view.study.trials == []
    suggestions = run_trials(view, 6)
    for suggestion in suggestions:
        assert set(suggestion.params) == set(spec.space.domains)
        for name, domain in spec.space.domains.items():
            assert domain.contains(suggestion.params[name]), name
    proposers = [suggestion.proposer for suggestion in suggestions]
    assert proposers[0] == "startup"
    assert len({tuple(s.params.values()) for s in suggestions}) == len(suggestions)
    if sampler != "auto":
        assert registry.load(registry.SAMPLERS[sampler].target)(spec).has_model == learns
    assert ("model" in proposers) == learns
    assert len(list_entries(view)) == (6 if learns else 0)


@pytest.mark.system
@pytest.mark.slow
def test_the_default_sampler_leaves_at_least_half_of_a_default_sweep_to_its_model(spec):
    view = SamplerView(spec)
    suggestions = run_trials(view, spec.search.trials, width=2)
    proposed = [s.proposer for s in suggestions]
    assert 2 * proposed.count("model") >= len(proposed)
    assert proposed == sorted(proposed, reverse=True)  # start-up first
    # and the model has learned: one objective here is the learning rate itself
    rates = [float(s.params["learning_rate"]) for s in suggestions]
    startup = proposed.count("startup")
    assert fmean(rates[startup:]) > 1.5 * fmean(rates[:startup])


def test_a_model_avoids_a_configuration_that_failed(tmp_path):
    spec = load_code_spec(tmp_path, ["search.sampler=gp"])
    points = [spec.space.complete(first_trials.draw_point(spec, number)) for number in range(6)]
    records = [build_record(n, params, build_trade_off(params)) for n, params in enumerate(points)]
    first = load_view(spec, records).propose()
    assert first.proposer == "model"
    second = load_view(spec, [*records, build_record(6, first.params, state="failed")]).propose()
    assert measure_distance(spec, first.params, second.params) > 0.05


def measure_distance(spec, one, other):
    """Return the largest difference in a dimension, as a share of its range; 1 for choices."""
    shares = [float(one[n] != other[n]) for n in ("normalization", "group_size")]
    for name in ("reward_weights.format", "reward_weights.length", "learning_rate"):
        domain = spec.space.domains[name]
        scale = math.log(domain.high / domain.low)  # pyright: ignore
        shares.append(abs(math.log(float(one[name]) / float(other[name]))) / scale)
    return max(shares)


def test_a_new_process_continues_the_startup_of_the_old_one(spec):
    whole = run_trials(SamplerView(spec), 4)
    stopped = SamplerView(spec)
    run_trials(stopped, 2)
    records = [build_record(n, s.params, proposer="startup") for n, s in enumerate(whole[:2])]
    assert load_view(spec, records).propose().params == whole[2].params


def test_a_finite_space_is_searched_without_repeats_until_it_is_exhausted(tmp_path):
    path, finite = tmp_path / "finite.yaml", CONDITIONAL.replace("{log: [0.1, 2]}", "[0.5, 1]")
    path.write_text("\n".join(line for line in finite.splitlines() if "beta" not in line))
    spec = load_code_spec(tmp_path, ["search.sampler=random"], path)
    suggestions = run_trials(SamplerView(spec), 6)
    kinds = [(s.params["normalization"], s.params["reward_weights.format"]) for s in suggestions]
    assert sorted(set(kinds[:4])) == sorted(itertools.product(["gdpo", "grpo"], [0.5, 1]))


class Stubborn(BaseSampler):
    """A sampler that always proposes the same configuration."""

    def infer_relative_search_space(self, study, trial):
        return dict(study.get_trials(deepcopy=False)[0].distributions)

    def sample_relative(self, study, trial, search_space):
        return dict(study.get_trials(deepcopy=False)[0].params)

    def sample_independent(self, study, trial, param_name, domain):
        return RandomSampler(seed=0).sample_independent(study, trial, param_name, domain)


def test_a_repeated_proposal_is_replaced_by_its_neighbours(spec, monkeypatch):
    stubborn = SamplerFactory(lambda seed: Stubborn(), startup=0, quasi_random=False)
    monkeypatch.setattr(registry, "load", lambda _: lambda *_: stubborn)
    view, first, changed = SamplerView(spec), build_point(spec), []
    view.observe(build_record(0, first, build_outcome()))
    for number in range(1, 11):
        suggestion = view.propose()
        assert suggestion.proposer == "model"
        changed += [name for name, value in suggestion.params.items() if value != first[name]]
        assert len(changed) == number  # one parameter each
        view.observe(build_record(number, suggestion.params, build_outcome()))
    assert set(changed) == set(spec.space.dimensions)


def test_a_space_without_dimensions_proposes_its_one_point(tmp_path):
    searched = ("normalization=gdpo", "group_size=8", "learning_rate=1e-4")
    weights = ("reward_weights.format=1", "reward_weights.length=1")
    spec = load_code_spec(tmp_path, [f"space.{fixed}" for fixed in (*searched, *weights)])
    assert SamplerView(spec).propose().params == spec.space.complete({})


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_records_does_not_change_the_study(spec, view, order):
    params = build_point(spec)
    records = [build_record(n, params, build_outcome(0.1 * (n + 1))) for n in range(3)]
    for index in order:
        view.observe(replace(records[index], state="running"))
    for index in order:
        view.observe(records[index])
    assert list_entries(view) == [("COMPLETE", [pytest.approx(0.2), 0.5, 0.5])]


def test_quasi_random_points_are_stable_and_cover_choices_evenly(spec):
    points = [first_trials.draw_point(spec, index) for index in range(8)]
    assert points == [first_trials.draw_point(spec, index) for index in range(8)]
    assert sorted(p["group_size"] for p in points) == [4] * 4 + [8] * 4
    halves = [float(p["learning_rate"]) > (3e-5 * 3e-4) ** 0.5 for p in points]
    assert sum(halves) == 4


@pytest.mark.parametrize("sampler", ["gp", "tpe", "qmc"])
def test_a_model_begins_at_quasi_random_points(tmp_path, sampler):
    spec = load_code_spec(tmp_path, [f"search.sampler={sampler}"])
    params, drawn = SamplerView(spec).propose().params, first_trials.draw_point(spec, 0)
    assert {name: params[name] for name in drawn} == drawn


@pytest.mark.system
@pytest.mark.parametrize("sampler", ["gp", "tpe", "random", "qmc"])
def test_proposals_follow_from_the_records_alone(tmp_path, sampler):
    """A process that was killed after any trial would make the same proposal."""
    spec = load_code_spec(tmp_path, [f"search.sampler={sampler}", "search.trials=12"])
    view, records = SamplerView(spec), []
    for number in range(8):
        suggestion = view.propose()
        assert load_view(spec, records).propose().params == suggestion.params
        started = build_record(number, suggestion.params, proposer=suggestion.proposer)
        view.observe(started)
        done = replace(started, state="complete", validation=measure(suggestion.params))
        view.observe(done)
        records.append(done)


def test_the_parzen_estimator_that_knows_its_dimensions_proposes_what_optunas_own_does(conditional):
    points = [
        conditional.space.complete(first_trials.draw_point(conditional, n)) for n in range(12)
    ]
    records = [build_record(n, params, build_trade_off(params)) for n, params in enumerate(points)]
    view, domains = load_view(conditional, records), conditional.space.searched_domains
    dimensions = {n: convert_to_distribution(d) for n, d in domains.items()}
    calls = []
    for sampler in (
        ParzenEstimator(dimensions, seed=7, startup=4),
        TPESampler(seed=7, n_startup_trials=4, multivariate=True),
    ):
        study = copy_study(view.study)
        study.sampler = sampler
        calls.append(study.ask(dimensions).params)
    assert calls[0] == calls[1]


# Trials that were stopped at a rung


def build_equal(value):
    return build_outcome(value, value, value).validation


@pytest.fixture
def build(spec):
    """A function that builds a trial with its own configuration and equal values of all metrics."""

    def build(number, state, *rungs, end=None):
        ended = float(number) if state in ("complete", "pruned") else None
        return TrialRecord(
            number,
            "search",
            state,
            build_point(spec, learning_rate=3e-5 + number * 1e-6),
            seed=number,
            proposer="model",
            validation={} if end is None else build_equal(end),
            rungs=tuple(Rung(step, build_equal(v), Cost(64 * step)) for step, v in rungs),
            finished=ended,
        )

    return build


def list_estimates(view):
    """Return the number of each trial -> state and value of its entry."""
    trials = [t for t in view.study.trials if t.state != TrialState.FAIL]
    by_number = {round((t.params["learning_rate"] - 3e-5) * 1e6): t for t in trials}
    return {
        number: (t.state.name, None if t.values is None else round(t.values[0], 9))
        for number, t in by_number.items()
    }


def test_a_stopped_trial_counts_as_its_rung_plus_the_median_change_to_the_end(view, build):
    view.observe(build(0, "pruned", (7, 0.1)))
    assert list_estimates(view) == {0: ("COMPLETE", 0.1)}, "no complete trial has that rung yet"
    for number, change in enumerate([0.1, 0.5, 0.2], 1):
        rungs = ((7, 0.3), (20, 0.3 + change / 2))
        view.observe(build(number, "complete", *rungs, end=0.3 + change))
    view.observe(build(4, "pruned", (7, 0.1), (20, 0.25)))
    estimates = list_estimates(view)
    assert (estimates[0], estimates[4]) == (("COMPLETE", 0.3), ("COMPLETE", 0.35))


def test_constraints_are_extrapolated_like_objectives(view, build):
    view.observe(build(0, "pruned", (7, 0.1)))
    view.observe(build(1, "complete", (7, 0.3), end=0.45))
    guessed = next(t for t in view.study.trials if t.values == pytest.approx([0.25] * 3))
    assert guessed.constraints["correctness"] == pytest.approx(0.2 - 0.25)


def test_a_running_trial_is_in_the_study_from_its_first_rung_on(view, build):
    view.observe(build(0, "running"))
    assert list_estimates(view) == {0: ("RUNNING", None)}
    view.observe(build(0, "running", (7, 0.1)))
    assert list_estimates(view) == {0: ("COMPLETE", 0.1)}
    view.observe(build(1, "complete", (7, 0.3), (20, 0.4), end=0.5))
    view.observe(build(0, "running", (7, 0.1), (20, 0.2)))
    assert list_estimates(view) == {0: ("COMPLETE", 0.3), 1: ("COMPLETE", 0.5)}


def test_a_complete_replicate_counts_more_than_a_stopped_one(view, build):
    view.observe(stopped := build(0, "pruned", (7, 0.1)))
    view.observe(replace(build(1, "complete", end=0.6), params=stopped.params))
    assert list_estimates(view) == {0: ("COMPLETE", 0.6)}


def test_a_new_process_builds_the_same_study(spec, build):
    numbers, records = random.Random(0), []
    for number in range(60):
        value, change = numbers.random() / 2, numbers.random() / 2
        ended = ("pruned", None) if number % 3 else ("complete", value + change)
        records.append(build(number, ended[0], (7, value), end=ended[1]))
        if number % 7 == 6:
            watching = SamplerView(spec)
            for record in records:
                watching.observe(record)
            assert list_estimates(watching) == list_estimates(load_view(spec, records))


def test_the_sampler_sees_rungs_before_any_trial_ends(tmp_path):
    overrides = ["search.sampler=tpe", "search.trials=24"]
    with Ledger.open(load_code_spec(tmp_path, overrides)) as ledger:
        driver = Driver(ledger, slots=8)
        while len(driver.in_flight) < 7:
            driver.ask()
        for trial in driver.in_flight:
            driver.report(trial, build_measurement(7, correctness=0.3, format=0.3, length=0.3))
        while len(driver.in_flight) < 8:
            driver.ask()
        newest = ledger.get_records()[-1]
        driver.searcher.close()
    assert newest.proposer == "model"
