"""A scheduler of one file and one line of the registry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

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
quick += ["search.merges={budget: 0}", "search.checkpoints={budget: 0}", "training.steps=60"]
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
        stops = driver.searcher.stop_flag.is_set(number)
        driver.end(name, interrupted=stops)
    print(*(f"{r.number}:{r.state}" for r in ledger.get_records()), ledger.get_record(3).reason)
"""


def test_a_scheduler_is_one_file_and_one_line(tmp_path: Path):
    (tmp_path / "halves.py").write_text(SCHEDULER)
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, str(tmp_path)],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    states = "0:complete 1:complete 2:complete 3:pruned 4:complete 5:pruned"
    assert done.stdout.startswith(states), done.stdout
    assert "stopped at rung" in done.stdout
