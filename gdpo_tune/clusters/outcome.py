"""Figures of a run: its front, its cost, and whether the front beats that of the last run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import LocalBackend, SlurmBackend
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.object_store import is_url

VERDICTS = {"left": "better", "right": "worse"}
"""Verdict on this run against the last one -> its word here; other verdicts keep theirs."""


def read_figures(sweep: ScheduledSweep, run: str, earlier: str | None) -> dict[str, Any]:
    """Read the figures of a run from its ledger; compare it with an earlier run of the same spec.

    Returns:
        JSON: `gpu_hours`, `trials`, `failed_trials`, `front` (members), `hypervolume` with its
        interval at 95 %, `comparison`; for a run that never began only `gpu_hours`; for a ledger
        that cannot be read from here (another machine's directory) only `unknown`, the reason.
    """
    # Imported only here: numpy and Optuna take a second, and most ticks find no run that ended.
    from gdpo_tune.core.metrics import count_gpu_hours
    from gdpo_tune.results.front_table import summarize_front
    from gdpo_tune.results.open_sweep import read_sweep

    # A run whose attempts were all refused has no directory. Pods may have another disk.
    is_seen = isinstance(sweep.settings.backend, LocalBackend | SlurmBackend)
    if is_seen and not is_url(sweep.storage) and not Path(sweep.storage, run).exists():
        return {"gpu_hours": 0.0}
    try:
        found = read_sweep(f"{sweep.storage}/{run}", run)
    except (GdpoTuneError, OSError) as error:
        return {"unknown": str(error)}
    gpus = found.spec.resources.total_gpus
    figures = summarize_front(found.front)
    figures["gpu_hours"] = sum(count_gpu_hours(record.cost, gpus) for record in found.records)
    if earlier is not None:
        figures["comparison"] = _compare(sweep, run, earlier)
    return figures


def describe_outcome(figures: dict[str, Any]) -> str:
    """Return the figures in a sentence or two; empty if there are none."""
    if "unknown" in figures:
        return f"Its result is unknown here: {figures['unknown'].splitlines()[0]}."
    if not figures.keys() >= {"trials", "front", "gpu_hours"}:
        return ""
    # Only here, because it imports numpy.
    from gdpo_tune.results.front_table import describe_summary

    text = describe_summary(figures)
    text += f", {figures['gpu_hours']:.2f} GPU-hours." if figures["gpu_hours"] else "."
    if "comparison" not in figures:
        return text
    comparison = figures["comparison"]
    earlier = comparison["with"]
    if "unknown" in comparison:
        return f"{text} Not compared with {earlier}: {comparison['unknown'].splitlines()[0]}."
    text += f" Against {earlier}: {comparison['verdict']}."
    ratio, (low, high) = comparison["hypervolume_ratio"], comparison["interval"]
    if ratio is None or low is None:
        return text
    upper = "any" if high is None else f"{high:.2f}"
    return f"{text} {ratio:.2f} times its hypervolume (95 %: {low:.2f} to {upper})."


def _compare(sweep: ScheduledSweep, run: str, earlier: str) -> dict[str, Any]:
    from gdpo_tune.results.comparison_report import compare_sweeps
    from gdpo_tune.results.open_sweep import read_sweep

    addresses = [f"{sweep.storage}/{name}" for name in (run, earlier)]
    try:
        compared = compare_sweeps(*(read_sweep(address, address) for address in addresses))
    except (GdpoTuneError, OSError) as error:
        return {"with": earlier, "unknown": str(error)}
    ratio, winner = compared.comparison.ratio, compared.verdict.winner
    numbers = (ratio.value, ratio.interval.low, ratio.interval.high)
    value, low, high = (number if math.isfinite(number) else None for number in numbers)  # JSON
    return {
        "with": earlier,
        "verdict": VERDICTS.get(winner, winner),
        "told": compared.verdict.headline,
        "hypervolume_ratio": value,
        "interval": [low, high],
    }
