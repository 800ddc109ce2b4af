"""Constraints that refer to a baseline, in the ledger and in what the sampler learns."""

from pathlib import Path

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.trials import Role, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning.proposals import SamplerView
from tests.support.tuning import build_outcome, load_code_spec

BOUND = ['constraints.correctness=">= untrained - 0.1"', "search.sampler=gp"]


def run(ledger: Ledger, role: Role, correctness: float) -> TrialRecord:
    params = ledger.spec.space.complete_baseline({"learning_rate": 1e-4 * (1 + correctness)})
    record = ledger.start(params, role, "model", 1)
    return ledger.complete(record.number, build_outcome(correctness))


def test_a_bound_applies_once_its_baseline_is_measured(tmp_path: Path):
    spec = load_code_spec(tmp_path, BOUND)
    with Ledger.open(spec) as ledger:
        run(ledger, "search", 0.3)
        assert ledger.get_record(0).feasible
        run(ledger, "untrained", 0.6)
        run(ledger, "search", 0.55)
        assert [record.feasible for record in ledger.get_records()] == [False, True, True]
    with Ledger.open(spec) as ledger:
        assert [record.feasible for record in ledger.get_records()] == [False, True, True]
        assert ledger.spec.constraints["correctness"].limit == 0.5


def test_a_reader_sees_the_bound_of_a_running_sweep(tmp_path: Path):
    spec = load_code_spec(tmp_path, BOUND)
    with Ledger.open(spec) as ledger:
        run(ledger, "search", 0.3)
        with Ledger.open(spec, read_only=True) as reader:
            assert [record.feasible for record in reader.get_records()] == [True]
            run(ledger, "untrained", 0.6)
            assert [record.feasible for record in reader.get_records()] == [False, True]


def test_the_sampler_learns_which_earlier_trials_break_the_bound(tmp_path: Path):
    spec = load_code_spec(tmp_path, BOUND)
    projection = SamplerView(spec)
    with Ledger.open(spec) as ledger:
        projection.observe(run(ledger, "search", 0.3))
        assert [t.constraints for t in projection.study.trials] == [{"correctness": 0.0}]
        projection.observe(run(ledger, "untrained", 0.6))
        (violation,) = [t.constraints["correctness"] for t in projection.study.trials]
        assert round(violation, 9) == 0.2


@pytest.mark.parametrize("bound", [">= untrained + 2", "<= published - 1.5"])
def test_a_bound_beyond_every_value_is_refused(tmp_path: Path, bound: str):
    with pytest.raises(SpecError, match="no trial can ever meet this"):
        load_code_spec(tmp_path, [f'constraints={{correctness: "{bound}"}}'])
