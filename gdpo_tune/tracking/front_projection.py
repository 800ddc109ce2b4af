"""The front in MLflow: ranks, tags, hypervolume, a table, a note, and versions in the registry.

A version in the model registry names the run of a configuration's first trial. Its policy stays in
the directory that the version's tag `checkpoint` names: policies may be large, and the registry is
often on another machine.
"""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.analysis.origins import summarize_origins
from gdpo_tune.core.candidates import format_parts, title_candidate
from gdpo_tune.core.formatting import (
    CANDIDATE_COLORS,
    INK,
    MODE_COLORS,
    OTHER_COLOR,
    get_mode,
)
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.results.summary import describe_origins
from gdpo_tune.tracking import views
from gdpo_tune.tracking.run_content import SWEEP, clean_name, convert_to_milliseconds
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
POLICY = "policy"
"""Directory among a run's artifacts; the source of a version."""
OWNER = "sweep_run"
"""Tag of a version: id of the sweep's run. Versions of other sweeps under the name stay."""


@dataclass(frozen=True)
class FrontProjection:
    """The front as content of runs."""

    trials: dict[int, Message]
    """Trial number -> tag `pareto`, its colour and, if it is ranked, `pareto/rank` (0 = front)."""
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
    finished = {record.number: record.finished or 0.0 for record in front.records}
    size = [["pareto/size", len(front.members), None, 0]] if front.configurations else []
    hypervolume = [
        ["hypervolume", point.hypervolume, convert_to_milliseconds(finished[point.number]), step]
        for step, point in enumerate(front.hypervolume_over_trials)
    ]
    note = {"mlflow.note.content": _format_note(spec, front)}
    table = {"name": "front.csv", "text": _format_table(front)}
    return FrontProjection(
        trials={r.number: _build_trial_message(r, ranks.get(r.number, -1)) for r in front.records},
        sweep=[
            {"run": SWEEP, "metrics": hypervolume},
            {"run": SWEEP, "tags": note, "metrics": [*size, *_list_origin_metrics(front)]},
            {"run": SWEEP, "artifact": table},
        ],
        final=_build_final_messages(spec, front),
    )


def _list_origin_metrics(front: Front) -> list[Point]:
    """Return the share and the cost of each kind of candidates, if there are several kinds."""
    points: list[Point] = []
    for origin in summarize_origins(front):
        values = {"share": origin.share, "members": float(origin.members)}
        values |= {name: float(spent) for name, spent in asdict(origin.cost).items()}
        points += [[f"origin/{origin.kind}/{n}", value, None, 0] for n, value in values.items()]
    return points


def _build_trial_message(record: TrialRecord, rank: int) -> Message:
    color = choose_color(record, on_front=rank == 0)
    return {
        "run": str(record.number),
        "tags": {"pareto": str(rank == 0).lower(), "mlflow.runColor": color},
        "metrics": [["pareto/rank", float(rank), None, 0]] if rank >= 0 else [],
    }


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


def _format_table(front: Front) -> str:
    """Return the front as CSV, one row per configuration, best in the first objective first."""
    goals = front.objectives
    measured = [f"{goal.name}{suffix}" for goal in goals for suffix in ("", "_se")]
    params = sorted({name for member in front.members for name in member.params})
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["trial", "name", *measured, "seeds", "probability", "role", "parts", *params])
    for member in front.members:
        estimates = [member.mean[goal.name] for goal in goals]
        numbers = [f"{x:.4f}" for estimate in estimates for x in (estimate.mean, estimate.se)]
        parts = format_parts(member.parts) if member.parts else ""
        about = [member.seeds, f"{member.probability:.3f}", member.role, parts]
        settings = [member.params.get(name, "") for name in params]
        writer.writerow([member.first, member.name, *numbers, *about, *settings])
    return file.getvalue()


def _format_note(spec: SweepSpec, front: Front) -> str:
    """Return the description of the sweep's run, in Markdown."""
    goals = ", ".join(f"{goal.direction} `{goal.name}`" for goal in front.objectives)
    states = [record.state for record in front.records]
    bounds = front.hypervolume_interval
    interval = f" (95 %: {bounds.low:.4f} to {bounds.high:.4f})" if front.members else ""
    origins = "".join(f"- {line}\n" for line in describe_origins(front))
    origins += "\n" if origins else ""
    return (
        f"{views.format_links()}. These pages load {views.LOADED} trials, the front first; "
        "`report.html` among this run's artifacts shows all.\n\n"
        f"Sweep **{spec.name}**: task `{spec.task}`, policy `{spec.policy}`; {goals}.\n\n"
        f"{states.count('complete')} trials complete, {states.count('failed')} failed; "
        f"{len(front.members)} configurations on the front, "
        f"hypervolume {front.hypervolume:.4f}{interval}.\n\n{origins}"
        "The trials are the children of this run: filter by `tags.pareto = 'true'`, sort by "
        "`metrics.pareto/rank`. Artifacts: `report.html`, `front.png`, `front.csv`, `spec.yaml`.\n"
    )


def _build_final_messages(spec: SweepSpec, front: Front) -> list[Message]:
    """Return the versions of the registry, and for each its file that says where its policy is."""
    policies = {record.number: record.policy for record in front.records}
    messages: list[Message] = []
    versions: list[dict[str, Any]] = []
    for member in front.members:
        trial, policy = member.first, policies[member.first]
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
            f"`{policy or 'its checkpoint was not kept'}`\n\n{again}"
        )
        artifact = {"name": f"{POLICY}/README.md", "text": text}
        messages.append({"run": str(trial), "artifact": artifact})
        versions.append(_build_version(front, member, policy))
    return [*messages, {"run": SWEEP, "models": {"name": spec.name, "versions": versions}}]


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
