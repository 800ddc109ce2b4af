"""The front as a table of comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trials import TrialRecord, format_parts
from gdpo_tune.results.summary import TABLE_FILE
from gdpo_tune.spec import SweepSpec


def write_front_csv(spec: SweepSpec, records: Sequence[TrialRecord]) -> Path:
    """Write `front.csv` into the sweep's directory and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    path = spec.directory / TABLE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, format_front_csv(build_front(records, spec.list_objectives())))
    return path


def format_front_csv(front: Front) -> str:
    """Return one row per member, best in the first objective first, numbers with all digits."""
    goals = front.objectives
    measured = [f"{goal.name}{suffix}" for goal in goals for suffix in ("", "_se")]
    params = sorted({name for member in front.members for name in member.params})
    about = ["seeds", "probability", "role", "parts", "picked_as", "worse_than_baselines"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["trial", "name", *measured, *about, *params])
    for member in front.members:
        estimates = [member.mean[goal.name] for goal in goals]
        numbers = [x for estimate in estimates for x in (estimate.mean, estimate.se)]
        parts = format_parts(member.parts, "") if member.parts else ""
        labels = [", ".join(front.list_labels(member)), "; ".join(front.list_shortfalls(member))]
        facts = [member.seeds, member.probability, member.role, parts, *labels]
        settings = [member.params.get(name, "") for name in params]
        writer.writerow([member.first, member.name, *numbers, *facts, *settings])
    return file.getvalue()
