"""Versions in MLflow's model registry: one for each configuration on the front.

A version names the run of a configuration's first trial. Its policy stays in the directory that the
version's tag `checkpoint` names, because policies may be large. The version holds a file of a few
hundred bytes, with which `mlflow.transformers.load_model` loads the policy from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.candidates import format_parts, title_candidate
from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.tracking.run_content import SWEEP, clean_name
from gdpo_tune.tracking.spool import Message

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from gdpo_tune.analysis.replicates import Configuration
    from gdpo_tune.spec import SweepSpec

POLICY = "policy"
"""Directory among a run's artifacts; the source of a version."""
OWNER = "sweep_run"
"""Tag of a version: id of the sweep's run. Versions of other sweeps under the name stay."""


def build_final_messages(spec: SweepSpec, front: Front) -> list[Message]:
    """Return the versions of the registry, and for each its file that says where its policy is."""
    records = {record.number: record for record in front.records}
    messages: list[Message] = []
    versions: list[dict[str, Any]] = []
    for member in front.members:
        trial, policy = member.first, _locate_policy(records[member.first])
        source = f"{spec.location}:{member.name}"
        again = (
            "Train it again, or export its setting to another library:\n\n"
            f"    python -m gdpo_tune.train --from {source}\n"
            f"    python -m gdpo_tune.export {source} --to trl\n"
        )
        if member.role == "merge":
            again = (
                f"It is {format_parts(member.parts)}. Repeat this merge with mergekit:\n\n"
                f"    python -m gdpo_tune.export {source} --to mergekit\n"
            )
        text = (
            f"The policy of {title_candidate(member.name)} of sweep {spec.name}: "
            f"`{policy or 'its checkpoint was not kept'}`\n\n{_describe_loading(policy)}{again}"
        )
        files = {"README.md": text}
        if policy and not is_url(policy):
            files["MLmodel"] = _format_model_file(policy)
        for name, content in files.items():
            artifact = {"name": f"{POLICY}/{name}", "text": content}
            messages.append({"run": str(trial), "artifact": artifact})
        versions.append(_build_version(front, member, policy))
    return [*messages, {"run": SWEEP, "models": {"name": spec.name, "versions": versions}}]


def _locate_policy(record: TrialRecord) -> str:
    """Return the absolute path or the URL of a policy; empty if it was not kept."""
    policy = record.policy
    return policy if not policy or is_url(policy) else str(Path(policy).absolute())


def _describe_loading(policy: str) -> str:
    """Return how a policy is loaded, in Markdown; empty if it was not kept."""
    if not policy:
        return ""
    if is_url(policy):
        return "Download it, then give its directory to `transformers.pipeline`.\n\n"
    return (
        "Load it on a machine that sees this directory:\n\n"
        f'    transformers.pipeline("text-generation", model="{policy}")\n\n'
    )


def _format_model_file(directory: str) -> str:
    """Return the `MLmodel` file with which `mlflow.transformers` loads a policy where it lies.

    Its form is that of a model on the Hub, which is named and not copied. The Hub is not asked for
    a directory, so the revision, which MLflow requires, has no effect.
    """
    flavor = {
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": "AutoModelForCausalLM",
        "source_model_name": directory,
        "source_model_revision": "main",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        "tokenizer_name": directory,
        "tokenizer_revision": "main",
    }
    return json.dumps({"flavors": {"transformers": flavor}}, indent=2)


def _build_version(front: Front, member: Configuration, policy: str) -> dict[str, Any]:
    aliases = ["knee"] if member is front.knee else []
    tags = {
        "trial": str(member.first),
        "candidate": member.name,
        "parts": format_parts(member.parts) if member.parts else "",
        "normalization": str(member.params.get("normalization", "")),
        "seeds": str(member.seeds),
        "provisional": str(member.is_provisional).lower(),
        "probability": f"{member.probability:.3f}",
        "checkpoint": policy,
    }
    for goal in front.objectives:
        estimate = member.mean[goal.name]
        tags[clean_name(goal.name)] = f"{estimate.mean:.6g}"
        tags[clean_name(f"{goal.name}_se")] = f"{estimate.se:.6g}"
        if front.extremes[goal.name] is member:
            aliases.append(re.sub(r"[^\w-]", "_", f"{goal.direction[:3]}_{goal.name}"))
    return {"trial": str(member.first), "tags": tags, "aliases": aliases}


def register_models(
    client: MlflowClient, models: Mapping[str, Any], runs: Mapping[str, str], parent: str
) -> None:
    """Make the registry hold the versions of `models` and no others of this sweep.

    Doing it again changes nothing. `runs` is key -> run id, `parent` the id of the sweep's run.
    """
    name = models["name"]
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name, description="Front of a gdpo_tune sweep.")
    versions = {
        str(version.run_id): version
        for version in client.search_model_versions(f"name = '{name}'")
        if version.tags.get(OWNER) == parent
    }
    aliases: dict[str, str] = {}
    for content in models["versions"]:
        run_id = runs.get(content["trial"])
        if run_id is None:
            continue  # the server refused the trial's first message, which is reported elsewhere
        tags = {**content["tags"], OWNER: parent}
        version = versions.pop(run_id, None)
        if version is None:
            source = f"runs:/{run_id}/{POLICY}"
            version = client.create_model_version(name, source, run_id, tags, await_creation_for=0)
        for tag, text in tags.items():
            if version.tags.get(tag) != text:
                client.set_model_version_tag(name, version.version, tag, text)
        aliases |= dict.fromkeys(content["aliases"], str(version.version))
    for version in versions.values():
        client.delete_model_version(name, version.version)
    for alias, number in aliases.items():
        client.set_registered_model_alias(name, alias, number)
