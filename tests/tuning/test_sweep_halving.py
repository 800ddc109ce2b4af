"""A sweep that divides a budget, on a real Ray, with the fake training."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.first_trials import find_wide_step
from gdpo_tune.tuning.halving import STOPPED
from gdpo_tune.tuning.runner import run_sweep
from tests.support.fake_training import list_executions
from tests.support.ray_sweeps import MARKS, SPACE
from tests.support.tuning import ENDS_ONLY, is_asked_to_stop

pytestmark = [*MARKS, pytest.mark.slow]


def test_stopped_trials_take_no_step_past_the_wide_rung_and_leave_no_files(tmp_path: Path):
    budget = ("search.budget.completions=12800", "search.replicates.max_runs=0")
    wide = ("search.scheduler={type: halving}", "search.trials=10", "search.sampler=random")
    overrides = [f"storage={tmp_path}", *ENDS_ONLY, *budget, *wide]
    spec = load_spec(SPACE, overrides, "sweep")
    result = run_sweep(spec, train="tests.support.fake_training:train")
    with Ledger.open(spec, read_only=True) as ledger:
        states = {trial.state.name for trial in ledger.study.trials}
    assert not result.exit_status
    assert states == {"COMPLETE", "PRUNED"}

    pruned = [record for record in result.records if record.state == "pruned"]
    assert pruned
    for record in pruned:
        # the fake training measures after every step
        steps = [rung.step for rung in record.rungs]
        assert steps == list(range(1, find_wide_step(spec) + 1))
        assert record.reason == STOPPED
        directory = spec.directory / "trials" / str(record.number)
        assert not list(directory.glob("checkpoint-*"))
        assert not is_asked_to_stop(directory)

    long = [r for r in result.records if r.is_training and r.state == "complete"]
    for record in long:
        assert [rung.step for rung in record.rungs] == list(range(1, (record.last_step or 0) + 1))
        begun, *continued = list_executions(spec.directory, str(record.number))
        assert begun["from"] == 0
        assert continued
        assert all(execution["from"] for execution in continued), "it goes on where it waited"
