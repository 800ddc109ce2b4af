"""What a target makes of sweeps, or everything that is wrong with what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render.base import Rendered, Request, schedule_for
from gdpo_tune.clusters.render.names import TARGETS
from gdpo_tune.core import registry
from gdpo_tune.core.errors import Problem, SpecError


def render_all(
    sweeps: Sequence[ScheduledSweep],
    target: str,
    *,
    python: str,
    folder: Path,
    now: datetime,
    kuberay: tuple[int, int],
    ray_cron_job: bool,
) -> list[Rendered]:
    """What a target makes of sweeps.

    Args:
        sweeps: the sweeps.
        target: one of `TARGETS`.
        python: interpreter of this package.
        folder: where the files will lie.
        now: the clock.
        kuberay: version of KubeRay.
        ray_cron_job: whether KubeRay is to keep the schedule.

    Raises:
        SpecError: it cannot say what they say; every problem of all of them.
    """
    function: Callable[[Request], Rendered] = registry.load(TARGETS[target].function)
    place = folder.absolute()
    done: list[Rendered] = []
    found: list[Problem] = []
    for sweep in sweeps:
        try:
            when = schedule_for(sweep, target)
            done.append(
                function(Request(sweep, when, target, python, place, now, kuberay, ray_cron_job))
            )
        except SpecError as error:
            found += error.problems
    if found:
        raise SpecError(tuple(found))
    return done
