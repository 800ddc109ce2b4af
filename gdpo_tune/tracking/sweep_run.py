"""What a sweep's own run and its experiment hold from the start: tags, data sets, views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdpo_tune.tracking import views
from gdpo_tune.tracking.datasets import dataset_inputs
from gdpo_tune.tracking.run_content import SWEEP, Content, Identity

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def sweep_content(spec: SweepSpec, identity: Identity) -> Content:
    """Content of the sweep's run, its state and its front aside."""
    tags = {
        "sweep": identity.name,
        "identity": identity.identity,
        "sweep_id": identity.sweep_id,
        "role": SWEEP,
        "task": spec.task,
        "policy": spec.policy,
        "pareto_view": views.link(),
    }
    return Content(name=identity.name, tags=tags, inputs=dataset_inputs(spec))


def experiment_content(spec: SweepSpec, created: int) -> Content:
    """Views of the sweep, and its line in the experiment's note.

    Args:
        spec: the sweep.
        created: when its run began, in milliseconds since 1970.
    """
    tags = views.experiment_tags(spec, created)
    return Content(experiment={**tags, "mlflow.note.content": views.note_line(spec)})
