"""What MLflow shows of a sweep: pure functions from records to the content of runs.

A message concerns one run and holds any of

    run        `sweep`, or a trial's number as text
    name, start                  only in a run's first message; start in ms since 1970
    tags, params                 name -> text
    metrics                      [name, value, time in ms, step], finite values only
    status, end                  MLflow's word for the state; end in ms, absent while it runs
    inputs                       data sets that a run uses, see `datasets`; only in its firstmessage
    experiment                   name -> text: tags of the experiment; in messages of the sweep
    artifact                     {name, text}, or {file, sha256} of a file that is read when it is
                                 sent; such a message holds nothing else
    models                       {name, versions} of the registry, see `registry`; such a message
                                 holds nothing else
    renew                        true where a run's first message replaces an earlier run, since
                                 the ledger lost that trial in a crash and gave its number again

Times lie in the message, so that sending it twice stores the same points. Texts of the sweep's own
tags and of the experiment's may hold words that stand for ids: see `views.resolved`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdpo_tune.core.trials import Estimate, Objective, State, TrialRecord
from gdpo_tune.tracking.datasets import Input
from gdpo_tune.tracking.spool import Message

SWEEP = "sweep"
CURVES = ("train/", "validation/")
LONGEST_TEXT = 5000
"""Characters of a tag or parameter; MLflow refuses more than 6000 and 8000."""
STATUS: Mapping[State, str] = {
    "running": "RUNNING",
    "paused": "SCHEDULED",
    "complete": "FINISHED",
    "pruned": "KILLED",
    "failed": "FAILED",
}


@dataclass(frozen=True)
class Identity:
    """Which runs are this sweep's."""

    name: str
    identity: str
    """Hash of what makes the sweep this one, from the spec."""
    experiment: str
    sweep_id: str
    """Given once to each ledger, so that a fresh start under the same name has runs of its own."""
    adopt: bool
    """Whether an earlier run of the same name and identity is this one, its spool being lost."""


@dataclass(frozen=True)
class Content:
    """What a run ought to hold, as far as an event says."""

    name: str = ""
    start: int | None = None
    """Milliseconds since 1970, as every time here."""
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Single-valued metrics."""
    inputs: Sequence[Input] = ()
    experiment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tags of the experiment."""
    time: int | None = None
    """When the values were measured; None for now."""
    status: str = ""
    end: int | None = None


@dataclass
class Known:
    """What was said about one run so far: only what differs is said again."""

    tags: dict[str, str] = field(default_factory=dict[str, str])
    params: dict[str, str] = field(default_factory=dict[str, str])
    values: dict[str, float] = field(default_factory=dict[str, float])
    """Latest value of every metric."""
    steps: dict[str, int] = field(default_factory=dict[str, int])
    """Highest step of every metric."""
    status: str = ""
    start: int | None = None
    experiment: dict[str, str] = field(default_factory=dict[str, str])
    models: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the registry was last told."""
    texts: dict[str, str] = field(default_factory=dict[str, str])
    """Artifacts given as text, by name."""
    files: dict[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of artifacts given as files, by path."""

    def learn(self, message: Message) -> None:
        """Take in what `message` says."""
        self.tags |= message.get("tags", {})
        self.params |= message.get("params", {})
        self.status = message.get("status", self.status)
        self.start = message.get("start", self.start)
        self.experiment |= message.get("experiment", {})
        self.models = message.get("models", self.models)
        for name, value, _, step in message.get("metrics", ()):
            self.values[name] = value
            self.steps[name] = max(step, self.steps.get(name, step))
        artifact = message.get("artifact", {})
        if "text" in artifact:
            self.texts[artifact["name"]] = artifact["text"]
        if "sha256" in artifact:
            self.files[artifact["file"]] = artifact["sha256"]

    def lacks(self, content: Content, now: int) -> Message:
        """The part of `content` that was not said yet, without `run`; empty if all of it was.

        Args:
            content: what the run ought to hold.
            now: milliseconds since 1970, later than any value said before.
        """
        message: Message = {}
        if self.is_empty():
            message |= {"name": content.name, "start": content.start or now}
            if content.inputs:
                message["inputs"] = list(content.inputs)
        if tags := {k: v for k, v in content.tags.items() if self.tags.get(k, "") != v}:
            message["tags"] = tags
        if params := {k: v for k, v in content.params.items() if k not in self.params}:
            message["params"] = params
        if values := {k: v for k, v in content.values.items() if self.values.get(k) != v}:
            message["metrics"] = [[k, v, content.time or now, 0] for k, v in values.items()]
        told = self.experiment
        if tags := {k: v for k, v in content.experiment.items() if told.get(k) != v}:
            message["experiment"] = tags
        if content.status not in ("", self.status):
            message["status"] = content.status
            if content.end is not None:
                message["end"] = content.end
        return message

    def is_empty(self) -> bool:
        """Whether the run does not exist yet as far as anybody was told."""
        return not self.tags

    def curve_step(self) -> int:
        """Highest step of any step metric; -1 before the first."""
        curves = (step for name, step in self.steps.items() if name.startswith(CURVES))
        return max(curves, default=-1)


def is_apart(message: Message) -> bool:
    """Whether a message is about what no run waits for: a file, or the registry."""
    return "artifact" in message or "models" in message


def milliseconds(seconds: float) -> int:
    """Unix seconds as MLflow counts."""
    return int(seconds * 1000)


def clean_name(name: str) -> str:
    """`name` with what MLflow does not allow in names of metrics and parameters replaced."""
    return re.sub(r"[^\w/.\- :]", "_", name)


def trial_content(
    record: TrialRecord, sweep: str, objectives: Sequence[Objective], inputs: Sequence[Input] = ()
) -> Content:
    """What the run of a trial ought to hold, its place in the front aside."""
    end = milliseconds(record.finished) if record.finished else None
    return Content(
        name=f"trial-{record.number:03d}",
        start=milliseconds(record.started) if record.started else None,
        tags=trial_tags(record, sweep),
        params=trial_params(record),
        values=trial_values(record, objectives),
        time=end,
        status=STATUS[record.state],
        end=end,
        inputs=inputs,
    )


def trial_tags(record: TrialRecord, sweep: str) -> dict[str, str]:
    """Tags of a trial's run; `pareto` comes with the front.

    An empty text means that there is nothing to tell, or no longer: a checkpoint may be deleted.
    """
    tags = {
        "sweep": sweep,
        "trial": str(record.number),
        "role": record.role,
        "state": record.state,
        "proposer": record.proposer,
        "normalization": str(record.params.get("normalization", "")),
        "replicate_of": "" if record.replicate_of is None else str(record.replicate_of),
        "feasible": "" if record.feasible is None else str(record.feasible).lower(),
        "reason": record.reason,
        "directory": record.address or str(record.directory or ""),
        "checkpoint": record.policy,
        **{f"environment.{key}": value for key, value in record.environment.items()},
    }
    return {clean_name(key): text[:LONGEST_TEXT] for key, text in tags.items()}


def trial_params(record: TrialRecord) -> dict[str, str]:
    """Parameters of a trial's run: the searched and fixed ones, dotted, and the seed."""
    params = {**record.params, "seed": record.seed}
    return {clean_name(key): str(value)[:LONGEST_TEXT] for key, value in params.items()}


def trial_values(record: TrialRecord, objectives: Sequence[Objective]) -> dict[str, float]:
    """Single-valued metrics of a trial: objectives and other held-out metrics with se, and cost.

    `objective/<name>` is measured on test prompts, `objective/<name>_validation` on those that
    the search saw; `test/<name>` are metrics that are not objectives. What is not finite is left
    out: MLflow stores inf as the largest float.
    """
    names = {objective.name for objective in objectives}
    values: dict[str, float] = {}
    for name, estimate in record.test.items():
        values |= _with_error(f"objective/{name}" if name in names else f"test/{name}", estimate)
    for name, estimate in record.validation.items():
        if name in names:
            values |= _with_error(f"objective/{name}_validation", estimate)
    if record.state in ("complete", "pruned", "failed"):
        values["cost/completions"] = record.cost.completions
        values["cost/seconds"] = record.cost.seconds
        values["cost/cpu_seconds"] = record.cost.cpu_seconds
    return finite(values)


def _with_error(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.mean, f"{name}_se": estimate.se}


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """The values that are numbers, under names that MLflow takes."""
    return {clean_name(k): float(v) for k, v in values.items() if math.isfinite(v)}


def is_ours(known: Mapping[str, Known], records: Sequence[TrialRecord]) -> bool:
    """Whether what was said before is about this ledger and not about one that it replaced."""
    if "0" not in known:
        return True
    return bool(records) and known["0"].params == trial_params(records[0])
