"""Checkpoints of a trial that has ended, before the end of the sweep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gdpo_tune.core.trials import Cost
from gdpo_tune.ledger import Ledger
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning.retention import delete_unkept_checkpoints
from tests.support.search_driver import Driver
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

QUICK = ("search.sampler=random", "search.trials=9", "search.replicates.max_runs=0")
ASHA = "search.scheduler={type: asha, grace: 0.1}"


def save(directory: Path, *steps: int) -> Path:
    """Write checkpoints of a trial and return the last one."""
    for step in steps:
        last = write_checkpoint(directory, step, Cost(), lambda path: (path / "w").touch())
    return last.path


def list_steps(directory: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in directory.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("keep", "complete", "failed"), [("front", [60], []), ("all", [60], []), ("none", [], [])]
)
def test_a_trial_that_ends_leaves_what_is_still_needed(
    tmp_path: Path, keep: str, complete: list[int], failed: list[int]
):
    with Ledger.open(load_code_spec(tmp_path, [*QUICK, f"keep={keep}"])) as ledger:
        driver = Driver(ledger)
        driver.end(driver.ask())  # the untrained policy, which has no checkpoint
        first, second = driver.ask(), driver.ask()
        directories = [driver.in_flight[trial].directory for trial in (first, second)]
        last, _ = [save(directory, 40, 60) for directory in directories]
        driver.end(first, outcome=replace(build_outcome(), checkpoint=last))
        assert list_steps(directories[0]) == complete
        assert list_steps(directories[1]) == [40, 60], "it still runs"
        driver.end(second, failure="loss is nan at step 61")
        assert list_steps(directories[1]) == failed
        records = ledger.get_records()
        assert [record.state for record in records] == ["complete", "complete", "failed"]
        assert bool(records[1].checkpoint) is bool(complete)


@pytest.mark.parametrize(("keep", "left"), [("all", [7]), ("front", []), ("none", [])])
def test_a_pruned_trial_keeps_one_checkpoint_where_all_are_kept(
    tmp_path: Path, keep: str, left: list[int]
):
    with Ledger.open(load_code_spec(tmp_path, [*QUICK, ASHA, f"keep={keep}"])) as ledger:
        driver = Driver(ledger)
        driver.end(driver.ask())
        driver.end(driver.ask())
        good, bad = driver.ask(), driver.ask()
        for trial, value in ((good, 0.9), (bad, 0.1)):
            driver.report(
                trial, build_measurement(7, correctness=value, format=value, length=value)
            )
        directory = driver.in_flight[bad].directory
        save(directory, 5, 7)
        driver.end(bad, interrupted=True)
        assert ledger.get_record(3).state == "pruned"
        assert list_steps(directory) == left
        driver.end(good)
        delete_unkept_checkpoints(ledger)
        assert list_steps(directory) == left


def test_a_trial_that_waits_keeps_its_checkpoints(tmp_path: Path):
    promote = "search.scheduler={type: asha, variant: promote}"
    with Ledger.open(load_code_spec(tmp_path, [*QUICK, promote])) as ledger:
        driver = Driver(ledger)
        driver.end(driver.ask())
        driver.end(driver.ask())
        good, bad = driver.ask(), driver.ask()
        for trial, value in ((good, 0.9), (bad, 0.1)):
            driver.report(
                trial, build_measurement(20, correctness=value, format=value, length=value)
            )
        directory = driver.in_flight[bad].directory
        save(directory, 10, 20)
        driver.end(bad, interrupted=True)
        assert ledger.get_record(3).state == "paused"
        assert list_steps(directory) == [10, 20]
