"""What a run has come to: its front, its cost, and whether the front beats that of the last run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import LocalBackend, SlurmBackend
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.object_store import is_url

WORDS = {"left": "better", "right": "worse"}
"""Verdict on this run against the last one -> how it is told; others stand for themselves."""


def figures(sweep: ScheduledSweep, run: str, against: str | None) -> dict[str, Any]:
    """What a run's ledger says, as JSON.

    Args:
        sweep: its file.
        run: its name.
        against: the last finished run of the same spec, to compare it with.

    Returns:
        `gpu_hours`, `trials`, `failed_trials`, `front` (members), `hypervolume` with its interval
        at 95 %, and `comparison`. Of a run that never began, that it cost nothing. Of a ledger
        that cannot be read from here, `unknown` alone, with the reason: a machine may tick for a
        cluster whose folders it does not see.
    """
    # Only now: numpy and Optuna take a second to import, and most calls find nothing that ended.
    from gdpo_tune.core.costs import gpu_hours
    from gdpo_tune.results.open_sweep import read_sweep

    if never_began(sweep, run):
        return {"gpu_hours": 0.0}
    try:
        found = read_sweep(f"{sweep.storage}/{run}", run)
    except (GdpoTuneError, OSError) as error:
        return {"unknown": str(error)}
    records, gpus = found.records, found.spec.resources.in_all
    front = found.front()
    known: dict[str, Any] = {
        "trials": len(records),
        "failed_trials": sum(record.state == "failed" for record in records),
        "gpu_hours": sum(gpu_hours(record.cost, gpus) for record in records),
        "front": len(front.members),
    }
    if front.members:
        interval = front.hypervolume_interval
        known["hypervolume"] = front.hypervolume
        known["hypervolume_interval"] = [interval.low, interval.high]
    if against is not None:
        known["comparison"] = _comparison(sweep, run, against)
    return known


def never_began(sweep: ScheduledSweep, run: str) -> bool:
    """Whether every attempt at a run was refused: it has no folder where there would be one.

    Of pods and of other people's clusters a missing folder tells nothing: their storage may be
    another disk of that name.
    """
    seen = isinstance(sweep.settings.backend, LocalBackend | SlurmBackend)
    return seen and not is_url(sweep.storage) and not Path(sweep.storage, run).exists()


def _comparison(sweep: ScheduledSweep, run: str, against: str) -> dict[str, Any]:
    from gdpo_tune.results.compare import compare_sweeps
    from gdpo_tune.results.open_sweep import read_sweep

    places = [f"{sweep.storage}/{name}" for name in (run, against)]
    try:
        compared = compare_sweeps(*(read_sweep(place, place) for place in places))
    except (GdpoTuneError, OSError) as error:
        return {"with": against, "unknown": str(error)}
    ratio, winner = compared.comparison.ratio, compared.verdict.winner
    return {
        "with": against,
        "verdict": WORDS.get(winner, winner),
        "told": compared.verdict.headline,
        "hypervolume_ratio": _number(ratio.value),
        "interval": [_number(ratio.interval.low), _number(ratio.interval.high)],
    }


def told(about: dict[str, Any]) -> str:
    """The figures in a sentence or two; empty if there are none."""
    if "unknown" in about:
        return f"What it came to is not known here: {about['unknown'].splitlines()[0]}."
    if not about.keys() >= {"trials", "front", "gpu_hours"}:
        return ""
    trials = "1 trial" if about["trials"] == 1 else f"{about['trials']} trials"
    text = f"{trials}, {about['front']} on the front"
    if about.keys() >= {"hypervolume", "hypervolume_interval"}:
        low, high = about["hypervolume_interval"]
        text += f", hypervolume {about['hypervolume']:.3f} (95 %: {low:.3f} to {high:.3f})"
    text += f", {about['gpu_hours']:.2f} GPU-hours." if about["gpu_hours"] else "."
    return text + _told_of(about["comparison"]) if "comparison" in about else text


def _told_of(comparison: dict[str, Any]) -> str:
    if "unknown" in comparison:
        return f" Not compared with {comparison['with']}: {comparison['unknown'].splitlines()[0]}."
    text = f" Against {comparison['with']}: {comparison['verdict']}."
    low, high = comparison["interval"]
    if comparison["hypervolume_ratio"] is None or low is None:
        return text
    upper = "any" if high is None else f"{high:.2f}"
    ratio = f"{comparison['hypervolume_ratio']:.2f} times its hypervolume"
    return f"{text} {ratio} (95 %: {low:.2f} to {upper})."


def _number(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None
