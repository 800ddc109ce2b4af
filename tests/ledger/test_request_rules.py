"""Rules of requests: what each action changes, and what is refused, in one clear line."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

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
from tests.support.paths import ROOT
from tests.support.tuning import load_code_spec

CASES = yaml.safe_load((ROOT / "tests" / "data" / "refused_requests.yaml").read_text())


def build_records(spec):
    params = spec.space.complete_baseline({"normalization": "grpo", "reward_weights.format": 0.5})
    published = spec.space.complete_baseline({"normalization": "gdpo"})
    cost = Cost(completions=640)
    return [
        TrialRecord(0, "untrained", "complete", published, 0, "baseline"),
        TrialRecord(1, "published", "running", published, 1, "baseline", cost=cost),
        TrialRecord(2, "search", "complete", params, 2, "model", cost=cost),
        TrialRecord(3, "search", "pruned", published, 3, "model", reason="dominated by #2"),
        TrialRecord(4, "merge", "complete", {}, 4, "candidate", parts=(Part(2, 20, 1.0),)),
    ]


def build_sweep(directory, name="plain"):
    """Build a sweep of the table; `trained` has policies of trial 2 and of a trial 5."""
    spec = load_code_spec(directory, CASES["sweeps"][name])
    records = build_records(spec)
    if name == "trained":
        rungs = (Rung(20, 1280, {}), Rung(40, 2560, {}))
        kept = replace(records[2], rungs=rungs, kept_steps=(20,), checkpoint=Path("checkpoint-40"))
        records[2:3] = [kept]
        records.append(replace(kept, number=5, kept_steps=()))
    return SweepSnapshot(spec, records, [])


def enlarge(value):
    """Return a value of the table with a number beyond all floats for the word `huge`."""
    if isinstance(value, dict):
        return {name: enlarge(part) for name, part in value.items()}
    return {"huge": 10**400, "-huge": -(10**400)}.get(str(value), value)


def ask(action, author="anna", **arguments):
    return Request(f"{author}-{action}", action, enlarge(arguments), author, 1.0)


@pytest.mark.parametrize(("name", "action", "arguments", "message"), CASES["requests"])
def test_what_cannot_be_carried_out_is_one_clear_line(tmp_path, name, action, arguments, message):
    sweep = build_sweep(tmp_path, name)
    with pytest.raises(UsageError, match=message) as caught:
        check_request(sweep, ask(action, **arguments))
    assert "\n" not in str(caught.value)
    recorded = settle_request(sweep, ask(action, **arguments), 5.0)
    assert (recorded.outcome, recorded.reason) == ("refused", str(caught.value))
    assert str(recorded).startswith(f"{action}")
    assert replace(sweep, requests=[recorded]).spec == sweep.spec


@pytest.mark.parametrize(("name", "action", "arguments", "message"), CASES["twice"])
def test_the_same_request_twice_is_refused(tmp_path, name, action, arguments, message):
    once = preview_request(build_sweep(tmp_path, name), ask(action, **arguments), 5.0)
    assert once.requests[-1].outcome == "applied"
    with pytest.raises(UsageError, match=message):
        check_request(once, ask(action, "ben", **arguments))


def test_every_action_of_the_table_has_a_rule_that_is_tested():
    tested = {action for _, action, *_ in CASES["requests"] if action != "pauze"}
    assert tested == {*ACTIONS}


def test_a_merge_names_its_parts_and_may_follow_one_that_has_ended(tmp_path):
    sweep, merge = build_sweep(tmp_path, "trained"), ask("merge", weights={"5": 0.75, "2@20": 0.25})
    once = preview_request(sweep, merge, 5.0)
    assert once.requests[-1].effect.parts == (Part(2, 20, 0.25), Part(5, 40, 0.75))
    assert once.requests[-1].text == "merge 5=0.75 2@20=0.25"
    assert once.requests[-1].reason == "it is evaluated once a slot is free"
    ended = TrialRecord(6, "merge", "failed", {}, 6, "candidate", request=once.requests[-1].id)
    check_request(replace(once, records=[*once.records, ended]), merge)


def test_limits_may_be_raised_and_lowered_and_taken_back(tmp_path):
    sweep = build_sweep(tmp_path)
    for number in (24, 2, 16):
        sweep = preview_request(sweep, ask("trials", number=number), 5.0)
        assert sweep.spec.search.trials == number
    sweep = preview_request(sweep, ask("budget", completions=5000, hours=2), 5.0)
    assert sweep.requests[-1].reason == (
        "search.budget.completions is 5,000 instead of 0; search.budget.hours is 2 instead of 0"
    )
    assert (sweep.spec.search.budget.completions, sweep.spec.search.budget.hours) == (5000, 2)
    on_gpus = sweep.file.replace(resources=sweep.file.resources.replace(gpus=1))
    sweep = preview_request(replace(sweep, file=on_gpus), ask("budget", gpu_hours=3), 5.0)
    assert sweep.spec.search.budget.gpu_hours == 3


def test_a_clone_keeps_the_other_parameters_of_its_trial(tmp_path):
    sweep = build_sweep(tmp_path)
    effect = check_request(sweep, ask("clone", trial=2, changes={"learning_rate": 2e-4})).effect
    source = sweep.records[2].params
    active = {name: source[name] for name in sweep.spec.space.select_active(source)}
    assert effect.point == {**active, "learning_rate": 2e-4}


def test_a_configuration_that_a_trial_has_is_refused(tmp_path):
    sweep = build_sweep(tmp_path)
    point = {name: sweep.records[2].params[name] for name in sweep.spec.space.dimensions}
    with pytest.raises(UsageError, match="trial 2 has this configuration already"):
        check_request(sweep, ask("add", params=point))


def test_force_allows_values_outside_of_the_space_that_can_be_trained(tmp_path):
    outside = {"learning_rate": 0.01, "group_size": 16}
    effect = check_request(build_sweep(tmp_path), ask("add", params=outside, force=True)).effect
    assert effect.point == outside


def test_a_baseline_to_which_no_constraint_refers_can_be_stopped(tmp_path):
    decision = check_request(build_sweep(tmp_path), ask("stop", trial=1))
    assert (decision.effect.stop, decision.text) == (1, "trial 1 ends at its next step")


def test_a_pause_says_what_still_runs_and_what_waits_for_its_end(tmp_path):
    paused = preview_request(build_sweep(tmp_path, "trained"), ask("pause"), 5.0)
    assert paused.requests[-1].reason == (
        "no further trial starts; 1 running trial will end normally"
    )
    added = check_request(paused, ask("add", params={"group_size": 8})).text
    assert added == "it starts once the sweep is resumed, in addition to search.trials"
    merged = check_request(paused, ask("merge", weights={"2": 0.5, "5": 0.5})).text
    assert merged == "it is evaluated once the sweep is resumed"
