"""Figures of a run: its front, its cost, and whether the front beats that of the last run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import LocalBackend, SlurmBackend
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.object_store import is_url

VERDICTS = {"left": "better", "right": "worse"}
"""Verdict on this run against the last one -> its word here; other verdicts keep theirs."""


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run; one that never began has no description."""

    gpu_hours: float | None = 0.0
    """None: its ledger cannot be read from here, as on the disk of another machine."""
    description: str = ""
    """A sentence or two."""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """For a notice and its webhook: the keys of `summarize_front`, `gpu_hours` and `comparison`; or
    `unknown`, the reason."""


def read_figures(sweep: ScheduledSweep, run: str, earlier: str | None) -> RunFigures:
    """Read a run's figures from its ledger; compare it with an earlier run of the same spec."""
    # Imported only here: numpy and Optuna take a second, and most ticks find no run that ended.
    from gdpo_tune.core.metrics import count_gpu_hours
    from gdpo_tune.results.front_table import describe_summary, summarize_front
    from gdpo_tune.results.open_sweep import read_sweep

    # A run whose attempts were all refused has no directory. Pods may have another disk.
    is_seen = isinstance(sweep.settings.backend, LocalBackend | SlurmBackend)
    if is_seen and not is_url(sweep.storage) and not Path(sweep.storage, run).exists():
        return RunFigures(details={"gpu_hours": 0.0})
    try:
        found = read_sweep(f"{sweep.storage}/{run}", run)
    except (GdpoTuneError, OSError) as error:
        text = f"Its result is unknown here: {str(error).splitlines()[0]}."
        return RunFigures(None, text, {"unknown": str(error)})
    gpus = found.spec.resources.total_gpus
    hours = sum(count_gpu_hours(record.cost, gpus) for record in found.records)
    text = describe_summary(found.front) + (f", {hours:.2f} GPU-hours." if hours else ".")
    details = {**summarize_front(found.front), "gpu_hours": hours}
    if earlier is not None:
        sentence, details["comparison"] = _compare(sweep, run, earlier)
        text += f" {sentence}"
    return RunFigures(hours, text, details)


def _compare(sweep: ScheduledSweep, run: str, earlier: str) -> tuple[str, dict[str, Any]]:
    from gdpo_tune.results.comparison_report import compare_sweeps
    from gdpo_tune.results.open_sweep import read_sweep

    addresses = [f"{sweep.storage}/{name}" for name in (run, earlier)]
    try:
        compared = compare_sweeps(*(read_sweep(address, address) for address in addresses))
    except (GdpoTuneError, OSError) as error:
        reason = f"Not compared with {earlier}: {str(error).splitlines()[0]}."
        return reason, {"with": earlier, "unknown": str(error)}
    ratio, winner = compared.comparison.ratio, compared.verdict.winner
    verdict = VERDICTS.get(winner, winner)
    text, numbers = describe_ratio(ratio.value, ratio.interval.low, ratio.interval.high)
    details = {"with": earlier, "verdict": verdict, "headline": compared.verdict.headline}
    return f"Against {earlier}: {verdict}.{text}", details | numbers


def describe_ratio(ratio: float, low: float, high: float) -> tuple[str, dict[str, Any]]:
    """Return a ratio of hypervolumes and its interval as text, empty if unbounded, and as JSON."""
    text = ""
    if math.isfinite(ratio) and math.isfinite(low):
        upper = f"{high:.2f}" if math.isfinite(high) else "any"
        text = f" {ratio:.2f} times its hypervolume (95 %: {low:.2f} to {upper})."
    value, *interval = (number if math.isfinite(number) else None for number in (ratio, low, high))
    return text, {"hypervolume_ratio": value, "interval": interval}
