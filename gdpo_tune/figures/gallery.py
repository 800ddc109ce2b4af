"""Every figure that a sweep has data for, by name: what the report and a notebook draw from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from gdpo_tune.analysis.effects import Effects, effects
from gdpo_tune.analysis.front import Front
from gdpo_tune.figures.hypervolume import hypervolume_figure
from gdpo_tune.figures.importance import importance_figure
from gdpo_tune.figures.learning import learning_figure
from gdpo_tune.figures.pairs import pairs_figure
from gdpo_tune.figures.parallel import is_drawable, parallel_figure
from gdpo_tune.figures.population_curves import has_moved, population_figure
from gdpo_tune.figures.rung_curves import measured_on_the_way, rungs_figure
from gdpo_tune.figures.shares import shares_figure
from gdpo_tune.figures.slices import sliced, slices_figure
from gdpo_tune.figures.step_curves import steps_of
from gdpo_tune.figures.surfaces import surfaces_figure
from gdpo_tune.figures.timeline import timeline_figure

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

Gallery = Mapping[str, Callable[[], go.Figure]]


def gallery(spec: SweepSpec, front: Front, found: Effects | None = None) -> Gallery:
    """Name -> what draws it, for the figures that there is data for.

    Args:
        spec: the sweep.
        front: its front.
        found: the parameters' effects, for who has them already.
    """
    dimensions, records = spec.space.dimensions, front.records
    known = found or effects_of(spec, front)
    steps = steps_of(records)
    drawers: list[tuple[str, object, Callable[[], go.Figure]]] = [
        ("pairs", front.configurations, lambda: pairs_figure(front, spec.constraints)),
        (
            "surfaces",
            front.members and len(front.objectives) > 1,
            lambda: surfaces_figure(front),
        ),
        (
            "all",
            is_drawable(front.configurations),
            lambda: parallel_figure(front, dimensions),
        ),
        ("importance", known.found, lambda: importance_figure(known)),
        ("slices", sliced(front, dimensions), lambda: slices_figure(front, dimensions)),
        (
            "progress",
            front.hypervolume_over_trials,
            lambda: hypervolume_figure(front, spec.resources.in_all),
        ),
        ("shares", steps and front.members, lambda: shares_figure(front, steps)),
        ("training", steps, lambda: learning_figure(front, steps)),
        ("rungs", measured_on_the_way(records), lambda: rungs_figure(front)),
        ("population", has_moved(records), lambda: population_figure(front)),
        (
            "timeline",
            any(record.started is not None for record in records),
            lambda: timeline_figure(records),
        ),
    ]
    return {name: draw for name, wanted, draw in drawers if wanted}


def effects_of(spec: SweepSpec, front: Front) -> Effects:
    """What the searched parameters do."""
    return effects(front.configurations, spec.space.dimensions, front.objectives)
