"""Where a sweep is in MLflow: its experiment, its own run and one a trial, each there once.

Runs are found by tag before they are created. A server that hangs may still carry out a request
that nobody waits for any more, after the same run was asked for again: of such twins the one with
more in it stays, and the others are deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gdpo_tune.tracking.run_content import SWEEP, Identity
from gdpo_tune.tracking.server import artifact_location

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUNS_PER_PAGE = 1000
EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow 3 opens the experiment on its page for language-model traces."""


def find_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """Id of the experiment, which is made if there is none, and taken back if it was deleted."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return client.create_experiment(name, artifact_location(uri, name), EXPERIMENT_KIND)
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def find_runs(client: MlflowClient, experiment: str, identity: Identity) -> dict[str, str]:
    """`SWEEP` or a trial's number -> id of its run, as far as there are any; twins are deleted."""
    parent = _find_parent(client, experiment, identity)
    if parent is None:
        return {}
    twins: dict[str, list[Run]] = {}
    for run in _search(client, experiment, f"tags.`mlflow.parentRunId` = '{parent}'"):
        # People nest runs of their own under a sweep's: those have no such tag, and stay.
        if "trial" in run.data.tags:
            twins.setdefault(run.data.tags["trial"], []).append(run)
    return {SWEEP: parent} | {trial: _only(client, runs) for trial, runs in twins.items()}


def _find_parent(client: MlflowClient, experiment: str, identity: Identity) -> str | None:
    query = f"tags.role = '{SWEEP}' AND tags.identity = '{identity.identity}'"
    runs = [r for r in _search(client, experiment, query) if r.data.tags["sweep"] == identity.name]
    ours = [run for run in runs if run.data.tags["sweep_id"] == identity.sweep_id]
    if ours:
        return _only(client, ours)
    return runs[-1].info.run_id if runs and identity.adopt else None


def _only(client: MlflowClient, twins: Sequence[Run]) -> str:
    """Id of the run that has most in it; the others are deleted."""
    kept, *others = sorted(twins, key=lambda run: (-_content(run), run.info.run_id))
    for run in others:
        client.delete_run(run.info.run_id)
    return kept.info.run_id


def _content(run: Run) -> int:
    return len(run.data.metrics) + len(run.data.params) + len(run.data.tags)


def _search(client: MlflowClient, experiment: str, query: str) -> Iterator[Run]:
    """Runs that match, oldest first."""
    token: str | None = None
    while True:
        page = client.search_runs(
            [experiment],
            query,
            max_results=RUNS_PER_PAGE,
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        yield from page
        token = page.token
        if not token:
            return
