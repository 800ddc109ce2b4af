"""Rules of requests: what each action changes, and what is refused, in one clear line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import Request
from gdpo_tune.core.trials import Cost, Part, Rung, TrialRecord
from gdpo_tune.ledger.requests import (
    ACTIONS,
    SweepSnapshot,
    check_request,
    preview_request,
    settle_request,
)
from gdpo_tune.spec import SweepSpec
from tests.support.tuning import load_code_spec

MERGE = 4


def build_records(spec: SweepSpec) -> list[TrialRecord]:
    params = spec.space.complete_baseline({"normalization": "grpo", "reward_weights.format": 0.5})
    published = spec.space.complete_baseline({"normalization": "gdpo"})
    cost = Cost(completions=640)
    return [
        TrialRecord(0, "untrained", "complete", published, 0, "baseline"),
        TrialRecord(1, "published", "running", published, 1, "baseline", cost=cost),
        TrialRecord(2, "search", "complete", params, 2, "model", cost=cost),
        TrialRecord(3, "search", "pruned", published, 3, "model", reason="dominated by #2"),
        TrialRecord(MERGE, "merge", "complete", {}, 4, "candidate", parts=(Part(2, 20, 1.0),)),
    ]


def build_trained_records(spec: SweepSpec) -> list[TrialRecord]:
    """Build the records above, with policies of trial 2 and of a trial 5 that exist."""
    records = build_records(spec)
    rungs = (Rung(20, 1280, {}), Rung(40, 2560, {}))
    kept = replace(records[2], rungs=rungs, kept_steps=(20,), checkpoint=Path("checkpoint-40"))
    return [*records[:2], kept, *records[3:], replace(kept, number=5, kept_steps=())]


def build_sweep(directory: Path, overrides: Sequence[str] = ()) -> SweepSnapshot:
    spec = load_code_spec(directory, overrides)
    return SweepSnapshot(spec, build_records(spec), [])


def ask(action: str, author: str = "anna", **arguments: Any) -> Request:
    return Request(f"{author}-{action}", action, arguments, author, 1.0)


@pytest.mark.parametrize(
    ("action", "arguments", "message"),
    [
        ("stop", {"trial": 9}, "there is no trial 9: the last one is 4"),
        ("stop", {"trial": -1}, "there is no trial -1"),
        ("stop", {"trial": "7"}, "write the number of a trial, such as 7"),
        ("stop", {"trial": True}, "write the number of a trial"),
        ("stop", {"trial": 2}, "trial 2 has ended already: complete"),
        ("stop", {"trial": 3}, r"trial 3 has ended already: pruned \(dominated by #2\)"),
        ("stop", {}, "the argument trial is missing"),
        ("stop", {"trail": 1}, "trail: unknown argument; did you mean 'trial'"),
        ("pauze", {}, "pauze: unknown action; did you mean 'pause'"),
        ("pause", {"trial": 1}, "trial: unknown argument; it takes none"),
        ("resume", {}, "the sweep is not paused"),
        ("trials", {"number": 0}, "trials = 0: 2 have started already"),
        ("trials", {"number": 1}, "trials = 1: 2 have started already; write at least that"),
        ("trials", {"number": 16}, "search.trials is 16 already"),
        ("trials", {"number": 10**7}, "trials = 10000000: should be less than or equal"),
        ("trials", {"number": "many"}, "trials = 'many': should be a valid integer"),
        ("trials", {"number": 24.0}, "trials = 24.0: should be a valid integer"),
        ("budget", {}, "name a limit: trials, completions, gpu_hours, hours"),
        ("budget", {"completion": 5}, "unknown limit; did you mean 'completions'"),
        ("budget", {"completions": -5}, "completions = -5: should be greater than or equal to 0"),
        ("budget", {"hours": float("nan")}, "hours = nan: should be a finite number"),
        ("budget", {"completions": None}, "completions = None: should be a valid integer"),
        ("budget", {"completions": [1]}, "completions = .* should be a valid integer"),
        ("budget", {"completions": 10**400}, "completions = 10"),
        ("trials", {"number": 10**400}, "trials = 10"),
        ("stop", {"trial": 10**400}, "there is no trial 10"),
        ("budget", {"completions": 1000}, "completions = 1,000: 1,280 are spent already"),
        ("budget", {"gpu_hours": 3}, "no trial has a GPU, so it would never be spent"),
        ("budget", {"hours": 0}, "search.budget.hours is 0 already"),
        ("add", {"params": {}}, "name at least one parameter and its value"),
        ("add", {"params": 3}, "name at least one parameter and its value"),
        ("add", {"params": {"learning_rat": 1e-4}}, "did you mean 'learning_rate'"),
        ("add", {"params": {"learning_rate": 2}}, r"outside of the space: .* within log: \[3e-05"),
        ("add", {"params": {"group_size": 16}}, "outside of the space: it has to be one of 4, 8"),
        ("add", {"params": {"temperature": 2.0}}, "has to be 1, as in every trial; --force"),
        ("add", {"params": {"learning_rate": 10**400}, "force": True}, "at most 3.4e"),
        ("add", {"params": {"group_size": -(10**400)}, "force": True}, "at most 3.4e"),
        ("clone", {"trial": MERGE, "changes": {"group_size": 4}}, "trains nothing that can be cl"),
        ("clone", {"trial": 0, "changes": {"group_size": 4}}, r"trial 0 \(untrained\) trains noth"),
        ("clone", {"trial": 2, "changes": {}}, "name at least one parameter"),
        ("clone", {"trial": 2, "changes": {"normalization": "grpo"}}, "this changes nothing"),
        ("clone", {"trial": 2}, "the argument changes is missing"),
    ],
)
def test_what_cannot_be_carried_out_is_one_clear_line(
    tmp_path: Path, action: str, arguments: dict[str, Any], message: str
):
    sweep = build_sweep(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        check_request(sweep, ask(action, **arguments))
    assert "\n" not in str(caught.value)
    recorded = settle_request(sweep, ask(action, **arguments), 5.0)
    assert (recorded.outcome, recorded.reason) == ("refused", str(caught.value))
    assert str(recorded).startswith(f"{action}")
    assert replace(sweep, requests=[recorded]).spec == sweep.spec


@pytest.mark.parametrize(
    ("action", "arguments", "message"),
    [
        ("stop", {"trial": 1}, "trial 1 is stopped by anna already"),
        ("pause", {}, "the sweep is paused already, by anna"),
        ("trials", {"number": 24}, "search.trials is 24 already"),
        ("budget", {"completions": 5000}, "search.budget.completions is 5,000 already"),
        ("add", {"params": {"group_size": 8}}, "anna has added this configuration already"),
        ("clone", {"trial": 2, "changes": {"group_size": 4}}, "anna has added this configuration"),
    ],
)
def test_the_same_request_twice_is_refused(
    tmp_path: Path, action: str, arguments: dict[str, Any], message: str
):
    once = preview_request(build_sweep(tmp_path), ask(action, **arguments), 5.0)
    assert once.requests[-1].outcome == "applied"
    with pytest.raises(UsageError, match=message):
        check_request(once, ask(action, "ben", **arguments))


def test_every_action_of_the_table_has_a_rule_that_is_tested():
    assert list(ACTIONS) == ["stop", "add", "clone", "merge", "trials", "budget", "pause", "resume"]


WEIGHTS = {"2@20": 0.25, "5": 0.75}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "name at least one parameter"),
        ({"2": 1.0}, "a merge has two parts or more"),
        ({"2": 0.5, "5": 0.6}, r"must sum to 1: 0\.5 \+ 0\.6 = 1\.1; divide each by their sum"),
        ({"2": 0.5, "2@40": 0.5}, "2@40: this policy stands twice; add up its weights"),
        ({"2@30": 0.5, "5": 0.5}, r"2@30: there is no such policy; of trial 2 .* has 2@20, 2@40"),
        ({"5@20": 0.5, "2": 0.5}, r"5@20: .* has 5@40"),
        ({"0": 0.5, "2": 0.5}, r"of trial 0 \(untrained, complete\) the sweep has no policy"),
        ({"3": 0.5, "2": 0.5}, r"of trial 3 \(search, pruned\) the sweep has no policy"),
        ({"4": 0.5, "2": 0.5}, r"of trial 4 \(merge, complete\) the sweep has no policy"),
        ({"9": 0.5, "2": 0.5}, "9: a part of a merge is a trial"),
        ({"knee": 0.5, "2": 0.5}, "knee: a part of a merge is a trial"),
        ({"2@x": 0.5, "5": 0.5}, "2@x: a part of a merge is a trial"),
        ({"2": "half", "5": 0.5}, "2 = 'half': the weight of a part is above 0"),
        ({"2": -1, "5": 2}, "2 = -1: the weight of a part is above 0"),
    ],
)
def test_a_merge_of_what_does_not_exist_is_refused(
    tmp_path: Path, weights: dict[str, Any], message: str
):
    spec = load_code_spec(tmp_path)
    sweep = SweepSnapshot(spec, build_trained_records(spec), [])
    with pytest.raises(UsageError, match=message) as caught:
        check_request(sweep, ask("merge", weights=weights))
    assert "\n" not in str(caught.value)


def test_a_merge_names_its_parts_and_is_asked_for_once(tmp_path: Path):
    spec = load_code_spec(tmp_path)
    sweep = SweepSnapshot(spec, build_trained_records(spec), [])
    once = preview_request(sweep, ask("merge", weights=WEIGHTS), 5.0)
    assert once.requests[-1].effect.parts == (Part(2, 20, 0.25), Part(5, 40, 0.75))
    assert once.requests[-1].text == "merge 2@20=0.25 5=0.75"
    assert once.requests[-1].reason == "it is evaluated once a slot is free"
    with pytest.raises(UsageError, match="anna has asked for this merge already"):
        check_request(once, ask("merge", "ben", weights=WEIGHTS))
    ended = TrialRecord(6, "merge", "failed", {}, 6, "candidate", request=once.requests[-1].id)
    check_request(replace(once, records=[*once.records, ended]), ask("merge", weights=WEIGHTS))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("keep=none", "keep: none keeps no policy"),
        ('constraints={cpu_seconds: "<= 60"}', "it judges costs"),
    ],
)
def test_a_sweep_that_keeps_no_candidates_evaluates_no_merge(
    tmp_path: Path, override: str, reason: str
):
    spec = load_code_spec(tmp_path, [override])
    sweep = SweepSnapshot(spec, build_trained_records(spec), [])
    with pytest.raises(UsageError, match=f"this sweep evaluates no merges: {reason}"):
        check_request(sweep, ask("merge", weights=WEIGHTS))


def test_limits_may_be_raised_and_lowered_and_taken_back(tmp_path: Path):
    sweep = build_sweep(tmp_path)
    for number in (24, 2, 16):
        sweep = preview_request(sweep, ask("trials", number=number), 5.0)
        assert sweep.spec.search.trials == number
    sweep = preview_request(sweep, ask("budget", completions=5000, hours=2), 5.0)
    assert sweep.requests[-1].reason == (
        "search.budget.completions is 5,000 instead of 0; search.budget.hours is 2 instead of 0"
    )
    assert (sweep.spec.search.budget.completions, sweep.spec.search.budget.hours) == (5000, 2)


def test_a_clone_keeps_the_other_parameters_of_its_trial(tmp_path: Path):
    sweep = build_sweep(tmp_path)
    effect = check_request(sweep, ask("clone", trial=2, changes={"learning_rate": 2e-4})).effect
    source = sweep.records[2].params
    assert effect.point == {
        **{name: source[name] for name in sweep.spec.space.select_active(source)},
        "learning_rate": 2e-4,
    }


def test_a_configuration_that_a_trial_has_is_refused(tmp_path: Path):
    sweep = build_sweep(tmp_path)
    names = sweep.spec.space.dimensions
    point = {name: sweep.records[2].params[name] for name in names}
    with pytest.raises(UsageError, match="trial 2 has this configuration already"):
        check_request(sweep, ask("add", params=point))


def test_force_allows_values_outside_of_the_space_that_can_be_trained(tmp_path: Path):
    sweep = build_sweep(tmp_path)
    outside = {"learning_rate": 0.01, "group_size": 16}
    assert check_request(sweep, ask("add", params=outside, force=True)).effect.point == outside
    for params, message in [
        ({"learning_rate": -1.0}, "learning_rate = -1: a weight or rate cannot be negative"),
        ({"group_size": 7}, "7 does not divide training.completions_per_step = 64"),
        ({"normalization": "grpoo"}, "unknown value; did you mean 'grpo'"),
        ({"reward_weights.correctness": "x"}, "not a number"),
    ]:
        with pytest.raises(UsageError, match=message):
            check_request(sweep, ask("add", params=params, force=True))


def test_a_baseline_to_which_constraints_refer_cannot_be_stopped(tmp_path: Path):
    sweep = build_sweep(tmp_path, ['constraints={correctness: ">= published"}'])
    with pytest.raises(UsageError, match="the baseline published, to which constraints refer"):
        check_request(sweep, ask("stop", trial=1))
    check_request(build_sweep(tmp_path), ask("stop", trial=1))


@pytest.mark.parametrize(
    ("action", "arguments"), [("add", {"params": {"group_size": 8}}), ("trials", {"number": 20})]
)
def test_what_a_spent_budget_would_not_start_is_refused(
    tmp_path: Path, action: str, arguments: dict[str, Any]
):
    sweep = build_sweep(tmp_path, ["search.budget.completions=1000"])
    with pytest.raises(UsageError, match=r"the budget of 1,000 completions is spent.*: budget"):
        check_request(sweep, ask(action, **arguments))
