"""Checkpoints of a trial that has ended, before the end of the sweep."""

from dataclasses import replace

import pytest

from gdpo_tune.core.trials import Cost
from gdpo_tune.ledger import Ledger
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning.retention import delete_unkept_checkpoints
from tests.support.search_driver import Driver
from tests.support.tuning import build_measurement, build_outcome, load_code_spec, load_halving_spec

QUICK = ("search.sampler=random", "search.trials=9", "search.replicates.max_runs=0")


def save(directory, *steps):
    """Write checkpoints of a trial and return the last one."""
    for step in steps:
        last = write_checkpoint(directory, step, Cost(), lambda path: (path / "w").touch())
    return last.path


def list_steps(directory):
    return sorted(int(path.name.split("-")[1]) for path in directory.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("keep", "complete", "failed"), [("front", [60], []), ("all", [60], []), ("none", [], [])]
)
def test_a_trial_that_ends_leaves_what_is_still_needed(tmp_path, keep, complete, failed):
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


@pytest.mark.parametrize(("keep", "left"), [("all", [26]), ("front", []), ("none", [])])
def test_a_training_keeps_its_checkpoints_while_it_waits_and_one_or_none_once_pruned(
    tmp_path, keep, left
):
    spec = load_halving_spec(tmp_path, 1400, "search.sampler=random", f"keep={keep}")
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        driver.end(driver.ask())
        for number in range(1, 14):
            name = driver.ask()
            config = driver.in_flight[name]
            value = 0.3 + float(config.params["learning_rate"]) * 1e3
            save(config.directory, 20, 26)
            measured = build_measurement(26, correctness=value, format=value, length=value)
            driver.report(name, measured)
            driver.end(name, interrupted=True)
            if number < 13:  # the last one ends the wide rung
                assert ledger.get_record(number).state == "paused"
                assert list_steps(config.directory) == [20, 26]
        assert driver.ask() in driver.in_flight  # chooses who goes on
        pruned = [r.number for r in ledger.get_records() if r.state == "pruned"]
        waiting = [r.number for r in ledger.get_records() if r.state == "paused"]
        assert len(pruned) >= 8
        for numbers, kept in ((pruned, left), (waiting, [20, 26])):
            assert all(list_steps(ledger.get_trial_directory(n)) == kept for n in numbers)
        delete_unkept_checkpoints(ledger)
        assert all(list_steps(ledger.get_trial_directory(n)) == left for n in pruned)
