"""Reading a sweep while it runs: only what is new, and through every accident of its files."""

import os
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.locks import find_driver
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.steering import Steering
from gdpo_tune.web.live_sweep import IDLE_SHARE, LiveSweep
from tests.support.tuning import build_outcome, load_code_spec
from tests.support.web import apply_requests, report_step, start_sweep


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path)


def read(spec):
    return closing(LiveSweep(lambda: spec, clock=lambda: 0.0))


def test_nothing_is_read_again_while_nothing_changes(spec, monkeypatch):
    with start_sweep(spec) as ledger, read(spec) as sweep:
        first = sweep.refresh()
        assert sweep.refresh() is first  # which has seen that the steps of a trial are read
        monkeypatch.setattr(Ledger, "get_records", None)
        assert sweep.refresh() is first
        monkeypatch.undo()
        report_step(ledger, 2, 2, rung=False)
        second = sweep.refresh()
        assert [step.step for step in second.steps[2]] == [1, 2]
        ledger.complete(2, build_outcome(0.5, 0.5, 0.5))
        third = sweep.refresh()
        assert [record.state for record in third.records] == ["complete"] * 3
        assert third.steps == {}


def test_a_ledger_that_is_begun_or_moved_aside_is_read(spec):
    with read(spec) as sweep:
        assert sweep.refresh().records == ()
        start_sweep(spec).close()
        assert len(sweep.refresh().records) == 3
        Ledger.open(spec, fresh=True).close()
        assert sweep.refresh().records == []


def test_a_larger_sweep_is_read_from_its_file(spec):
    larger = spec.model_copy(update={"search": spec.search.model_copy(update={"trials": 99})})
    specs = [spec]
    with closing(LiveSweep(lambda: specs[-1], clock=lambda: 0.0)) as sweep:
        start_sweep(spec).close()
        assert sweep.refresh().spec.search.trials == spec.search.trials
        specs.append(larger)
        Ledger.open(larger).close()
        assert sweep.refresh().spec.search.trials == 99


def test_a_damaged_ledger_is_a_problem_and_the_last_content_stays(spec):
    start_sweep(spec).close()
    journal = spec.directory / "ledger.journal"
    whole = journal.read_bytes()
    with read(spec) as sweep:
        sweep.refresh()
        journal.write_bytes(whole + b"nonsense\n")
        broken = sweep.refresh()
        assert "not a record of a ledger" in broken.problem
        assert len(broken.records) == 3
        journal.write_bytes(whole)
        os.utime(journal, (1, 1))
        assert sweep.refresh().problem == ""


def test_a_directory_that_was_out_of_reach_is_read_again(spec):
    start_sweep(spec).close()
    away = spec.directory.with_name("away")

    def load():
        if not spec.directory.exists():
            raise UsageError("the sweep is gone")
        return spec

    with closing(LiveSweep(load, clock=lambda: 0.0)) as sweep:
        sweep.refresh()
        sweep.refresh()  # with the steps of the running trial among the files
        spec.directory.rename(away)
        assert "is gone" in sweep.refresh().problem
        away.rename(spec.directory)
        assert sweep.refresh().problem == ""


def test_a_torn_record_is_no_problem(spec):
    with start_sweep(spec) as ledger, read(spec) as sweep:
        sweep.refresh()
        with (spec.directory / "ledger.journal").open("ab") as file:
            file.write(b'{"op_code":8')
        assert sweep.refresh().problem == ""
        assert len(ledger.get_records()) == 3


def test_a_slow_sweep_is_read_rarely(spec):
    now = [0.0]

    def load():
        now[0] += 2.0
        return spec

    sweep = LiveSweep(load, clock=lambda: now[0])
    start_sweep(spec).close()
    first = sweep.refresh()  # takes two seconds
    with Ledger.open(spec) as ledger:
        ledger.complete(2, build_outcome(0.5, 0.5, 0.5))
    now[0] += IDLE_SHARE * 2.0 - 1
    assert sweep.refresh() is first
    now[0] += 2
    assert sweep.refresh() is not first
    sweep.close()


def test_requests_are_part_of_the_snapshot(spec):
    with start_sweep(spec) as ledger, read(spec) as sweep:
        assert not sweep.refresh().requests
        assert not sweep.refresh().pending
        Steering(spec.directory).request("pause", {}, "anna")
        waiting = sweep.refresh()
        assert [request.action for request in waiting.pending] == ["pause"]
        assert waiting.steering.pause is None
        apply_requests(ledger)
        taken = sweep.refresh()
        assert taken.pending == []
        assert taken.steering.pause.author == "anna"
        assert taken.requests[0].outcome == "applied"


# The driver


def test_a_driver_is_alive_while_it_holds_the_lease(spec, tmp_path):
    assert find_driver(spec.directory) is None
    with start_sweep(spec):
        driver = find_driver(spec.directory)
        assert (driver.process, driver.is_alive) == (os.getpid(), True)
        assert abs(driver.since - time.time()) < 60
        (copy := tmp_path / "copy").mkdir()
        (copy / "ledger.lock").write_bytes((spec.directory / "ledger.lock").read_bytes())
        assert find_driver(copy).is_alive is False
    assert find_driver(spec.directory).is_alive is False
    Ledger.open(spec).close()  # to look for the driver does not take its lease


@pytest.mark.integration
def test_a_killed_driver_is_not_alive(spec, tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from gdpo_tune.core.locks import Lease;"
        "lease = Lease(Path(sys.argv[1]) / 'ledger.lock'); print('held', flush=True);"
        "time.sleep(600)"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert find_driver(tmp_path).is_alive is True
        process.kill()
        process.wait()
        assert find_driver(tmp_path).is_alive is False


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "process x on y since z", "process 1 on y since 2026-99-99 00:00:00+0000"],
)
def test_an_unreadable_lease_names_no_driver(tmp_path, text):
    (tmp_path / "ledger.lock").write_text(text)
    assert find_driver(tmp_path) is None


def test_of_a_driver_on_another_machine_nothing_is_known(tmp_path):
    other = f"{socket.gethostname()}-2"
    (tmp_path / "ledger.lock").write_text(f"process 7 on {other} since 2026-01-01 00:00:00+0000\n")
    driver = find_driver(tmp_path)
    assert (driver.host, driver.is_alive) == (other, None)
