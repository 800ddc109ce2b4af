"""The contract of every scheduler, and one of a file of its own and a line of the registry."""

import subprocess
import sys

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.trials import Cost, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from tests.support.paths import ROOT
from tests.support.tuning import build_outcome, load_halving_spec


@pytest.mark.parametrize("role", ["untrained", "published", "start", "replicate", "search"])
@pytest.mark.parametrize("name", registry.SCHEDULERS)
def test_a_scheduler_decides_alike_again_and_stops_trials_of_the_search_alone(tmp_path, name, role):
    build = registry.load(registry.SCHEDULERS[name].target)
    spec = load_halving_spec(tmp_path, 1400, f"search.scheduler={{type: {name}}}")
    with Ledger.open(spec) as ledger:
        one, other = build(ledger), build(ledger)  # a new process decides the same
        record = TrialRecord(1, role, "running", spec.space.complete_baseline({}), 1, "model")
        steps = one.list_evaluation_steps(record)
        assert steps == other.list_evaluation_steps(record)
        assert all(0 < step < spec.training.steps for step in steps)
        for step in (*steps, 7, spec.training.steps):
            rung = Rung(step, build_outcome().validation, Cost(64 * step))
            verdicts = {each.decide(record, rung) for each in (one, other, one)}
            assert len(verdicts) == 1
            if name == "fifo" or step not in steps or role in ("untrained", "start", "replicate"):
                assert verdicts == {"continue"}
        assert (one.find_promotable(), one.find_ending(), [*one.list_stopped()]) == (None, None, [])


SCHEDULER = """
from gdpo_tune.tuning.schedulers import Scheduler

class Halves(Scheduler):
    def list_evaluation_steps(self, record):
        return (30,) if record.role == "search" else ()

    def decide(self, record, rung):
        return "stop" if record.role == "search" and record.number % 2 else "continue"
"""
SWEEP = """
import sys
from pathlib import Path
from gdpo_tune.core import registry
from gdpo_tune.core.registry import SchedulerInfo

registry.SCHEDULERS["halves"] = SchedulerInfo("halves:Halves", "every other trial ends halfway")

from gdpo_tune.ledger import Ledger
from tests.support.search_driver import Driver
from tests.support.tuning import build_measurement, load_code_spec

quick = ["search.sampler=random", "search.trials=4", "search.replicates.max_runs=0"]
spec = load_code_spec(Path(sys.argv[1]), [*quick, "search.scheduler={type: halves}"])
with Ledger.open(spec) as ledger:
    driver = Driver(ledger, slots=1)
    while (name := driver.ask()) != driver.searcher.FINISHED:
        if name is None:
            continue
        if 30 in driver.in_flight[name].evaluate_at:
            measured = build_measurement(30, correctness=0.5, format=0.5, length=0.5)
            driver.report(name, measured)
        number = int(driver.in_flight[name].directory.name)
        driver.end(name, interrupted=driver.searcher.stop_flag.is_set(number))
    print(*(f"{r.number}:{r.state}" for r in ledger.get_records()), ledger.get_record(3).reason)
"""


@pytest.mark.system
def test_a_scheduler_is_one_file_and_one_line(tmp_path):
    (tmp_path / "halves.py").write_text(SCHEDULER)
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, str(tmp_path)],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    states = "0:complete 1:complete 2:complete 3:pruned 4:complete 5:pruned"
    assert done.stdout == f"{states} stopped at rung 1,920\n"
