"""Content of the runs of a private sweep."""

from __future__ import annotations

from pathlib import Path

from gdpo_tune.core.events import SweepStarted
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.core.trials import Cost, Measurement, TrialRecord
from gdpo_tune.tracking.desired_runs import DesiredRuns
from gdpo_tune.tracking.run_content import SWEEP
from gdpo_tune.tracking.views import Site
from tests.support.tuning import load_code_spec

CANARY = "kanarie"


def test_of_a_private_sweep_no_text_and_no_place_leaves(tmp_path: Path):
    directory = tmp_path / CANARY
    spec = load_code_spec(tmp_path / CANARY, ["tracking.private=true"])
    params = spec.space.complete_baseline({})
    metrics = {"train/loss": 0.5, f"train/{CANARY}": 1.0, f"train/rewards/{CANARY}/mean": 1.0}
    directory = spec.directory / "trials" / "0"
    directory.mkdir(parents=True)
    append_step(directory, Measurement(1, metrics, Cost(64, 1.0)))
    record = TrialRecord(
        0,
        "search",
        "failed",
        params,
        7,
        "model",
        reason=CANARY,
        content=CANARY,
        environment={CANARY: CANARY, "sandbox": CANARY},
        directory=directory,
        checkpoint=directory / "checkpoint-1",
    )
    runs = DesiredRuns(spec)
    runs.take(SweepStarted((record,)))
    site = Site("http://tracking", "1", "parent")
    run = runs.build("0", site, None)
    assert [name for name, *_ in run.curves] == ["train/loss"]
    assert CANARY not in repr(run)
    sweep = runs.build(SWEEP, site, None)
    assert CANARY not in repr({**vars(sweep), "files": sweep.files["spec.yaml"]})
    assert "report.html" not in sweep.files
