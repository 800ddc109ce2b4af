"""The front in MLflow: ranks, tags, hypervolume, a table, a note, and versions in its registry.

A version of the registry stands for a configuration on the front, and names the run of its first
trial. Its policy stays in the directory that the tag `checkpoint` names, because policies may be
large. The version holds a file of a few hundred bytes, with which
`mlflow.transformers.load_model` loads the policy from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.front import Front, summarize_origins
from gdpo_tune.core.object_store import SPEC, is_url
from gdpo_tune.core.text import CANDIDATE_COLORS, INK, MODE_COLORS, OTHER_COLOR, get_mode
from gdpo_tune.core.trials import TrialRecord, format_parts, title_candidate
from gdpo_tune.results import front_table
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.wording import FRONT_FILE, REPORT_FILE, describe_effects, describe_origins
from gdpo_tune.tracking import run_content, views

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from gdpo_tune.analysis.replicates import Configuration
    from gdpo_tune.spec import SweepSpec

PALE = 0.35
"""Share of its mode's colour that a trial behind the front has; the rest is white."""
POLICY = "policy"
"""Directory among a run's artifacts; the source of a version."""
OWNER = "sweep_run"
"""Tag of a version: id of the sweep's run. Versions of other sweeps under the name stay."""


@dataclass(frozen=True)
class FrontContent:
    """What the front adds to the runs, and at the end of the sweep to the registry."""

    trials: dict[int, run_content.RunContent]
    """Number -> tag `pareto`, name, colour and, if it is ranked, its rank and its place."""
    sweep: run_content.RunContent
    policies: dict[int, dict[str, str | Path]]
    """Number of a trial on the front -> files that say where its policy is."""
    versions: list[dict[str, Any]]


def build_front_content(
    spec: SweepSpec, records: Sequence[TrialRecord], site: views.Site, now: int
) -> FrontContent:
    """Return the front of `records`; `now` is the time of new ranks, in ms since 1970."""
    front = Sweep(spec, records).front
    ranks = {number: c.rank for c in front.configurations for number in c.numbers}
    # Trials behind the front share a place: places of their own would change with every trial that
    # ends, and each change is a request to MLflow.
    places = {number: 1000 * rank for number, rank in ranks.items() if rank > 0}
    members = sorted(front.members, key=lambda member: member is not front.knee)  # the knee first
    for place, number in enumerate((n for member in members for n in member.numbers), start=1):
        places[number] = place
    knee = front.knee.numbers if front.knee else ()
    trials: dict[int, run_content.RunContent] = {}
    for record in front.records:
        rank = ranks.get(record.number, -1)
        tags = {
            "pareto": str(rank == 0).lower(),
            "mlflow.runColor": _choose_color(record, on_front=rank == 0),
            run_content.RUN_NAME: run_content.build_run_name(record)
            + (run_content.KNEE if record.number in knee else ""),
        }
        content = trials[record.number] = run_content.RunContent(tags=tags)
        if rank >= 0:
            content.values["pareto/rank"] = (float(rank), now)
            if record.number in places:
                content.values["pareto/order"] = (float(places[record.number]), now)
    sweep = run_content.RunContent(
        tags={run_content.NOTE: _format_note(spec, front, site)},
        files={front_table.TABLE_FILE: front_table.format_front_csv(front)},
    )
    finished = {record.number: record.finished or 0.0 for record in front.records}
    for step, point in enumerate(front.hypervolume_over_trials):
        when = run_content.to_milliseconds(finished[point.number])
        sweep.curves.append(("hypervolume", point.hypervolume, when, step))
    if front.configurations:
        sweep.values["pareto/size"] = (float(len(front.members)), now)
    for origin in summarize_origins(front):  # there are several kinds, or none
        figures = {"share": origin.share, "members": origin.members, **asdict(origin.cost)}
        for name, value in figures.items():
            sweep.values[f"origin/{origin.kind}/{name}"] = (float(value), now)
    policies = {record.number: record.policy for record in front.records}
    for number, policy in policies.items():  # where it was kept
        if policy and not is_url(policy):
            policies[number] = str(Path(policy).absolute())
    return FrontContent(
        trials,
        sweep,
        {m.first: _list_policy_files(spec, m, policies[m.first]) for m in front.members},
        [_build_version(front, m, policies[m.first]) for m in front.members],
    )


def _choose_color(record: TrialRecord, *, on_front: bool) -> str:
    if record.is_initial:
        return INK
    color = CANDIDATE_COLORS.get(record.role) or (
        MODE_COLORS.get(get_mode(record.params), OTHER_COLOR) if record.params else OTHER_COLOR
    )
    if on_front:
        return color
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(PALE * c + (1 - PALE) * 255):02x}" for c in channels)


def _format_note(spec: SweepSpec, front: Front, site: views.Site) -> str:
    goals = ", ".join(f"{goal.direction} `{goal.name}`" for goal in front.objectives)
    states = [record.state for record in front.records]
    lines = [*describe_origins(front), *describe_effects(Sweep(spec, front.records).effects)]
    origins = "".join(f"- {line}\n" for line in lines)
    origins += "\n" if origins else ""
    report = "" if spec.tracking.private else f"`{REPORT_FILE}`, "  # it quotes reasons
    place = "among this run's artifacts" if report else "in the sweep's directory"
    return (
        f"{views.format_links(site)}. These pages load {views.LOADED} trials, the front first; "
        f"`{REPORT_FILE}` {place} shows all.\n\n"
        f"Sweep **{spec.name}**: task `{spec.task}`, policy `{spec.policy}`; {goals}.\n\n"
        f"{states.count('complete')} trials complete, {states.count('failed')} failed; "
        f"{front_table.describe_front(front)}.\n\n{origins}"
        "The trials are the children of this run: filter by `tags.pareto = 'true'`, sort by "
        f"`metrics.pareto/order`. Artifacts: {report}`{FRONT_FILE}`, `{front_table.TABLE_FILE}`, "
        f"`{SPEC}`.\n"
    )


def _list_policy_files(
    spec: SweepSpec, member: Configuration, policy: str
) -> dict[str, str | Path]:
    """Return what a version holds: a page, and the file with which `mlflow.transformers` loads it.

    That has the form of a model on the Hub, which is named and not copied; of a directory the
    revision, which MLflow requires, has no effect.
    """
    source = f"{spec.location}:{member.name}"
    again = f"Train it again:\n\n    python -m gdpo_tune.train --from {source}\n"
    if Sweep(spec, ()).can_export:
        again += f"\nExport its setting:\n\n    python -m gdpo_tune.export {source} --to trl\n"
    if member.role == "merge":
        again = (
            f"It is {format_parts(member.parts)}. Repeat it with mergekit, or train from its "
            "weights:\n\n"
            f"    python -m gdpo_tune.export {source} --to mergekit\n"
            f"    python -m gdpo_tune.train --from {source}\n"
        )
    peft = " and has the package peft" if spec.model.lora_rank else ""
    loading = (
        f"Load it on a machine that sees this directory{peft}:\n\n"
        f'    transformers.pipeline("text-generation", model="{policy}")\n\n'
    )
    if is_url(policy):
        loading = "Download it, then give its directory to `transformers.pipeline`.\n\n"
    files: dict[str, str | Path] = {
        f"{POLICY}/README.md": (
            f"The policy of {title_candidate(member.name)} of sweep {spec.name}: "
            f"`{policy or 'its checkpoint was not kept, or is private'}`\n\n"
            f"{loading if policy else ''}{again}"
        )
    }
    if policy and not is_url(policy):
        flavor = {
            "task": "text-generation",
            "instance_type": "TextGenerationPipeline",
            "pipeline_model_type": "AutoModelForCausalLM",
            "source_model_name": policy,
            "source_model_revision": "main",
            "components": ["tokenizer"],
            "tokenizer_type": "AutoTokenizer",
            "tokenizer_name": policy,
            "tokenizer_revision": "main",
        }
        model = json.dumps({"flavors": {"transformers": flavor}}, indent=2)
        files[f"{POLICY}/MLmodel"] = model
    return files


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
        tags[run_content.clean_name(goal.name)] = f"{estimate.mean:.6g}"
        tags[run_content.clean_name(f"{goal.name}_se")] = f"{estimate.se:.6g}"
        if front.extremes[goal.name] is member:
            aliases.append(re.sub(r"[^\w-]", "_", f"{goal.direction[:3]}_{goal.name}"))
    return {"trial": str(member.first), "tags": tags, "aliases": aliases}


def register_versions(
    client: MlflowClient, name: str, contents: Iterable[Mapping[str, Any]], runs: Mapping[str, str]
) -> None:
    """Make the registry hold these versions and no others of this sweep.

    `runs` is `SWEEP` or a trial's number -> id of its run.
    """
    parent = runs[run_content.SWEEP]
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name, description="Front of a gdpo_tune sweep.")
    versions = {
        str(version.run_id): version
        for version in client.search_model_versions(f"name = '{name}'")
        if version.tags.get(OWNER) == parent
    }
    aliases: dict[str, str] = {}
    for content in contents:
        run_id = runs.get(content["trial"])
        if run_id is None:
            continue  # the server refused the trial's run, which is reported elsewhere
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
