"""Figures of a run: its front, its cost, and whether the front beats that of the last run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import LocalBackend, SlurmBackend
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.object_store import is_url

VERDICTS = {"left": "better", "right": "worse"}
"""Verdict on this run against the last one -> its word here; other verdicts keep theirs."""


@dataclass(frozen=True)
class RunComparison:
    """A run against an earlier one."""

    earlier: str
    verdict: str
    headline: str
    """The verdict in a sentence."""
    hypervolume_ratio: float
    """Hypervolume of this run as a share of that of the earlier one; may not be finite."""
    interval: tuple[float, float]
    """Its interval at 95 %."""


@dataclass(frozen=True)
class FailedComparison:
    """An earlier run that cannot be compared with, and why."""

    earlier: str
    problem: str


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run; one that never began has no front."""

    gpu_hours: float = 0.0
    front: Mapping[str, Any] | None = None
    """As `summarize_front` returns it."""
    comparison: RunComparison | FailedComparison | None = None
    """None: there is no earlier run to compare with."""


@dataclass(frozen=True)
class UnreadRun:
    """A run whose ledger cannot be read from here, as on the disk of another machine."""

    problem: str


def read_figures(sweep: ScheduledSweep, run: str, earlier: str | None) -> RunFigures | UnreadRun:
    """Read a run's figures from its ledger; compare it with an earlier run of the same spec."""
    # Imported only here: numpy and Optuna take a second, and most ticks find no run that ended.
    from gdpo_tune.core.metrics import count_gpu_hours
    from gdpo_tune.results.front_table import summarize_front
    from gdpo_tune.results.open_sweep import read_sweep

    # A run whose attempts were all refused has no directory. Pods may have another disk.
    is_seen = isinstance(sweep.settings.backend, LocalBackend | SlurmBackend)
    if is_seen and not is_url(sweep.storage) and not Path(sweep.storage, run).exists():
        return RunFigures()
    try:
        found = read_sweep(f"{sweep.storage}/{run}", run)
    except (GdpoTuneError, OSError) as error:
        return UnreadRun(str(error))
    gpus = found.spec.resources.total_gpus
    return RunFigures(
        sum(count_gpu_hours(record.cost, gpus) for record in found.records),
        summarize_front(found.front),
        None if earlier is None else _compare(sweep, run, earlier),
    )


def describe_figures(figures: RunFigures | UnreadRun) -> str:
    """Return the figures in a sentence or two; empty if the run never began."""
    if isinstance(figures, UnreadRun):
        return f"Its result is unknown here: {figures.problem.splitlines()[0]}."
    if figures.front is None:
        return ""
    # Only here, because it imports numpy.
    from gdpo_tune.results.front_table import describe_summary

    text = describe_summary(figures.front)
    text += f", {figures.gpu_hours:.2f} GPU-hours." if figures.gpu_hours else "."
    match figures.comparison:
        case None:
            return text
        case FailedComparison(earlier, problem):
            return f"{text} Not compared with {earlier}: {problem.splitlines()[0]}."
        case RunComparison() as found:
            text += f" Against {found.earlier}: {found.verdict}."
            ratio, (low, high) = found.hypervolume_ratio, found.interval
            if not (math.isfinite(ratio) and math.isfinite(low)):
                return text
            upper = f"{high:.2f}" if math.isfinite(high) else "any"
            return f"{text} {ratio:.2f} times its hypervolume (95 %: {low:.2f} to {upper})."


def serialize_figures(figures: RunFigures | UnreadRun) -> dict[str, Any]:
    """Return the figures as JSON, for a notice and its webhook.

    Keys: those of `summarize_front`, `gpu_hours` and `comparison`; or `unknown`, the reason.
    """
    if isinstance(figures, UnreadRun):
        return {"unknown": figures.problem}
    values = {**(figures.front or {}), "gpu_hours": figures.gpu_hours}
    match figures.comparison:
        case None:
            return values
        case FailedComparison(earlier, problem):
            return {**values, "comparison": {"with": earlier, "unknown": problem}}
        case RunComparison() as found:
            numbers = (found.hypervolume_ratio, *found.interval)
            ratio, *interval = (number if math.isfinite(number) else None for number in numbers)
            comparison = {
                "with": found.earlier,
                "verdict": found.verdict,
                "headline": found.headline,
                "hypervolume_ratio": ratio,
                "interval": interval,
            }
            return {**values, "comparison": comparison}


def _compare(sweep: ScheduledSweep, run: str, earlier: str) -> RunComparison | FailedComparison:
    from gdpo_tune.results.comparison_report import compare_sweeps
    from gdpo_tune.results.open_sweep import read_sweep

    addresses = [f"{sweep.storage}/{name}" for name in (run, earlier)]
    try:
        compared = compare_sweeps(*(read_sweep(address, address) for address in addresses))
    except (GdpoTuneError, OSError) as error:
        return FailedComparison(earlier, str(error))
    ratio, winner = compared.comparison.ratio, compared.verdict.winner
    return RunComparison(
        earlier,
        VERDICTS.get(winner, winner),
        compared.verdict.headline,
        ratio.value,
        (ratio.interval.low, ratio.interval.high),
    )
