"""Warnings about a result and other phrases, and the front in a file."""

import csv
import io
from dataclasses import replace

import pytest

from gdpo_tune.analysis.effects import Contrast, Effects
from gdpo_tune.analysis.front import build_front
from gdpo_tune.analysis.uncertainty import Interval
from gdpo_tune.core.trial_files import Completion, append_step, write_completions
from gdpo_tune.core.trials import (
    HALVED,
    Cost,
    Estimate,
    Measurement,
    Objective,
    Part,
    Role,
    State,
    TrialRecord,
)
from gdpo_tune.results.front_table import format_front_csv, list_rows
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.wording import (
    count_notes,
    describe_effects,
    describe_findings,
    describe_role,
    describe_states,
    explain_dead_start,
    list_result_warnings,
)
from gdpo_tune.spec.model import Constraint
from gdpo_tune.spec.space import Uniform
from tests.support.figures import make_records, make_spec
from tests.support.tables import cases

RANGE = Uniform(low=1e-5, high=1e-3, log=True)


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


def warn(spec, records):
    front = build_front(records, spec.list_objectives())
    return [str(warning) for warning in list_result_warnings(spec, front)]


def make_front(spec, count, **params):
    """Return the records of a straight front of searched trials with these parameters."""
    records = make_records(spec, count)
    for index, record in enumerate(records[2:]):
        share = (index + 1) / (count + 1)
        shares = {name: share if name == "correctness" else 1 - share for name in record.test}
        test = {name: Estimate(value, 0.01) for name, value in shares.items()}
        seen = {**record.params, **params}
        records[index + 2] = replace(record, test=test, validation=test, params=seen)
    return records


def has(text, lines):
    return any(text in line for line in lines)


def with_rate(record, rate, value=None):
    """Return a record with another learning rate, and perhaps `value` in every objective."""
    test = record.test if value is None else dict.fromkeys(record.test, Estimate(value, 0.01))
    return replace(record, test=test, params={**record.params, "learning_rate": rate})


def with_range(spec, domain):
    domains = {**spec.space.domains, "learning_rate": domain}
    return spec.model_copy(update={"space": spec.space.model_copy(update={"domains": domains})})


def test_nothing_is_said_of_an_empty_front(spec):
    assert warn(spec, []) == []


def test_a_front_of_single_seeds_comes_with_the_number_that_suffices(spec):
    records = make_front(spec, 6)
    lines = warn(spec, records)
    (line,) = [line for line in lines if "only one seed" in line]
    singles = sum(m.is_provisional for m in build_front(records, spec.list_objectives()).members)
    limit = spec.search.replicates.max_runs
    assert f"max_runs to {max(singles, limit + 1)}," in line


@cases("results", "values at a limit")
def test_members_at_a_limit_come_with_the_wider_line(spec, value, line):
    records = make_front(spec, 8, learning_rate=value)
    # trials off the front have other values
    records[2:4] = [with_rate(record, 1e-4, 0.0) for record in records[2:4]]
    lines = warn(with_range(spec, RANGE), records)
    assert has(line, lines) if line else not has("limit", lines)


def test_a_forced_value_that_has_no_logarithm_lies_at_a_limit_and_0_is_no_limit(spec):
    records = make_front(spec, 8, learning_rate=1e-4)
    records[3::2] = [with_rate(record, 0.0) for record in records[3::2]]
    records[2] = with_rate(records[2], 1e-4, 0.0)
    assert has("lower limit 1e-05", warn(with_range(spec, RANGE), records))
    records = make_front(spec, 8, learning_rate=0.0)
    records[2:4] = [with_rate(record, 0.5, 0.0) for record in records[2:4]]
    assert not has("limit", warn(with_range(spec, Uniform(low=0.0, high=1.0)), records))


def test_a_baseline_that_nothing_improves_on_is_named(spec):
    records = make_front(spec, 4)
    for value, is_named in ((1.0, True), (0.0, False)):
        test = dict.fromkeys(records[0].test, Estimate(value, 0.001))
        lines = warn(spec, [replace(records[0], test=test), *records[1:]])
        assert has("no policy is clearly better than the untrained policy", lines) is is_named


@cases("results", "equal groups")
def test_groups_that_teach_nothing_are_counted_by_size(spec, tmp_path, small, large, line):
    records = make_front(spec, 4)
    for first, size, share in ((0, 8, large), (1, 4, small)):
        sized = {"group_size": size}
        half = [replace(each, params={**each.params, **sized}) for each in records[first::2]]
        metrics = {"train/rewards/format/frac_reward_zero_std": share}
        records[first::2] = add_metrics(half, tmp_path / str(size), metrics)
    lines = warn(spec, records)
    assert has(line, lines) if line else not has("group", lines)


def add_metrics(records, tmp_path, *steps):
    """Give every training these step metrics."""
    for index, record in enumerate(records):
        directory = tmp_path / str(index)
        for step, metrics in enumerate(steps, 1):
            append_step(directory, Measurement(step, metrics, Cost(64)))
        records[index] = replace(record, directory=directory)
    return records


def test_cut_completions_are_named_as_the_cause(spec, tmp_path):
    """Source: trl#6219, ms-swift#4950: what is cut has no answer to judge."""
    dead = {"train/rewards/format/frac_reward_zero_std": 1.0}
    cut = {**dead, "train/completions/clipped_ratio": 0.9}
    lines = warn(spec, add_metrics(make_front(spec, 4), tmp_path / "cut", cut))
    assert has("90 % of the completions in training were cut", lines)
    assert has("Raise training.max_completion_length", lines)
    assert not has("easier", lines)
    whole = {**dead, "train/completions/clipped_ratio": 0.1}
    lines = warn(spec, add_metrics(make_front(spec, 4), tmp_path / "whole", whole))
    assert has("Make it easier", lines)
    assert not has("cut", lines)


def test_a_reward_that_only_the_published_setting_weighs_is_not_mentioned(spec, tmp_path):
    """Source: the weights of the searched trainings: all 0, so nothing of it is to be taught."""
    records = make_front(spec, 4, **{"reward_weights.length": 0.0})
    assert records[1].role == "published"
    assert records[1].params["reward_weights.length"] != 0
    metrics = {"train/rewards/length/frac_reward_zero_std": 1.0}
    assert not has("length: equal", warn(spec, add_metrics(records, tmp_path, metrics)))


def test_a_reward_that_is_absent_from_the_first_step_is_measured(spec, tmp_path):
    """Source: docs/reference.md: a metric without a value at a step is left out there."""
    dead = {"train/rewards/format/frac_reward_zero_std": 1.0}
    lines = warn(spec, add_metrics(make_front(spec, 4), tmp_path, {"train/loss": 0.0}, dead))
    assert has("format: equal in all groups", lines)


def test_trials_are_counted_by_what_they_note(spec):
    records = make_front(spec, 4)
    assert not count_notes(records, HALVED)
    for number, limit in ((0, "9 tokens"), (1, "5 completions"), (3, "9 tokens")):
        records[number] = replace(records[number], environment={HALVED: f"at most {limit}"})
    assert count_notes(records, HALVED) == "2 x at most 9 tokens; 1 x at most 5 completions"


def test_a_policy_that_did_not_change_is_on_no_front(spec):
    """Source: arithmetic: a gradient of 0 leaves the weights, so its values are noise."""
    records = make_front(spec, 4)
    best = {name: Estimate(1.0, 0.01) for name in records[2].test}
    records[2] = replace(records[2], test=best, environment={"unchanged": "every gradient was 0"})
    front = build_front(records, spec.list_objectives())
    assert 2 not in front.trial_numbers
    lines = warn(spec, records)
    assert sum("left the policy unchanged" in line for line in lines) == 1
    assert "knee" in lines[0]  # the report takes the warning about the knee from there
    assert front.hypervolume_over_trials[-1].hypervolume == pytest.approx(front.hypervolume)
    assert has(
        "1 training left the policy unchanged: every gradient was 0 in trial 2.",
        warn(spec, records),
    )
    rest = [replace(r, environment={"unchanged": ""}) if r.is_training else r for r in records]
    assert not build_front(rest, spec.list_objectives()).members
    assert has("left the policy unchanged", warn(spec, rest))


def test_a_dead_start_is_explained_with_examples_and_ways_on(tmp_path):
    example = Completion("2 + 2 =", "It is\n four." + "x" * 400, {"correctness": 0.0})
    write_completions(tmp_path, [example] * 3)
    text = explain_dead_start("no signal: correctness is 0", tmp_path)
    assert text.startswith("no signal: correctness is 0\n    It is four.xx")
    assert text.count("(correctness 0.0)") == 3
    ways = ("model.instructions", "partial_credit", "easier prompts", "supervised start")
    assert all(way in text for way in ways)


def build(number: int, role: Role, state: State, *parts: Part) -> TrialRecord:
    proposer = "candidate" if parts else "model"
    return TrialRecord(number, role, state, {}, 0, proposer, parts=parts)


def test_a_stopped_merge_is_no_trial_that_was_stopped_early():
    records = [
        build(0, "search", "complete"),
        build(1, "search", "complete"),
        build(2, "search", "pruned"),
        build(3, "merge", "complete", Part(0, 60, 0.5), Part(1, 60, 0.5)),
        build(4, "merge", "pruned", Part(0, 60, 0.25), Part(1, 60, 0.75)),
        build(5, "checkpoint", "pruned", Part(0, 20, 1.0)),
    ]
    rest = "1 stopped early, 1 of 3 merges and checkpoints complete"
    assert describe_states(records) == (2, rest)
    assert describe_states(records[:2]) == (2, "")


def test_a_replicate_of_a_merge_is_called_by_the_name_of_the_merge():
    """Names of candidates: `gdpo_tune/core/trials.py`."""
    for record, original, name in (
        (build(71, "replicate", "complete", Part(8, 60, 0.5), Part(9, 60, 0.5)), 14, "merge-14"),
        (build(72, "replicate", "complete", Part(8, 40, 1.0)), 15, "the checkpoint of trial 15"),
        (build(3, "replicate", "complete"), 1, "1"),
    ):
        described = describe_role(replace(record, replicate_of=original))
        assert described == f"replicate of {name}"


def test_front_csv_keeps_all_digits():
    """A program reads what was measured. Source: RFC 4180; `repr` is the shortest exact text."""
    means = {"a": 2.1e-5, "b": 1 / 3}
    test = {name: Estimate(mean, mean / 20) for name, mean in means.items()}
    goals = [Objective(name, "maximize", 0.0) for name in means]
    parts = (Part(0, 4, 1 / 3), Part(1, 4, 2 / 3))
    record = TrialRecord(2, "merge", "complete", {}, 2, "candidate", test=test, parts=parts)
    (row,) = csv.DictReader(io.StringIO(format_front_csv(build_front([record], goals))))
    assert {name: float(row[name]) for name in means} == means
    assert float(row["a_se"]) == 2.1e-5 / 20
    assert row["parts"] == f"{1 / 3} x 0@4 + {2 / 3} x 1@4"


def judge(dimension, objective, value, low, high, more=0, ends=("gdpo", "grpo")):
    return Contrast(dimension, *ends, objective, value, Interval(low, high), more)


def test_effects_are_three_lines():
    contrasts = (
        judge("normalization", "a", -0.12, -0.21, -0.03),
        judge("normalization", "b", 0.01, -0.1, 0.12, 22),
        judge("rate", "a", 0.02, -0.1, 0.14, 5, ("0", "1")),
        judge("rate", "b", 0.02, -0.1, 0.14, 7, ("0", "1")),
    )
    effects = Effects(contrasts, 20, 1280, 13)
    assert describe_effects(effects) == [
        "At step 20 (13 trainings, 1,280 completions each): normalization gdpo above grpo in a by "
        "0.120 (0.030 to 0.210).",
        "Cannot be told apart there: normalization in b; rate in all objectives.",
        "More trainings to step 20 that would tell: rate 7 (8,960 completions), normalization 22 "
        "(28,160 completions).",
    ]
    assert len(describe_effects(replace(effects, contrasts=contrasts[:1]))) == 1
    line, _ = describe_effects(replace(effects, contrasts=contrasts[2:]))
    assert line == (
        "At step 20 (13 trainings, 1,280 completions each) cannot be told apart: rate in all "
        "objectives."
    )
    assert describe_effects(Effects()) == []


def test_a_choice_that_is_told_apart_from_some_names_the_other_pairs():
    contrasts = (
        judge("kind", "a", 0.2, 0.1, 0.3),
        judge("kind", "a", 0.2, -0.1, 0.5, 999, ("gdpo", "other")),
    )
    _, unclear, cost = describe_effects(Effects(contrasts, 20, 1000, 13))
    assert unclear == "Cannot be told apart there: kind (gdpo/other) in a."
    assert cost.endswith("kind over 999 (999,000 completions).")


def test_only_the_clearest_differences_are_named():
    contrasts = tuple(
        judge(f"d{i}", "a", 0.5, 0.5 - 0.01 * (i + 1), 0.5 + 0.01 * (i + 1)) for i in range(8)
    )
    (line,) = describe_effects(Effects(contrasts[::-1], 20, 1000, 13))
    assert "d4" in line
    assert "d5" not in line
    assert line.endswith("; 3 more in the report.")


def test_an_objective_that_did_not_vary_is_a_limit_of_the_data(spec):
    front = build_front([], spec.list_objectives())
    lines, limits = describe_findings(front, Effects((), 20, 1280, 13, ("length",)))
    assert lines == []
    assert limits == ["Did not vary: length. All 13 trainings have the same value at step 20."]


def test_a_member_that_breaks_a_limit_on_test_prompts_is_marked(spec):
    """The search sees validation prompts alone: .51 there and .38 on test prompts happens."""
    limited = spec.replace(constraints={"correctness": Constraint(op=">=", bound=0.5)})
    sweep = Sweep(limited, make_front(spec, 8))
    members = {m.name: m.mean["correctness"].mean for m in sweep.front.members}
    below = {name for name, mean in members.items() if mean < 0.5}
    assert below
    assert below < members.keys()
    remark = "outside of correctness >= 0.5 on test prompts"
    rows = [row for row in list_rows(sweep.front) if row.policy.name in members]
    assert {row.policy.name for row in rows if remark in row.remarks} == below
    assert has("misses a limit", map(str, sweep.warnings))
    assert not has("misses a limit", map(str, Sweep(spec, make_front(spec, 8)).warnings))
