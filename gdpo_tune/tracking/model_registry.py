"""The final front in MLflow's model registry: one version a configuration, with aliases.

A version names the run of the configuration's first trial. Its policy stays where the trial left
it, in the folder that the version's tag `checkpoint` names: policies may be large, and the registry
is often on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gdpo_tune.tracking.run_content import clean_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

    from gdpo_tune.analysis.front import Front
    from gdpo_tune.analysis.replicates import Configuration
    from gdpo_tune.spec import SweepSpec

FOLDER = "policy"
"""Of a run's artifacts: what the source of a version names."""
OWNER = "sweep_run"
"""Tag of a version: id of the sweep's run. Versions of other sweeps under the name stay."""
EXISTS = "RESOURCE_ALREADY_EXISTS"


def final_models(name: str, front: Front) -> dict[str, Any]:
    """What the registry is to hold of a sweep that has ended.

    Args:
        name: of the registered model.
        front: at the end.

    Returns:
        `{"name": ..., "versions": [...]}`, a version being `{"trial": its run's key, "tags": ...,
        "aliases": ...}`.
    """
    return {"name": name, "versions": [_version(front, member) for member in front.members]}


def _version(front: Front, member: Configuration) -> dict[str, Any]:
    records = {record.number: record for record in front.records}
    aliases = ["knee"] if member is front.knee else []
    for goal in front.objectives:
        if front.extremes[goal.name] is member:
            aliases.append(_alias(f"{goal.direction[:3]}_{goal.name}"))
    tags = {
        "trial": str(member.first),
        "normalization": str(member.params.get("normalization", "")),
        "seeds": str(member.seeds),
        "provisional": str(member.provisional).lower(),
        "probability": f"{member.probability:.3f}",
        "checkpoint": records[member.first].policy,
    }
    for goal in front.objectives:
        estimate = member.mean[goal.name]
        tags[clean_name(goal.name)] = f"{estimate.mean:.6g}"
        tags[clean_name(f"{goal.name}_se")] = f"{estimate.se:.6g}"
    return {"trial": str(member.first), "tags": tags, "aliases": aliases}


def policies(spec: SweepSpec, front: Front) -> dict[int, str]:
    """Number of the first trial of each front member -> where its policy is, in Markdown."""
    records = {record.number: record for record in front.records}
    return {
        member.first: (
            f"The policy of trial {member.first} of sweep {spec.name}: "
            f"`{records[member.first].policy or 'its checkpoint was not kept'}`\n\n"
            "Train it again, or take its setting to another library:\n\n"
            f"    python -m gdpo_tune.train --from {spec.place}:{member.first}\n"
            f"    python -m gdpo_tune.export {spec.place}:{member.first} --to trl\n"
        )
        for member in front.members
    }


def _alias(name: str) -> str:
    """`name` with what an alias may not hold replaced."""
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in name)


def register(
    client: MlflowClient, models: Mapping[str, Any], runs: Mapping[str, str], parent: str
) -> None:
    """Make the registry hold the versions of `models` and no others of this sweep.

    Doing it again changes nothing.

    Args:
        client: of the server.
        models: what `final_models` returned.
        runs: key -> run id.
        parent: id of the sweep's run.
    """
    name = models["name"]
    _create_model(client, name)
    found = {
        str(version.run_id): version
        for version in client.search_model_versions(f"name = '{name}'")
        if version.tags.get(OWNER) == parent
    }
    aliases: dict[str, str] = {}
    for wanted in models["versions"]:
        run_id = runs.get(wanted["trial"])
        if run_id is None:
            continue  # the server refused the trial's first message, which is told elsewhere
        tags = {**wanted["tags"], OWNER: parent}
        number = _placed(client, name, run_id, tags, found.pop(run_id, None))
        aliases |= dict.fromkeys(wanted["aliases"], number)
    for version in found.values():
        client.delete_model_version(name, version.version)
    known = client.get_registered_model(name).aliases
    for alias, number in aliases.items():
        if str(known.get(alias)) != number:
            client.set_registered_model_alias(name, alias, number)


def _create_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description="Front of a gdpo_tune sweep.")
    except MlflowException as error:
        if error.error_code != EXISTS:
            raise


def _placed(
    client: MlflowClient, name: str, run_id: str, tags: dict[str, str], known: ModelVersion | None
) -> str:
    """Number of the version of a run, made or brought up to date."""
    if known is None:
        made = client.create_model_version(
            name, f"runs:/{run_id}/{FOLDER}", run_id, tags, await_creation_for=0
        )
        return str(made.version)
    for tag, text in tags.items():
        if known.tags.get(tag) != text:
            client.set_model_version_tag(name, known.version, tag, text)
    return str(known.version)
