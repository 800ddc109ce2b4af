"""The front in MLflow: ranks, tags, hypervolume, a table, a note, and versions in the registry.

A version names the run of a configuration's first trial. Its policy stays in the directory that the
version's tag `checkpoint` names, because policies may be large. The version holds a file of a few
hundred bytes, with which `mlflow.transformers.load_model` loads the policy from there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.analysis.origins import summarize_origins
from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.text import CANDIDATE_COLORS, INK, MODE_COLORS, OTHER_COLOR, get_mode
from gdpo_tune.core.trials import TrialRecord, format_parts, title_candidate
from gdpo_tune.results.front_csv import format_front_csv
from gdpo_tune.results.front_figures import build_figures, describe_front
from gdpo_tune.results.summary import TABLE_FILE, describe_origins
from gdpo_tune.tracking import views
from gdpo_tune.tracking.run_content import (
    RUN_NAME,
    SWEEP,
    build_run_name,
    clean_name,
    convert_to_milliseconds,
)
from gdpo_tune.tracking.spool import Message, Point

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from gdpo_tune.analysis.replicates import Configuration
    from gdpo_tune.spec import SweepSpec

LEAST_SECONDS = 2.0
"""Least time between two computations of the front."""
TIME_SHARE = 0.01
"""Largest share of the time for them, so that the driver rarely waits for Python's lock."""
PALE = 0.35
"""Share of its mode's colour that a trial beside the front has; the rest is white."""
BEHIND = 1000
"""`pareto/order` of a trial behind the front, times its rank."""

POLICY = "policy"
"""Directory among a run's artifacts; the source of a version."""
OWNER = "sweep_run"
"""Tag of a version: id of the sweep's run. Versions of other sweeps under the name stay."""


@dataclass(frozen=True)
class FrontProjection:
    """The front as content of runs."""

    trials: dict[int, Message]
    """Trial number -> tag `pareto`, name, colour and, if it is ranked, its rank and its place."""
    sweep: list[Message]
    final: list[Message]
    """Content for the end of the sweep: versions in the registry, and where their policies are."""


class FrontWatch:
    """Computes the front in a thread of its own. Its methods are called from the driver."""

    def __init__(self, spec: SweepSpec) -> None:
        self.is_stale = False
        """Set it to True once trials have ended."""
        self._spec = spec
        self._worker = ThreadPoolExecutor(1, "front")
        self._job: Future[FrontProjection] | None = None
        self._trials: dict[int, Message] = {}
        self._due = 0.0

    def poll(
        self, records: Mapping[int, TrialRecord], *, wait: bool = False
    ) -> Iterator[FrontProjection]:
        """Yield new fronts, each with those `trials` that changed; start a computation when due.

        `wait` computes the front of exactly these `records` before returning.
        """
        yield from self._collect_result(wait=wait)
        if self.is_stale and (wait or (self._job is None and time.monotonic() >= self._due)):
            ordered = [records[number] for number in sorted(records)]
            self._job = self._worker.submit(self._project_changes, ordered)
            self.is_stale = False
            yield from self._collect_result(wait=wait)

    def _collect_result(self, *, wait: bool) -> Iterator[FrontProjection]:
        if self._job is not None and (wait or self._job.done()):
            job, self._job = self._job, None
            yield job.result()

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()

    def _project_changes(self, records: Sequence[TrialRecord]) -> FrontProjection:
        """Project the front in the worker, which saves the driver milliseconds of comparisons."""
        started = time.monotonic()
        front = project_front(self._spec, records)
        changed = {n: trial for n, trial in front.trials.items() if self._trials.get(n) != trial}
        self._trials = front.trials
        self._due = started + max(LEAST_SECONDS, (time.monotonic() - started) / TIME_SHARE)
        return replace(front, trials=changed)


def project_front(spec: SweepSpec, records: Sequence[TrialRecord]) -> FrontProjection:
    """Return the front of `records` as content of runs: every trial so far, by number."""
    front = build_front(records, spec.list_objectives())
    ranks = {number: c.rank for c in front.configurations for number in c.numbers}
    places = list_places(front)
    knee = front.knee.numbers if front.knee else ()
    finished = {record.number: record.finished or 0.0 for record in front.records}
    size = [["pareto/size", len(front.members), None, 0]] if front.configurations else []
    hypervolume = [
        ["hypervolume", point.hypervolume, convert_to_milliseconds(finished[point.number]), step]
        for step, point in enumerate(front.hypervolume_over_trials)
    ]
    note = {"mlflow.note.content": _format_note(spec, front)}
    table = {"name": TABLE_FILE, "text": format_front_csv(front)}
    return FrontProjection(
        trials={
            r.number: _build_trial_message(
                r, ranks.get(r.number, -1), places.get(r.number), is_knee=r.number in knee
            )
            for r in front.records
        },
        sweep=[
            {"run": SWEEP, "metrics": hypervolume},
            {"run": SWEEP, "tags": note, "metrics": [*size, *_list_origin_metrics(front)]},
            {"run": SWEEP, "artifact": table},
        ],
        final=build_final_messages(spec, front),
    )


def _list_origin_metrics(front: Front) -> list[Point]:
    points: list[Point] = []
    for origin in summarize_origins(front):
        values = {"share": origin.share, "members": float(origin.members)}
        values |= {name: float(spent) for name, spent in asdict(origin.cost).items()}
        points += [[f"origin/{origin.kind}/{n}", value, None, 0] for n, value in values.items()]
    return points


def list_places(front: Front) -> dict[int, int]:
    """Return trial number -> place in a list: the knee 1, then the front, best first.

    Trials behind the front share the place `BEHIND` times their rank. Places of their own would
    change with every trial that ends, and each change is a request to MLflow.
    """
    members = sorted(front.members, key=lambda member: member is not front.knee)
    numbers = [number for member in members for number in member.numbers]
    places = {number: place for place, number in enumerate(numbers, start=1)}
    behind = [c for c in front.configurations if c.rank > 0]
    return places | {number: BEHIND * c.rank for c in behind for number in c.numbers}


def _build_trial_message(
    record: TrialRecord, rank: int, place: int | None, *, is_knee: bool
) -> Message:
    tags = {
        "pareto": str(rank == 0).lower(),
        "mlflow.runColor": choose_color(record, on_front=rank == 0),
        RUN_NAME: f"{build_run_name(record)}{', knee' if is_knee else ''}",
    }
    values = {"pareto/rank": rank, "pareto/order": place} if rank >= 0 else {}
    metrics = [[name, float(value), None, 0] for name, value in values.items() if value is not None]
    return {"run": str(record.number), "tags": tags, "metrics": metrics}


def choose_color(record: TrialRecord, *, on_front: bool) -> str:
    """Return the colour of a trial in MLflow's charts, `#rrggbb`: its mark's, or a pale one."""
    if record.role == "untrained":
        return INK
    color = CANDIDATE_COLORS.get(record.role) or (
        MODE_COLORS.get(get_mode(record.params), OTHER_COLOR) if record.params else OTHER_COLOR
    )
    if on_front:
        return color
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(PALE * c + (1 - PALE) * 255):02x}" for c in channels)


def _format_note(spec: SweepSpec, front: Front) -> str:
    goals = ", ".join(f"{goal.direction} `{goal.name}`" for goal in front.objectives)
    states = [record.state for record in front.records]
    origins = "".join(f"- {line}\n" for line in describe_origins(front))
    origins += "\n" if origins else ""
    report = "" if spec.tracking.private else "`report.html`, "  # it quotes reasons
    place = "among this run's artifacts" if report else "in the sweep's directory"
    return (
        f"{views.format_links()}. These pages load {views.LOADED} trials, the front first; "
        f"`report.html` {place} shows all.\n\n"
        f"Sweep **{spec.name}**: task `{spec.task}`, policy `{spec.policy}`; {goals}.\n\n"
        f"{states.count('complete')} trials complete, {states.count('failed')} failed; "
        f"{describe_front(build_figures(front))}.\n\n{origins}"
        "The trials are the children of this run: filter by `tags.pareto = 'true'`, sort by "
        f"`metrics.pareto/order`. Artifacts: {report}`front.png`, `front.csv`, `spec.yaml`.\n"
    )


def build_final_messages(spec: SweepSpec, front: Front) -> list[Message]:
    """Return the versions of the registry, and for each its file that says where its policy is."""
    records = {record.number: record for record in front.records}
    messages: list[Message] = []
    versions: list[dict[str, Any]] = []
    for member in front.members:
        trial, policy, loading = member.first, records[member.first].policy, ""
        if is_url(policy):
            loading = "Download it, then give its directory to `transformers.pipeline`.\n\n"
        elif policy:
            policy = str(Path(policy).absolute())
            loading = (
                "Load it on a machine that sees this directory:\n\n"
                f'    transformers.pipeline("text-generation", model="{policy}")\n\n'
            )
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
            f"`{policy or 'its checkpoint was not kept, or is private'}`\n\n{loading}{again}"
        )
        files = {"README.md": text}
        if policy and not is_url(policy):
            files["MLmodel"] = _format_model_file(policy)
        for name, content in files.items():
            artifact = {"name": f"{POLICY}/{name}", "text": content}
            messages.append({"run": str(trial), "artifact": artifact})
        versions.append(_build_version(front, member, policy))
    return [*messages, {"run": SWEEP, "models": {"name": spec.name, "versions": versions}}]


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
