"""Every figure that a sweep has data for, by name; the report and notebooks draw from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import plotly.graph_objects as go

from gdpo_tune.figures.curves import draw_learning, draw_population, draw_rungs, read_all_steps
from gdpo_tune.figures.front_plotly import draw_pairs
from gdpo_tune.figures.hypervolume import draw_hypervolume
from gdpo_tune.figures.importance import draw_importance
from gdpo_tune.figures.parallel import draw_parallel
from gdpo_tune.figures.shares import draw_shares
from gdpo_tune.figures.slices import draw_slices, list_sliced
from gdpo_tune.figures.surfaces import draw_surfaces
from gdpo_tune.figures.timeline import draw_timeline
from gdpo_tune.results.open_sweep import Sweep

Gallery = Mapping[str, Callable[[], go.Figure]]


def build_gallery(sweep: Sweep) -> Gallery:
    """Return name -> function that draws it, for the figures that there is data for."""
    spec, front, records = sweep.spec, sweep.front, sweep.records
    dimensions, gpus = spec.space.dimensions, spec.resources.total_gpus
    steps = read_all_steps(records)
    trained = [c for c in front.configurations if c.is_training]
    started = any(r.started is not None for r in records)
    drawers: dict[str, tuple[object, Callable[[], go.Figure]]] = {
        "pairs": (front.configurations, lambda: draw_pairs(front, spec.constraints, dimensions)),
        "surfaces": (front.members and len(front.objectives) > 1, lambda: draw_surfaces(front)),
        "all": (len(trained) > 1, lambda: draw_parallel(front, dimensions)),
        "importance": (sweep.effects.estimates, lambda: draw_importance(sweep.effects)),
        "slices": (list_sliced(front, dimensions), lambda: draw_slices(front, dimensions)),
        "progress": (front.hypervolume_over_trials, lambda: draw_hypervolume(front, gpus)),
        "shares": (steps and front.members, lambda: draw_shares(front, steps)),
        "training": (steps, lambda: draw_learning(front, steps)),
        "rungs": (
            any(len(r.rungs) > 1 and r.is_training for r in records),
            lambda: draw_rungs(front),
        ),
        "population": (any(r.lineage for r in records), lambda: draw_population(front)),
        "timeline": (started, lambda: draw_timeline(records)),
    }
    return {name: draw for name, (data, draw) in drawers.items() if data}
