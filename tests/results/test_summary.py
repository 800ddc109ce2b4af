"""Counts of trials in words, and the front in a file."""

import csv
import io
from dataclasses import replace

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.trials import Estimate, Objective, Part, Role, State, TrialRecord
from gdpo_tune.results.front_table import format_front_csv
from gdpo_tune.results.wording import describe_role, describe_states


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


def test_a_replicate_of_a_merge_is_called_by_the_name_of_the_merge():
    """Names of candidates: `gdpo_tune/core/trials.py`."""
    merge = build(71, "replicate", "complete", Part(8, 60, 0.5), Part(9, 60, 0.5))
    assert describe_role(replace(merge, replicate_of=14)) == "replicate of merge-14"
    checkpoint = replace(build(72, "replicate", "complete", Part(8, 40, 1.0)), replicate_of=15)
    assert describe_role(checkpoint) == "replicate of the checkpoint of trial 15"
    assert describe_role(replace(build(3, "replicate", "complete"), replicate_of=1)) == (
        "replicate of 1"
    )


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
