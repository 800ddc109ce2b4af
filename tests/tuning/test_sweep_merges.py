"""Sweeps with merges and checkpoints, on a real Ray, with the fake training."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.analysis.front import build_front
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.tuning.runner import run_sweep
from tests.support.ray_sweeps import MARKS, SPACE

pytestmark = MARKS
SMALL = (
    "search={sampler: random, trials: 6, merges: {budget: 5}, checkpoints: {budget: 1}}",
    "search.replicates={per_point: 1, max_runs: 3}",
    "training={steps: 4, evaluate_every: 2, checkpoint_every: 2}",
    "constraints={}",
)
TRAIN = "tests.support.fake_training:train"


def load_small(directory: Path, *overrides: str) -> SweepSpec:
    return load_spec(SPACE, [f"storage={directory}", *SMALL, *overrides], "sweep")


def test_merges_join_the_front_and_keep_their_parents(tmp_path: Path):
    spec = load_small(tmp_path)
    records = run_sweep(spec, train=TRAIN).records
    merges = [record for record in records if record.role == "merge"]
    assert len(merges) == 5
    assert len({record.parts for record in merges}) == 5
    for merge in merges:
        assert sum(part.weight for part in merge.parts) == pytest.approx(1)
        assert all(records[part.trial].is_training for part in merge.parts)
        # none waits for the end of the search
        assert merge.number > max(part.trial for part in merge.parts)
    assert min(merge.number for merge in merges) < max(
        record.number for record in records if record.role == "search"
    )
    front = build_front(records, spec.list_objectives())
    names = {member.name for member in front.members}
    assert names & {merge.name for merge in merges}  # each is a little above its parents
    kept = {number for member in front.members for number in member.numbers}
    kept |= {part.trial for number in kept for part in records[number].parts}
    with Ledger.open(spec, read_only=True) as ledger:
        for record in ledger.get_records():
            directory = ledger.get_trial_directory(record.number)
            found = {path.name for path in directory.glob("checkpoint-*")}
            assert bool(found) == (record.number in kept), (record.number, found)
    fresh = [r for r in records if r.role == "replicate" and r.parts]
    for replicate in fresh:
        original = records[replicate.replicate_of or 0]
        pairs = zip(replicate.parts, original.parts, strict=True)
        assert all(records[a.trial].replicate_of == b.trial for a, b in pairs)
        assert [p.weight for p in replicate.parts] == [p.weight for p in original.parts]
    trained = sum(r.role == "replicate" and not r.parts for r in records)
    assert trained <= spec.search.replicates.max_runs


@pytest.mark.slow
def test_without_policies_nothing_is_merged(tmp_path: Path):
    records = run_sweep(load_small(tmp_path, "keep=none"), train=TRAIN).records
    assert {record.role for record in records} <= {"untrained", "published", "search", "replicate"}
