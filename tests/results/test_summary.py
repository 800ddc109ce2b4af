"""Counts of trials in words."""

from gdpo_tune.core.candidates import Part
from gdpo_tune.core.trials import Role, State, TrialRecord
from gdpo_tune.results.summary import describe_states


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
    assert describe_states(records) == (
        2,
        "1 stopped early, 1 of 3 merges and checkpoints complete",
    )
    assert describe_states(records[:2]) == (2, "")
