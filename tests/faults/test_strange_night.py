"""One scheduled night on a machine of its own mind: the clock is corrected, the tracker is dead,
a second process meets the ledger, and the project is renamed afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
from tests.support.free_ports import find_free_port
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.fault]

AT, NAME = "2026-03-29T01:00:00Z", "nightly-20260329T010000Z"
PATIENCE = 600.0
SPACE = f"""extends: {ROOT / "search_spaces" / "code.yaml"}
storage: runs
search: {{trials: 2, merges: {{budget: 0}}, scheduler: {{type: fifo}}, replicates: {{max_runs: 0}}}}
training: {{steps: 16, checkpoint_every: 1, validation_prompts: 16, test_prompts: 16}}
"""
SWEEP = """space: small.yaml
schedule: {cron: "0 2 * * *"}
policy: {missed_grace: 24h}
"""
CLOCK_STEP = r"""
sed "s/^btime .*/btime $(( $(sed -n 's/^btime //p' /proc/stat) + 60 ))/" /proc/stat > "$1/stat"
mount --bind "$1/stat" /proc/stat || exit 77
shift
exec "$@"
"""
"""The kernel derives `btime` from the wall clock: proc(5). A set clock moves it."""


def run(project: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        words,
        cwd=project,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def gdpo(command: str, *words: str) -> list[str]:
    return [sys.executable, "-m", f"gdpo_tune.{command}", *words]


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def read_trials(project: Path) -> dict[str, int]:
    """Return the number of complete trials of each role."""
    spec = load_spec(project / "small.yaml", [f"storage={project / 'runs'}"], NAME)
    with Ledger.open(spec, read_only=True) as ledger:
        records = ledger.get_records()
    assert {record.state for record in records} == {"complete"}
    assert len({record.number for record in records}) == len(records)
    return Counter(record.role for record in records)


def find_refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one message of a refused command."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "fix: " in done.stderr
    return message


@pytest.fixture(autouse=True)
def end_what_a_failed_night_left(tmp_path: Path):
    yield
    for state in tmp_path.rglob("state.json"):
        for pid, _ in json.loads(state.read_bytes())["processes"]:
            with suppress(psutil.NoSuchProcess):
                if str(tmp_path) in psutil.Process(pid).cwd():
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="to set a clock needs root")
def test_nothing_is_lost_and_nothing_is_twice(tmp_path: Path):
    project = tmp_path / "project"
    (project / "sweeps").mkdir(parents=True)
    (project / "sweeps" / "nightly.yaml").write_text(SWEEP)
    dead = f"http://127.0.0.1:{find_free_port()}"
    space = f"{SPACE}tracking: {{uri: {dead}, required: false}}\n"
    (project / "small.yaml").write_text(space)
    required = space.replace("required: false", "required: true")
    (project / "required.yaml").write_text(required)

    # a dead tracker: refused where it is required, a warning where it is not
    refusal = find_refusal(run(project, *gdpo("sweep", "required.yaml"), check=False))
    assert dead in refusal
    assert "required" in refusal
    assert not (project / "runs" / "required").exists()
    words = gdpo("schedule", "sweeps")
    run(project, *words, "run", "nightly", "--at", AT)
    jobs = project / "runs" / ".schedule" / "nightly" / "jobs"
    sweep = project / "runs" / NAME
    wait_until(lambda: list(sweep.glob("trials/*/steps.jsonl")))

    # the clock is corrected while the sweep runs
    stepped = ["unshare", "-m", "bash", "-c", CLOCK_STEP, "bash", str(tmp_path)]
    ticked = run(project, *stepped, *words, "tick", check=False)
    if ticked.returncode == 77:
        pytest.skip("this machine does not let root mount over /proc/stat")
    assert ticked.returncode == 0, ticked.stderr
    assert [job.name for job in jobs.iterdir()] == [f"{NAME}-a1"]

    # a second process meets the ledger, which is being written
    sweep_again = gdpo("sweep", "small.yaml", "--name", NAME)
    refusal = find_refusal(run(project, *sweep_again, check=False))
    assert "is being written" in refusal

    # the driver is killed, with all that it started; the next tick continues the run
    driver = json.loads((jobs / f"{NAME}-a1" / "state.json").read_bytes())["processes"][-1][0]
    os.kill(driver, signal.SIGKILL)
    wait_until(lambda: (jobs / f"{NAME}-a1" / "end.json").exists())
    run(project, *words, "run", "nightly", "--at", AT, "--wait", "--every", "1")
    assert sorted(job.name for job in jobs.iterdir()) == [f"{NAME}-a1", f"{NAME}-a2"]
    complete = {"untrained": 1, "published": 1, "search": 2}
    assert read_trials(project) == complete

    # the project is renamed: it is the same sweep, and it can be extended
    renamed = tmp_path / "My Search 100%"
    project.rename(renamed)
    run(renamed, *sweep_again)
    assert read_trials(renamed) == complete
    run(renamed, *sweep_again, "--set", "search.trials=3")
    assert read_trials(renamed) == {**complete, "search": 3}
    assert not project.exists()
    elsewhere = run(tmp_path, *gdpo("report", str(renamed / "runs" / NAME)))
    assert "3 trials" in elsewhere.stdout or "5 trials" in elsewhere.stdout
