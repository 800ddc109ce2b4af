"""Real sweeps by the ordinary command, and their lines in a picture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SweepLine:
    """Line of a sweep in one panel of the PNG."""

    problem: str
    contestant: str
    steps: Sequence[tuple[float, float]]


def list_overrides(seed: int, out: Path, changes: Sequence[str]) -> list[str]:
    """Return the overrides of a sweep without replicates that is kept in `out`."""
    return [
        f"search.seed={seed}",
        "search.replicates.max_runs=0",
        f"storage={out}",
        f"tracking.uri=sqlite:///{out}/mlflow.db",
        *changes,
    ]


def run_sweep_command(space: Path, name: str, overrides: Sequence[str], out: Path) -> None:
    """Run or resume a sweep; its output goes to `out/<name>.log`."""
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "gdpo_tune.sweep", str(space), "--name", name, *words]
    print(f"{name}: its output goes to {out / name}.log", flush=True)
    with (out / f"{name}.log").open("a", encoding="utf-8") as log:
        status = subprocess.run(command, check=False, stdout=log, stderr=log).returncode
    if status:
        raise SystemExit(
            f"{name} ended with status {status}; fix the cause, then run the same command to resume"
        )
