"""One run of a schedule, and how far its trials have come: for `cluster_night`."""

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
"""Until all trials of a killed driver are dead, too; what they write until then is no return."""


class Night(KilledSweep):
    """One run of a schedule."""

    @property
    def spec(self) -> SweepSpec:
        """What is asked."""
        return load_spec(
            self.directory / "night.yaml", [f"storage={self.directory / 'shared'}"], name=f"night-{RUN}"
        )


@dataclass
class Watch:
    """How far trials have come, looked at again and again."""

    trials: Path
    seen: dict[str, int] = field(default_factory=dict)
    """Lines that each trial has written."""
    grown: list[tuple[float, str]] = field(default_factory=list)
    """When a trial was seen to have written more."""

    def look(self) -> None:
        """Look once more."""
        for folder in self.trials.glob("*"):
            count = len(read_steps_written(folder))
            if count > self.seen.get(folder.name, 0):
                self.seen[folder.name] = count
                self.grown.append((time.monotonic(), folder.name))

    def after(self, moment: float) -> dict[str, float]:
        """Trials that wrote something after a kill, and the seconds until they first did."""
        first: dict[str, float] = {}
        for when, trial in self.grown:
            if when > moment + DYING_SECONDS:
                first.setdefault(trial, when - moment)
        return first

    def repeated(self) -> int:
        """Steps that were done again so far."""
        lines = [read_steps_written(folder) for folder in self.trials.glob("*")]
        return sum(len(steps) - len(set(steps)) for steps in lines)


def write_files(folder: Path, url: str, steps: int, trials: int) -> Night:
    """The search space and the file of the schedule, as a person writes them."""
    (folder / "sweeps").mkdir(parents=True)
    space = NIGHT.replace("STEPS", str(steps)).replace("TRIALS", str(trials))
    (folder / "night.yaml").write_text(space)
    given = {"URL": url, "STORAGE": folder / "shared", "TRACKING": f"sqlite:///{folder}/mlflow.db"}
    sweep = SWEEP
    for word, value in given.items():
        sweep = sweep.replace(word, str(value))
    (folder / "sweeps" / "night.yaml").write_text(sweep)
    return Night(folder, (), fake=False)


@contextmanager
def scheduled(night: Night) -> Iterator[subprocess.Popen[bytes]]:
    """The command that begins the run and looks after it."""
    command = ["-m", "gdpo_tune.schedule", "sweeps/", "run", "night", "--at", TICK, "--wait"]
    environment = {name: v for name, v in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with (night.directory / "told.txt").open("ab") as told:
        process = subprocess.Popen(
            [sys.executable, *command, "--every", "2"],
            cwd=night.directory,
            env={**environment, "RAY_AUTH_MODE": "disabled"},
            stdout=told,
            stderr=told,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def told(night: Night) -> str:
    """What the command has said."""
    return (night.directory / "told.txt").read_text()


def wait(
    night: Night, process: subprocess.Popen[bytes], watch: Watch, moment: Callable[[], bool]
) -> None:
    """Wait for a moment in the life of a run."""
    deadline = time.monotonic() + PATIENCE
    while not moment():
        watch.look()
        ended = process.poll() is not None
        if (ended and not moment()) or time.monotonic() > deadline:
            raise SystemExit(f"waited in vain\n{told(night)}")
        time.sleep(0.2)


def running(night: Night) -> list[int]:
    """Trials under way."""
    with Ledger.open(night.spec, read_only=True) as ledger:
        return [record.number for record in ledger.get_records() if record.state == "running"]


def incidents(night: Night) -> list[Any]:
    """What befell the sweep, in order."""
    with Ledger.open(night.spec, read_only=True) as ledger:
        return [incident for session in ledger.get_sessions() for incident in session["incidents"]]


def lost_trials(night: Night) -> set[str]:
    """Trials that ran on the node that was lost."""
    return {
        str(trial)
        for incident in incidents(night)
        if "was lost" in incident.what or "was cut off" in incident.what
        for trial in incident.trials
    }


def back_seconds(watch: Watch, moment: float, trials: Sequence[int]) -> dict[str, float]:
    """When the first and the last of these trials wrote again."""
    back = [seconds for trial, seconds in watch.after(moment).items() if int(trial) in trials]
    return {
        "first_back_seconds": round(min(back), 1),
        "all_back_seconds": round(max(back), 1),
    }
