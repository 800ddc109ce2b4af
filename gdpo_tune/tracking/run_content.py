"""Content of a sweep's runs in MLflow: pure functions of the spec and the records.

A point of a curve has the time that its measurement has in the trial's own file, so sending it
twice stores it once.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.text import get_mode
from gdpo_tune.core.trial_files import is_kept
from gdpo_tune.core.trials import Measurement, State, TrialRecord, format_parts
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import list_decisive_values

SWEEP = "sweep"
"""Key and role of the sweep's own run; the key of a trial's run is its number."""
RUN_NAME = "mlflow.runName"
"""Tag that holds a run's name, which changes with it."""
KNEE = ", knee"
"""End of the name of a run of the knee."""
PARENT = "mlflow.parentRunId"
NOTE = "mlflow.note.content"
MAX_TEXT = 5000
"""Characters of a tag or parameter; MLflow refuses more than 6000 and 8000."""
STATUS: Mapping[State, str] = {
    "running": "RUNNING",
    "paused": "SCHEDULED",
    "complete": "FINISHED",
    "pruned": "KILLED",
    "failed": "FAILED",
}
Point = tuple[str, float, int, int]
"""Name, value, time and step of a metric."""


@dataclass
class RunContent:
    """What a run should show. Times are milliseconds since 1970."""

    name: str = ""
    start: int | None = None
    tags: dict[str, str] = field(default_factory=dict[str, str])
    """An empty text removes a tag."""
    params: dict[str, str] = field(default_factory=dict[str, str])
    values: dict[str, tuple[float, int]] = field(default_factory=dict[str, tuple[float, int]])
    """Metric that has one value -> value and time."""
    curves: list[Point] = field(default_factory=list[Point])
    inputs: Sequence[Mapping[str, str]] = ()
    files: dict[str, str | Path] = field(default_factory=dict[str, str | Path])
    """Path among its artifacts -> text, or the file to send."""
    status: str = ""
    """MLflow's word; empty if it is to stay as it is."""
    end: int | None = None

    def add(self, other: RunContent) -> None:
        """Add the tags, values, curves and files of `other`."""
        self.tags |= other.tags
        self.values |= other.values
        self.curves += other.curves
        self.files |= other.files


def to_milliseconds(seconds: float) -> int:
    """Return Unix seconds as MLflow counts them."""
    return int(seconds * 1000)


@cache
def clean_name(name: str) -> str:
    """Replace the characters that MLflow does not allow in names of metrics and parameters."""
    return re.sub(r"[^\w/.\- :]", "_", name)


def build_sweep_content(
    spec: SweepSpec, view: str, inputs: Sequence[Mapping[str, str]]
) -> RunContent:
    """Return what the sweep's run shows from the start.

    `view` is the link to its view, `inputs` those of `build_inputs`.
    """
    owner = ""  # who started the sweep
    with suppress(KeyError, OSError):  # a user without a name, as in containers
        owner = "" if spec.tracking.private else spec.directory.owner()
    tags = {
        "task": spec.task,
        "policy": spec.policy,
        "pareto_view": view,
        "mlflow.user": owner,
        "mlflow.source.name": f"python -m gdpo_tune.sweep {spec.location}/{SPEC}",
        "mlflow.source.type": "LOCAL",
        # Unlike a parameter, a tag may change: `search` may grow when the sweep is resumed.
        **{f"search.{name}": format_setting(value) for name, value in spec.search},
    }
    return RunContent(
        name=spec.name,
        tags={key: text[:MAX_TEXT] for key, text in tags.items()},
        params=format_params(list_decisive_values(spec)),
        inputs=inputs,
    )


def build_inputs(spec: SweepSpec) -> list[dict[str, str]]:
    """Return the three splits as MLflow's data sets.

    Equal digests mean equal prompts as far as the spec tells: a local source that changes under its
    name keeps its digest.
    """
    training, data = spec.training, spec.data
    if not data.source:
        kind, source = "code", {"task": spec.task}  # the task writes its own prompts
    elif data.is_local:
        kind, source = "local", {"uri": data.source}
    else:
        kind = "hf"
        source = {"path": data.source, "config_name": data.config, "split": data.split}
    inputs: list[dict[str, str]] = []
    sizes = (training.train_prompts, training.validation_prompts, training.test_prompts)
    for context, prompts in zip(("training", "validation", "testing"), sizes, strict=True):
        content = {"task": spec.task, **data.list_decisive()}
        content |= {"context": context, "prompts": prompts}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        inputs.append(
            {
                "name": data.source or spec.task,
                "digest": digest[:12],
                "source_type": kind,
                "source": json.dumps(source),
                "profile": json.dumps({"num_rows": prompts}),
                "context": context,
            }
        )
    return inputs


def build_trial_content(
    record: TrialRecord, sweep: str, inputs: Sequence[Mapping[str, str]] = ()
) -> RunContent:
    """Return what a trial's run shows, except for its curves and for what the front says of it.

    Trials without a training of the space (untrained, start, checkpoint, merge) have no parameters.
    """
    end = to_milliseconds(record.finished) if record.finished else None
    tags = {
        "sweep": sweep,
        "trial": str(record.number),
        "candidate": record.name,
        "parts": format_parts(record.parts) if record.parts else "",
        "role": record.role,
        "state": record.state,
        "proposer": record.proposer,
        "normalization": str(record.trained_params.get("normalization", "")),
        "replicate_of": "" if record.replicate_of is None else str(record.replicate_of),
        "feasible": "" if record.feasible is None else str(record.feasible).lower(),
        "reason": record.reason,
        "content": record.content,
        "directory": record.address or str(record.directory or ""),
        "checkpoint": record.policy,
        **{f"environment.{key}": value for key, value in record.environment.items()},
    }
    # The mean on validation prompts is a curve; what else has one value is here.
    values = {f"test/{name}": estimate.mean for name, estimate in record.test.items()}
    for split, estimates in (("test", record.test), ("validation", record.validation)):
        values |= {f"{split}/{name}_se": estimate.se for name, estimate in estimates.items()}
    if not record.is_open:
        values |= {f"cost/{name}": float(spent) for name, spent in asdict(record.cost).items()}
    params = {**record.params, "seed": record.seed} if record.is_training else {}
    when = end or to_milliseconds(record.started or 0.0)
    return RunContent(
        name=build_run_name(record),
        start=to_milliseconds(record.started) if record.started else None,
        tags={clean_name(key): text[:MAX_TEXT] for key, text in tags.items()},
        params=format_params(params),
        values={name: (value, when) for name, value in keep_finite(values).items()},
        inputs=inputs,
        status=STATUS[record.state],
        end=end,
    )


def build_run_name(record: TrialRecord) -> str:
    """Return the name of a trial's run, which MLflow's legends show: `trial-007 gdpo`, `merge-27`.

    A name and the mode of its training, as MLflow cannot show the mode of a point otherwise.
    """
    if not record.name.isdecimal():
        return record.name
    mode = get_mode(record.params) if record.is_training else record.role
    return " ".join(filter(None, [f"trial-{record.number:03d}", mode]))


def format_params(params: Mapping[str, Any]) -> dict[str, str]:
    """Return parameters by the names and with the texts that MLflow takes."""
    return {clean_name(k): format_setting(value)[:MAX_TEXT] for k, value in params.items()}


def format_setting(value: Any) -> str:
    """Return a setting as text: a model or a collection as JSON, all else as Python writes it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)


def select_curve_values(measurement: Measurement, training: TrainingSettings) -> dict[str, float]:
    """Return the step metrics of a measurement that get a point.

    The rule of `trial_files.is_kept` depends on the settings alone, so a trial that resumes keeps
    the same steps.
    """
    step, last = measurement.step, training.steps
    kept = ("train/",) if is_kept(step, last) else ()
    evaluation = -(-step // training.evaluate_every)
    if is_kept(evaluation, -(-last // training.evaluate_every)):
        kept = (*kept, "validation/")
    return keep_finite({k: v for k, v in measurement.metrics.items() if k.startswith(kept)})


def keep_finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the finite values, under names that MLflow allows: it stores inf as a number."""
    return {clean_name(k): float(v) for k, v in values.items() if math.isfinite(v)}
