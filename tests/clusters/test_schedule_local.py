"""A real scheduled sweep on this machine: it survives its caller, and `kill -9`."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from gdpo_tune import schedule
from gdpo_tune.clusters.backends import local_jobs, supervise
from gdpo_tune.clusters.backends.base import CHECKPOINT_SECONDS, ScheduledJob
from gdpo_tune.clusters.backends.local_jobs import Local
from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.schedule_state import JobHandle, ScheduleHistory
from gdpo_tune.core.system import identify_start
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.system]

SPACE = f"""extends: {ROOT / "search_spaces" / "code.yaml"}
search: {{trials: 1, merges: {{budget: 0}}, scheduler: {{type: fifo}}, replicates: {{max_runs: 0}}}}
training: {{steps: 4, checkpoint_every: 1, validation_prompts: 16, test_prompts: 16}}
"""
SWEEP = """space: small.yaml
schedule: {cron: "0 2 * * *"}
policy: {missed_grace: 24h}
"""
WAIT = 240.0


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with one scheduled sweep, without a cluster."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "small.yaml").write_text(SPACE)
    (tmp_path / "sweeps" / "nightly.yaml").write_text(SWEEP)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def wait_for(condition, seconds=WAIT):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def wait_for_end(backend, job):
    """Return the status of a job once it has ended."""
    return wait_for(lambda: (seen := backend.poll(job)) and not seen.running and seen)


def state_of(project):
    history = ScheduleHistory(project / "runs" / ".schedule" / "nightly")
    history.read()
    return history.state


@pytest.mark.fault
def test_a_driver_killed_in_the_middle_is_continued_as_attempt_two(project):
    words = [sys.executable, "-m", "gdpo_tune.schedule", "sweeps"]
    at = "2026-03-29T01:00:00Z"
    name = "nightly-20260329T010000Z"
    first = [*words, "run", "nightly", "--at", at]
    subprocess.run(first, cwd=project, check=True, timeout=WAIT)
    trials = project / "runs" / name / "trials"
    wait_for(lambda: (trials / "1" / "steps.jsonl").exists())
    run = state_of(project).runs[-1]
    assert run.name == name
    _, (driver, created) = run.job.processes
    assert identify_start(driver) == created
    os.kill(driver, signal.SIGKILL)
    wait_for(lambda: Path(run.job.directory, "end.json").exists())

    def tick():
        subprocess.run([*words, "tick"], cwd=project, check=True, timeout=WAIT)
        return state_of(project).runs[-1]

    assert tick().attempt == 2
    waiting = [*first, "--wait", "--every", "1"]
    waiting = subprocess.run(waiting, cwd=project, timeout=WAIT, capture_output=True, text=True)
    assert waiting.returncode == 0, waiting.stderr
    assert f"{name} finished. 3 trials" in waiting.stdout

    run = state_of(project).runs[-1]
    assert (run.state, run.attempt) == ("finished", 2)
    spec = load_spec(project / "small.yaml", [f"storage={project / 'runs'}"], name)
    with Ledger.open(spec, read_only=True) as ledger:
        records, sessions = ledger.get_records(), ledger.get_sessions()
    roles = {"untrained": 1, "published": 1, "search": 1}
    assert Counter(record.role for record in records) == roles
    assert {record.state for record in records} == {"complete"}
    assert len(sessions) == 2
    assert state_of(project).notices[-1].details["hypervolume"] > 0


SLEEP = "import time\ntime.sleep(100)\n"


@pytest.fixture
def sleeper(tmp_path, monkeypatch):
    """Return a function that builds a backend whose sweep is another program."""
    (tmp_path / "gdpo").mkdir()
    script, real = tmp_path / "gdpo" / "program.py", local_jobs.write_atomically

    def write(path, content):
        about = {**json.loads(content), "command": [sys.executable, str(script)]}
        real(path, json.dumps(about))

    monkeypatch.setattr(local_jobs, "write_atomically", write)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def build(program=SLEEP):
        script.write_text(program)
        return Local(tmp_path / "jobs"), ScheduledJob("x-a1", "x", ("space.yaml",), tmp_path)

    return build


def test_a_job_is_begun_once_and_its_end_is_seen(tmp_path, sleeper):
    program = "import time\nopen('begun', 'a').write('x')\ntime.sleep(1)\nprint('error: no luck')\n"
    backend, job = sleeper(program + "raise SystemExit(7)\n")
    (tmp_path / "jobs" / job.id).mkdir(parents=True)  # of a submission that was killed
    known = [backend.submit(job) for _ in range(3)]
    assert known[0] == known[1] == known[2]
    assert backend.poll(known[0]).running
    status = wait_for_end(backend, known[0])
    assert (status.exit_status, status.reason) == (7, "exit status 7: error: no luck")
    assert (tmp_path / "begun").read_text() == "x"
    assert backend.submit(job) == known[0]
    assert not backend.poll(known[0]).running


def test_a_job_that_is_stopped_gets_one_signal_and_time(tmp_path, sleeper):
    program = (
        "import signal, sys, time\n"
        "count = [0]\n"
        "def stop(*_):\n"
        "    count[0] += 1\n"
        "    open('signals', 'w').write(str(count[0]))\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open('ready', 'w').close()\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    backend, job = sleeper(program)
    known = backend.submit(job)
    wait_for((tmp_path / "ready").exists)
    for _ in range(3):
        backend.stop(known, 1.0)
    wait_for((tmp_path / "signals").exists)
    time.sleep(0.3)
    assert (tmp_path / "signals").read_text() == "1"
    assert backend.poll(known).running
    backend.stop(known, CHECKPOINT_SECONDS)
    status = wait_for_end(backend, known)
    assert status.exit_status == -signal.SIGKILL
    backend.stop(known, CHECKPOINT_SECONDS)


def test_a_supervisor_that_was_killed_leaves_a_job_that_is_still_seen(sleeper):
    backend, job = sleeper()
    known = backend.submit(job)
    (supervisor, _), (sweep, _) = known.processes
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(supervisor))
    assert backend.poll(known).running
    os.kill(sweep, signal.SIGKILL)
    status = wait_for_end(backend, known)
    assert status.exit_status is None
    assert "without an exit status" in status.reason


def test_a_job_of_another_machine_is_alive_while_it_beats(sleeper, monkeypatch):
    backend, job = sleeper()
    known = backend.submit(job)
    elsewhere = known.model_copy(update={"machine": "another"})
    beat = Path(known.directory, "beat")
    wait_for(beat.exists)
    assert backend.poll(elsewhere).running
    with pytest.raises(local_jobs.BackendUnreachableError, match=r"runs on another\n.*stop it on"):
        backend.stop(elsewhere, 0.0)
    monkeypatch.setattr(local_jobs, "WATCH_SECONDS", 0.1)
    os.kill(known.processes[0][0], signal.SIGKILL)  # whose lock would say that it lives
    wait_for(lambda: not psutil.pid_exists(known.processes[0][0]))
    old = time.time() - 2 * local_jobs.SILENT_SECONDS
    os.utime(beat, (old, old))
    assert not backend.poll(elsewhere).running
    beat.unlink()
    assert not backend.poll(elsewhere).running
    backend.stop(known, CHECKPOINT_SECONDS)
    wait_for(lambda: not backend.poll(known).running)


def test_a_job_lives_while_the_clock_is_set_and_can_be_stopped(sleeper, monkeypatch):
    """proc_stat(5): btime, from which creation times are derived, follows the clock. A record of an
    earlier version has such a time; the lock says that the supervisor lives, flock(2)."""
    backend, job = sleeper()
    known = backend.submit(job)
    times = [(pid, psutil.Process(pid).create_time()) for pid, _ in known.processes]
    stored = known.model_copy(update={"processes": times}).model_dump_json()
    earlier = JobHandle.model_validate_json(stored)
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + 60)
    assert backend.poll(known).running
    assert backend.poll(earlier).running
    backend.stop(earlier, 0.0)
    status = wait_for_end(backend, earlier)
    assert status.exit_status == -signal.SIGTERM


def test_a_command_that_cannot_start_is_refused(tmp_path, sleeper):
    backend, job = sleeper("")
    gone = ScheduledJob(job.id, job.run, job.arguments, tmp_path / "gone")
    with pytest.raises(local_jobs.BackendError, match=r"the process did not start: .*gone"):
        backend.submit(gone)


def test_serve_ends_with_a_signal_and_leaves_the_job(project):
    today = datetime.now(UTC) - timedelta(minutes=1)
    cron = f'"{today.minute} {today.hour} * * *"'
    (project / "sweeps" / "nightly.yaml").write_text(SWEEP.replace('"0 2 * * *"', cron))
    words = [sys.executable, "-m", "gdpo_tune.schedule", "sweeps", "serve", "--every", "0.5"]
    with subprocess.Popen(words, cwd=project) as server:
        wait_for(lambda: state_of(project).schedule)
        (project / "sweeps" / "broken.yaml").write_text("space: nowhere.yaml\n")
        time.sleep(2)
        assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        assert server.wait(WAIT) == 0
    assert load_sweeps(project / "sweeps").error is not None
    assert schedule.main([str(project / "sweeps" / "nightly.yaml"), "status"]) == 0


def test_a_second_supervisor_waits_until_the_first_has_begun(tmp_path):
    """Otherwise its caller would see a job that did not start, and begin the next attempt."""
    command = [sys.executable, "-m", "gdpo_tune.clusters.backends.supervise", str(tmp_path)]
    with (tmp_path / supervise.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1.0)
            (tmp_path / supervise.STATE).write_text("{}")
            assert second.wait(30) == 0
    assert not (tmp_path / supervise.END).exists()
