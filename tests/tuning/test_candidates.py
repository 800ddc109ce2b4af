"""When a merge or a checkpoint is evaluated, and which verdict its validation gets."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune.analysis.merge_choice import choose_merge
from gdpo_tune.core.trials import Cost, Estimate, Part, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec.first_trials import draw_point, draw_startup_point, list_corners, map_share
from gdpo_tune.spec.model import MERGES_PER_TRAINING
from gdpo_tune.spec.space import Uniform
from gdpo_tune.spec.spec_warnings import list_warnings
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning import plan
from gdpo_tune.tuning.retention import list_kept_steps
from tests.support.search_driver import Driver
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

MERGE = 5
"""Number of the first merge of `begin_merge`."""
MERGES = ("search={trials: 4, merges: {budget: 8}}", "search.checkpoints.budget=4")


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path, MERGES)


def build_end(number, correctness, length, role="search"):
    """Build a complete training whose policy exists, and that of step 20."""
    estimates = build_outcome(correctness, 0.5, length).validation
    early = build_outcome(correctness / 2, 0.25, length / 2).validation
    return TrialRecord(
        number,
        role,
        "complete",
        {"learning_rate": 1e-4},
        number,
        "model",
        validation=estimates,
        test=estimates,
        feasible=True,
        rungs=(Rung(20, early, Cost(1280)), Rung(60, estimates, Cost(3840))),
        checkpoint=Path("checkpoint-60"),
        kept_steps=(20,),
    )


def build_records(ended):
    """Build the baselines and so many trials that trade correctness for length."""
    untrained = replace(build_end(0, 0.1, 0.1, "untrained"), checkpoint=None, rungs=())
    published = build_end(1, 0.5, 0.5, "published")
    shares = [(0.05, 0.85, 0.3, 0.65)[index] for index in range(ended)]
    trials = [build_end(2 + i, 0.9 - share, share) for i, share in enumerate(shares)]
    return [untrained, published, *trials]


def add_merge(records, parts, **changes):
    number = len(records)
    merge = TrialRecord(number, "merge", "running", {}, number, "candidate", parts=parts)
    records.append(replace(merge, **changes))


def add_all(spec, records):
    """Add each merge that is planned, one after the other; return their parts."""
    found = []
    while (candidate := plan.plan_merge_or_checkpoint(spec, records)) is not None:
        assert candidate.role == "merge"  # every checkpoint is dominated by its own end
        found.append(candidate.parts)
        add_merge(records, candidate.parts)
    return found


@pytest.mark.parametrize(("ended", "merges"), [(0, 0), (2, 0), (3, 6), (4, 8)])
def test_merges_are_spread_over_the_trainings(spec, ended, merges):
    found = add_all(spec, build_records(ended))
    assert len(found) == len(set(found)) == merges


NO_MERGES, NO_POLICIES = "search.merges.budget=0", "keep=none"
COST = "objectives.cpu_seconds={direction: minimize, reference: 100}"


@pytest.mark.parametrize(
    ("setting", "planned"),
    [
        (NO_MERGES, 2 + 4 + 6 + 4 + 6),  # checkpoints, and at most 6 fresh seeds of them
        (NO_POLICIES, 2 + 4 + 6),
        (COST, 2 + 4 + 6),  # a merge would win every cost: its own is that of an evaluation
    ],
)
def test_merges_can_be_switched_off(tmp_path, setting, planned):
    spec = load_code_spec(tmp_path, [*MERGES, setting])
    assert plan.plan_merge_or_checkpoint(spec, build_records(4)) is None
    assert list_corners(spec) == []
    assert plan.count_planned(spec, []) == planned
    assert any("search.merges.budget" in w for w in list_warnings(spec)) == (setting != NO_MERGES)


def test_a_merge_comes_before_the_next_training(spec):
    found = plan.find_next_trial(spec, build_records(3))
    assert (found.role, found.proposer, found.params) == ("merge", "candidate", {})
    assert sum(part.weight for part in found.parts) == pytest.approx(1)


@pytest.mark.parametrize(("runs", "planned"), [(0, 2 + 3 + 2), (5, 2 + 3 + 2 + 5 + 5)])
def test_fresh_seeds_of_merges_count_among_the_trials_that_are_planned(tmp_path, runs, planned):
    """Arithmetic: besides `max_runs` trainings, `choose_replicate` gives as many of candidates."""
    more = "search={trials: 3, merges: {budget: 2}, checkpoints: {budget: 0}, replicates: "
    assert (
        plan.count_planned(load_code_spec(tmp_path, [f"{more}{{max_runs: {runs}}}}}"]), [])
        == planned
    )


def test_a_small_sweep_evaluates_few_merges(tmp_path):
    spec = load_code_spec(tmp_path, ["search={trials: 3, merges: {budget: 1000}}"])
    assert plan.count_planned(spec, []) == 2 + 3 + 6 + 3 * MERGES_PER_TRAINING + 6
    assert 0 < len(add_all(spec, build_records(3))) <= 3 * MERGES_PER_TRAINING


def change_merges(spec, **changes):
    """Change settings of merges that are no keys of the file."""
    merges = spec.search.merges.model_copy(update=changes)
    return spec.model_copy(update={"search": spec.search.model_copy(update={"merges": merges})})


@pytest.mark.parametrize(("most", "sizes"), [(2, {2}), (3, {2, 3})])
def test_most_parts_bounds_a_merge(tmp_path, most, sizes):
    spec = load_code_spec(tmp_path, ["search={trials: 4, merges: {budget: 40}}"])
    found = add_all(change_merges(spec, most_parts=most), build_records(4))
    assert {len(parts) for parts in found} == sizes


def test_kept_rungs_are_parents_where_the_plan_says_so(spec):
    records, goals = build_records(4), plan.tighten_references(spec)
    far = {**records[3].validation, "format": Estimate(0.95, 0.01)}
    rungs = (replace(records[3].rungs[0], validation=far), records[3].rungs[1])
    records[3] = replace(records[3], rungs=rungs)
    for with_rungs in (False, True):
        parts = choose_merge(records, goals, 2, with_rungs=with_rungs)
        assert ((3, 20) in {(part.trial, part.step) for part in parts}) == with_rungs
    records[3] = replace(records[3], kept_steps=())
    assert all(part.step == 60 for part in choose_merge(records, goals, 2, with_rungs=True) or ())


def test_a_divided_budget_tries_as_many_merges_as_a_twelfth_of_it_costs(tmp_path):
    """Arithmetic: .08 x 61,440 / (128 prompts x 2 completions) = 19.2."""
    divided = ["search.scheduler={type: halving}", "search.budget.completions=61440"]
    spec = load_code_spec(tmp_path, [*divided, "search.replicates.max_runs=0"])
    assert spec.training.validation_completions == 256
    some = change_merges(spec, budget=8)
    assert (some.most_merges, some.count_merges(6400)) == (19, 2)
    assert change_merges(spec, budget=0).most_merges == 0


def test_a_merge_that_has_only_begun_is_no_rival_of_one_that_waits(spec):
    records, values = build_records(3), {name: Estimate(0.6, 0.01) for name in spec.objectives}
    parts = (Part(2, 60, 0.5), Part(3, 60, 0.5))
    add_merge(records, parts, state="paused", rungs=(Rung(0, values, Cost()),))
    add_merge(records, (Part(2, 60, 0.25), Part(3, 60, 0.75)))
    assert plan.choose_tested(spec, records) == records[-2].number


def test_a_promising_checkpoint_is_evaluated(spec):
    records = build_records(3)
    early = Rung(20, {**records[4].validation, "length": Estimate(0.95, 0.01)}, Cost(1280))
    records[4] = replace(records[4], rungs=(early, records[4].rungs[1]))
    expected = plan.PlannedTrial(
        "checkpoint", "candidate", records[4].params, parts=(Part(4, 20, 1.0),)
    )
    assert (
        plan.plan_merge_or_checkpoint(spec, records)
        == plan.find_next_trial(spec, records)
        == expected
    )
    broken = Rung(20, {**early.validation, "correctness": Estimate(0.1, 0.01)}, Cost(1280))
    records[4] = replace(records[4], rungs=(broken, records[4].rungs[1]))
    assert plan.plan_merge_or_checkpoint(spec, records).role == "merge"


@pytest.mark.parametrize("budget", ["trials: 4", "completions: 1000"])
def test_candidates_follow_when_the_budget_of_trainings_is_spent(tmp_path, budget):
    """They train nothing: merges count in no budget but their own, and in the hours."""
    search = f"search={{trials: 100, merges: {{budget: 8}}, budget: {{{budget}}}}}"
    spec = load_code_spec(tmp_path, [search])
    records = [replace(r, cost=Cost(3840)) if r.is_training else r for r in build_records(2)]
    merges = 0
    while (found := plan.find_next_trial(spec, records)) is not None:
        assert found.role == "merge"
        add_merge(records, found.parts)
        merges += 1
    assert merges > 2
    hours = load_code_spec(tmp_path, [search, "search.budget.hours=1"])
    assert plan.find_next_trial(hours, build_records(2), hours=2.0) is None


@given(
    low=st.floats(1e-9, 1.0), factor=st.floats(1.001, 1e6), log=st.booleans(), share=st.floats(0, 1)
)
def test_a_share_of_a_range_lies_in_it(low, factor, log, share):
    domain = Uniform(low=low, high=low * factor, log=log)
    assert domain.contains(map_share(domain, share))
    assert map_share(domain, 1.0) <= domain.high


def test_a_parent_whose_merges_fail_is_left_alone(spec):
    records, failures = build_records(3), 0
    for _ in range(8):
        if (candidate := plan.plan_merge_or_checkpoint(spec, records)) is None:
            break
        if any(part.trial == 2 for part in candidate.parts):
            add_merge(records, candidate.parts, state="failed")
            failures += 1
        else:
            ended = {"state": "complete", "validation": records[1].validation, "feasible": True}
            add_merge(records, candidate.parts, **ended)
    assert failures <= 2


def test_a_constraint_on_an_objective_is_the_worst_value_of_interest(tmp_path):
    constraints = "constraints={correctness: '>= 0.2', length: '<= 0.9', mean_length: '<= 20'}"
    spec = load_code_spec(tmp_path, [*MERGES, constraints])
    assert [goal.reference for goal in plan.tighten_references(spec)] == [0.2, 0, 0]
    strict = load_code_spec(tmp_path, ["objectives.correctness.reference=0.3", constraints])
    assert plan.tighten_references(strict)[0].reference == 0.3


def test_an_infeasible_parent_may_be_merged(spec):
    records = build_records(3)
    records[3] = replace(records[3], feasible=False)
    candidate = plan.plan_merge_or_checkpoint(spec, records)
    assert 3 in {part.trial for part in candidate.parts}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((0.6, 0.6, 0.3), ""),
        ((0.45, 0.5, 0.45), "dominated on validation prompts by 1"),
        ((0.5002, 0.5, 0.5), "adds 0.03% to the hypervolume on validation prompts"),
        (
            (0.1, 0.9, 0.9),
            "breaks a constraint on validation prompts: correctness 0.1 is not >= 0.2",
        ),
    ],
)
def test_a_merge_that_adds_nothing_gets_no_test_evaluation(spec, values, reason):
    records = build_records(2)
    add_merge(records, (Part(1, 60, 0.5), Part(2, 60, 0.5)))
    rung = Rung(0, build_outcome(*values).validation, Cost())
    assert plan.judge_candidate(records[-1], rung, records, spec)[1] == reason


def ask(driver):
    """Wait for the next trial; a sampler may be thinking."""
    while (trial := driver.ask()) is None:
        pass
    return trial, driver.in_flight[trial]


def train(driver, correctness, length):
    """Run the next trial to its end, with a policy."""
    trial, config = ask(driver)
    assert config.train
    driver.report(trial, build_measurement(60, correctness=correctness, format=0.5, length=length))
    path = write_checkpoint(config.directory, 60, Cost(), lambda path: (path / "w").touch()).path
    driver.end(trial, outcome=replace(build_outcome(correctness, 0.5, length), checkpoint=path))


@pytest.fixture
def free(spec):
    """The sweep without constraints."""
    return spec.model_copy(update={"constraints": {}})


def begin_merge(ledger):
    """Run the baselines and as many trials as there are corners, then start the first merge."""
    driver = Driver(ledger, slots=1)
    driver.end(ask(driver)[0], outcome=build_outcome(0.1, 0.1, 0.1))
    for values in ((0.9, 0.1), (0.1, 0.9), (0.1, 0.1), (0.1, 0.1)):
        train(driver, *values)
    trial, config = ask(driver)
    assert not config.train
    assert sum(part.weight for part in config.parts) == pytest.approx(1)
    assert [part.checkpoint for part in config.parts] == [
        ledger.get_checkpoint(part.trial, 60) for part in ledger.get_record(MERGE).parts
    ]
    return driver, trial


DOMINATED = build_measurement(0, correctness=0.05, format=0.5, length=0.9)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_dominated_merge_is_stopped_now_or_after_a_kill(free, is_killed):
    with Ledger.open(free) as ledger:
        driver, trial = begin_merge(ledger)
        if is_killed:
            ledger.record_rung(MERGE, DOMINATED)
        else:
            driver.report(trial, DOMINATED)
            assert driver.searcher.stop_flag.is_set(MERGE)
            driver.end(trial, interrupted=True)
            assert ledger.get_record(MERGE).state == "pruned"
    with Ledger.open(free) as ledger:
        Driver(ledger, slots=1)
        record = ledger.get_record(MERGE)
    assert record.state == "pruned"
    assert record.reason == "dominated on validation prompts by 2"
    assert record.validation == {}
    assert record.rungs[0].validation["length"].mean == 0.9


def test_a_killed_merge_is_evaluated_again(free):
    with Ledger.open(free) as ledger:
        before = begin_merge(ledger)[0].in_flight.popitem()[1]
    with Ledger.open(free) as ledger:
        driver = Driver(ledger, slots=1)
        trial, config = ask(driver)
        assert config == before
        driver.report(trial, build_measurement(0, correctness=0.6, format=0.6, length=0.6))
        assert not driver.searcher.stop_flag.is_set(MERGE)
        driver.end(trial, outcome=build_outcome(0.6, 0.6, 0.6))
        record = ledger.get_record(MERGE)
        assert (record.name, record.state) == ("merge-5", "complete")
        # to Optuna, a merge is no result of any parameters
        assert ledger.study.trials[MERGE].params == {}


def test_a_search_trial_keeps_the_checkpoints_at_which_it_is_evaluated(spec):
    records = build_records(1)
    assert list_kept_steps(spec, records, records[2]) == (30,)  # every 30 steps
    assert list_kept_steps(spec, records, records[1]) == ()
    replicate = replace(records[2], number=9, role="replicate", replicate_of=2)
    assert list_kept_steps(spec, records, replicate) == ()
    add_merge(records, (Part(2, 20, 0.5), Part(1, 60, 0.5)))
    assert list_kept_steps(spec, records, replicate) == (20,)


def test_a_sweep_with_merges_begins_at_the_corners_of_the_weights(spec):
    def read_weights(points):
        return [
            tuple(point[f"reward_weights.{n}"] for n in ("format", "length")) for point in points
        ]

    corners = read_weights(list_corners(spec))
    assert corners == [(2, 2), (0.05, 2), (2, 0.05)]
    points = [draw_startup_point(spec, index) for index in range(5)]
    found = read_weights(points)
    assert [found[0], *found[2:4]] == corners
    assert found[1] == (pytest.approx(0.1**0.5), pytest.approx(0.1**0.5))
    rates = [float(point["learning_rate"]) for point in points[:4]]
    assert min(rates) >= 3e-5 * 10**0.9
    assert len(set(rates)) == 4
    assert {point["normalization"] for point in points[:4]} == {"gdpo"}
    assert points[4] == draw_point(spec, 4)
    assert all(spec.space.domains[n].contains(v) for p in points for n, v in p.items())


def test_weights_without_an_anchor_have_one_corner_each(tmp_path):
    spec = load_code_spec(tmp_path, [*MERGES, "space.reward_weights.correctness={log: [0.05, 2]}"])
    corners = list_corners(spec)
    assert len(corners) == 3  # all at their largest weigh the same as all at their least
    assert len({max(corner, key=lambda name: float(corner[name])) for corner in corners}) == 3


def test_modes_that_sum_first_stay_as_drawn(tmp_path):
    spec = load_code_spec(tmp_path, [*MERGES, "space.normalization=[grpo, grpo_no_std]"])
    modes = [draw_startup_point(spec, index)["normalization"] for index in range(4)]
    assert modes == [draw_point(spec, index)["normalization"] for index in range(4)]


def test_a_single_weight_has_two_ends(tmp_path):
    spec = load_code_spec(tmp_path, [*MERGES, "space.reward_weights.length=1"])
    assert [list(corner.values()) for corner in list_corners(spec)] == [[2], [0.05]]


def test_nothing_is_planned_by_a_merge_that_a_person_asked_for(spec):
    plain = build_records(4)
    parts = (Part(1, 60, 0.5), Part(3, 60, 0.5))
    asked = replace(build_end(2, 0.9, 0.9, "merge"), parts=parts, rungs=(), request="id")
    later = [replace(record, number=record.number + 1) for record in plain[2:]]
    while (expected := plan.find_next_trial(spec, plain)) is not None and expected.role == "merge":
        found = plan.find_next_trial(spec, [*plain[:2], asked, *later])
        moved = [replace(part, trial=part.trial + (part.trial > 1)) for part in expected.parts]
        assert found == replace(expected, parts=tuple(moved))
        add_merge(plain, expected.parts)
        later.append(replace(plain[-1], number=len(plain), parts=tuple(moved)))
    assert len(plain) > len(build_records(4)), "merges were planned"
