"""One run of a schedule and the progress of its trials, for `cluster_night`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from tests.support.killed_sweeps import SPACE, KilledSweep, read_steps_written

TICK = "2026-03-29T01:00:00+00:00"
RUN = "20260329T010000Z"
NIGHT = f"""extends: {SPACE}
name: night
search: {{sampler: random, scheduler: {{type: fifo}}, trials: TRIALS,
  replicates: {{per_point: 1, max_runs: 1}}}}
training: {{steps: STEPS, checkpoint_every: 5, validation_prompts: 32, test_prompts: 32}}
resources: {{cpus: 1, gpus: 0.5}}
"""
SWEEP = """space: night.yaml
backend: {kind: ray-job, address: URL}
storage: STORAGE
tracking: TRACKING
"""
PATIENCE = 900.0
DYING_SECONDS = 2.0
"""Time until the trials of a killed driver are dead; lines written by then do not count."""


class Night(KilledSweep):
    """One run of a schedule."""

    @property
    def spec(self) -> SweepSpec:
        """Spec of the sweep."""
        return load_spec(
            self.directory / "night.yaml",
            [f"storage={self.directory / 'shared'}"],
            name=f"night-{RUN}",
        )


@dataclass
class Watch:
    """Progress of all trials, recorded by repeated polls."""

    trials: Path
    line_counts: dict[str, int] = field(default_factory=dict)
    """Trial -> number of lines that it has written."""
    writes: list[tuple[float, str]] = field(default_factory=list)
    """Time of each poll that saw new lines of a trial, and the trial."""

    def record_progress(self) -> None:
        """Record which trials have written new lines."""
        for directory in self.trials.glob("*"):
            count = len(read_steps_written(directory))
            if count > self.line_counts.get(directory.name, 0):
                self.line_counts[directory.name] = count
                self.writes.append((time.monotonic(), directory.name))

    def find_first_writes(self, moment: float) -> dict[str, float]:
        """Return each trial that wrote after `moment`, and the seconds until its first line."""
        first: dict[str, float] = {}
        for when, trial in self.writes:
            if when > moment + DYING_SECONDS:
                first.setdefault(trial, when - moment)
        return first

    def count_repeated_steps(self) -> int:
        """Count the steps that trials have repeated so far."""
        lines = [read_steps_written(directory) for directory in self.trials.glob("*")]
        return sum(len(steps) - len(set(steps)) for steps in lines)


def write_files(directory: Path, url: str, steps: int, trials: int) -> Night:
    """Write the search space and the schedule file, as a user writes them."""
    (directory / "sweeps").mkdir(parents=True)
    space = NIGHT.replace("STEPS", str(steps)).replace("TRIALS", str(trials))
    (directory / "night.yaml").write_text(space)
    values = {
        "URL": url,
        "STORAGE": directory / "shared",
        "TRACKING": f"sqlite:///{directory}/mlflow.db",
    }
    sweep = SWEEP
    for word, value in values.items():
        sweep = sweep.replace(word, str(value))
    (directory / "sweeps" / "night.yaml").write_text(sweep)
    return Night(directory, (), fake=False)


@contextmanager
def run_schedule(night: Night) -> Iterator[subprocess.Popen[bytes]]:
    """Run the schedule command that submits the run and supervises it; kill it at the end."""
    command = ["-m", "gdpo_tune.schedule", "sweeps/", "run", "night", "--at", TICK, "--wait"]
    environment = {name: v for name, v in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with (night.directory / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "--every", "2"],
            cwd=night.directory,
            env={**environment, "RAY_AUTH_MODE": "disabled"},
            stdout=output,
            stderr=output,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def read_output(night: Night) -> str:
    """Return the output of the schedule command so far."""
    return (night.directory / "output.txt").read_text()


def wait(
    night: Night, process: subprocess.Popen[bytes], watch: Watch, moment: Callable[[], bool]
) -> None:
    """Wait until `moment` returns True; fail if the run ends first or takes too long."""
    deadline = time.monotonic() + PATIENCE
    while not moment():
        watch.record_progress()
        ended = process.poll() is not None
        if (ended and not moment()) or time.monotonic() > deadline:
            raise SystemExit(f"timed out\n{read_output(night)}")
        time.sleep(0.2)


def list_running_trials(night: Night) -> list[int]:
    """Return the numbers of the running trials."""
    with Ledger.open(night.spec, read_only=True) as ledger:
        return [record.number for record in ledger.get_records() if record.state == "running"]


def list_incidents(night: Night) -> list[Any]:
    """Return the incidents of all sessions of the sweep, in order."""
    with Ledger.open(night.spec, read_only=True) as ledger:
        return [incident for session in ledger.get_sessions() for incident in session["incidents"]]


def find_lost_trials(night: Night) -> set[str]:
    """Return the trials that ran on the lost node."""
    return {
        str(trial)
        for incident in list_incidents(night)
        if "was lost" in incident.description or "was cut off" in incident.description
        for trial in incident.trials
    }


def compute_return_seconds(watch: Watch, moment: float, trials: Sequence[int]) -> dict[str, float]:
    """Return the seconds until the first and until the last of these trials wrote again."""
    back = [
        seconds
        for trial, seconds in watch.find_first_writes(moment).items()
        if int(trial) in trials
    ]
    return {
        "first_back_seconds": round(min(back), 1),
        "all_back_seconds": round(max(back), 1),
    }
