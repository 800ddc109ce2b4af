"""Sweeps that stop trials at rungs, on a real Ray, with the fake training."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.tuning.attempts import HALT
from gdpo_tune.tuning.runner import run_sweep
from tests.support.fake_training import list_executions
from tests.support.ray_sweeps import MARKS, SPACE
from tests.support.tuning import ENDS_ONLY

pytestmark = MARKS

SMALL = (*ENDS_ONLY, "search.sampler=random", "training.steps=4", "search.replicates.max_runs=2")


def load_asha_spec(directory: Path, variant: str) -> SweepSpec:
    scheduler = f"search.scheduler={{type: asha, grace: 0.1, variant: {variant}}}"
    overrides = [f"storage={directory}", *SMALL, "search.trials=20", scheduler]
    return load_spec(SPACE, overrides, "sweep")


@pytest.mark.parametrize("variant", ["stop", "promote"])
def test_stopped_trials_take_no_step_past_their_rung_and_leave_no_files(
    tmp_path: Path, variant: str
):
    spec = load_asha_spec(tmp_path, variant)
    result = run_sweep(spec, train="tests.support.fake_training:train")
    with Ledger.open(spec, read_only=True) as ledger:
        states = {trial.state.name for trial in ledger.study.trials}
    assert not result.exit_status
    assert states == {"COMPLETE", "PRUNED"}

    pruned = [record for record in result.records if record.state == "pruned"]
    assert len(pruned) >= 5
    for record in pruned:
        # the fake training measures after every step
        assert [rung.step for rung in record.rungs] == list(range(1, len(record.rungs) + 1))
        assert f"stopped at rung {64 * len(record.rungs):,}: dominated by #" in record.reason
        directory = spec.directory / "trials" / str(record.number)
        assert not list(directory.glob("checkpoint-*"))
        assert not (directory / HALT).exists()

    starts = [execution["from"] for execution in list_executions(spec.directory)]
    if variant == "stop":
        assert starts == [0] * len(result.records)
    else:
        assert sum(bool(start) for start in starts) == len(starts) - len(result.records)
        promoted = [r for r in result.records if r.paused_at and len(r.rungs) == 4]
        for record in promoted:
            again = list_executions(spec.directory, str(record.number))
            assert [64 * int(str(start["from"])) for start in again][-1] == record.paused_at
