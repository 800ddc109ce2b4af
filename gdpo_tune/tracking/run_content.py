"""The content of the MLflow runs of a sweep: pure functions from the spec and records to messages.

Times are part of a message, so sending it twice stores the same points. Texts of the sweep's own
tags and of the experiment's tags may hold placeholders for ids, see `views.fill_placeholders`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.text import get_mode
from gdpo_tune.core.trial_files import is_kept
from gdpo_tune.core.trials import Measurement, State, TrialRecord, format_parts
from gdpo_tune.spec.model import list_decisive_values
from gdpo_tune.tracking.spool import Message, Point

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

SWEEP = "sweep"
"""`Message.run` of the sweep's own run."""
RUN_NAME = "mlflow.runName"
"""Tag that holds a run's name, which changes with it."""
LONGEST_TEXT = 5000
"""Characters of a tag or parameter; MLflow refuses more than 6000 and 8000."""
DIGEST_LENGTH = 12
STATUS: Mapping[State, str] = {
    "running": "RUNNING",
    "paused": "SCHEDULED",
    "complete": "FINISHED",
    "pruned": "KILLED",
    "failed": "FAILED",
}


@dataclass(frozen=True)
class SweepIdentity:
    """Marks by which the runs of a sweep are found."""

    name: str
    identity: str
    """Hash of what makes the sweep this one, from the spec."""
    experiment: str
    sweep_id: str
    """Unique for each ledger, so that a fresh start under the same name has its own runs."""
    adopt: bool
    """True if an earlier run of this name and identity is this sweep, because its spool is lost."""


def convert_to_milliseconds(seconds: float) -> int:
    """Return Unix seconds as MLflow counts them."""
    return int(seconds * 1000)


@cache
def clean_name(name: str) -> str:
    """Replace the characters that MLflow does not allow in names of metrics and parameters."""
    return re.sub(r"[^\w/.\- :]", "_", name)


def build_sweep_message(identity: SweepIdentity, spec: SweepSpec, view: str) -> Message:
    """Return the first content of the sweep's run; `view` is the link to its view in MLflow."""
    owner = ""  # who started the sweep
    with suppress(KeyError, OSError):  # a user without a name, as in containers
        owner = "" if spec.tracking.private else spec.directory.owner()
    tags = {
        "sweep": identity.name,
        "identity": identity.identity,
        "sweep_id": identity.sweep_id,
        "role": SWEEP,
        "task": spec.task,
        "policy": spec.policy,
        "pareto_view": view,
        "mlflow.user": owner,
        "mlflow.source.name": f"python -m gdpo_tune.sweep {spec.location}/spec.yaml",
        "mlflow.source.type": "LOCAL",
        # Unlike a parameter, a tag may change: `search` may grow when the sweep is resumed.
        **{f"search.{name}": format_setting(value) for name, value in spec.search},
    }
    return {
        "run": SWEEP,
        "name": identity.name,
        "tags": {key: text[:LONGEST_TEXT] for key, text in tags.items()},
        "params": _format_params(list_decisive_values(spec)),
        "inputs": build_inputs(spec),
    }


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
    for context, prompts in (
        ("training", training.train_prompts),
        ("validation", training.validation_prompts),
        ("testing", training.test_prompts),
    ):
        content = {
            "task": spec.task,
            **data.list_decisive(later=False),
            "context": context,
            "prompts": prompts,
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        inputs.append(
            {
                "name": data.source or spec.task,
                "digest": digest[:DIGEST_LENGTH],
                "source_type": kind,
                "source": json.dumps(source),
                "profile": json.dumps({"num_rows": prompts}),
                "context": context,
            }
        )
    return inputs


def build_trial_message(record: TrialRecord, sweep: str, inputs: list[dict[str, str]]) -> Message:
    """Return the content of a trial's run, except its rank, its colour and the mark of the knee."""
    message: Message = {
        "run": str(record.number),
        "name": build_run_name(record),
        "inputs": inputs,
        "tags": build_trial_tags(record, sweep),
        "params": build_trial_params(record),
        "status": STATUS[record.state],
    }
    if record.started:
        message["start"] = convert_to_milliseconds(record.started)
    if record.finished:
        message["end"] = convert_to_milliseconds(record.finished)
    values = build_trial_values(record)
    message["metrics"] = [[name, value, message.get("end"), 0] for name, value in values.items()]
    return message


def build_run_name(record: TrialRecord) -> str:
    """Return the name of a trial's run, which MLflow's legends show: `trial-007 gdpo`, `merge-27`.

    A name and the mode of its training, as MLflow cannot show the mode of a point otherwise.
    """
    if not record.name.isdecimal():
        return record.name
    mode = get_mode(record.params) if record.is_training else record.role
    return " ".join(filter(None, [f"trial-{record.number:03d}", mode]))


def build_trial_tags(record: TrialRecord, sweep: str) -> dict[str, str]:
    """Return the tags of a trial's run; an empty text removes one, such as a deleted checkpoint."""
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
        "comparable": str(record.is_comparable).lower() if record.content else "",
        "directory": record.address or str(record.directory or ""),
        "checkpoint": record.policy,
        **{f"environment.{key}": value for key, value in record.environment.items()},
    }
    return {clean_name(key): text[:LONGEST_TEXT] for key, text in tags.items()}


def build_trial_params(record: TrialRecord) -> dict[str, str]:
    """Return the parameters of a trial's run: searched and fixed ones, dotted, and the seed.

    A trial that trains nothing has none: the untrained policy, a checkpoint and a merge.
    """
    return _format_params({**record.params, "seed": record.seed} if record.is_training else {})


def _format_params(params: Mapping[str, Any]) -> dict[str, str]:
    return {clean_name(k): format_setting(value)[:LONGEST_TEXT] for k, value in params.items()}


def format_setting(value: Any) -> str:
    """Return a setting as text: a model or a collection as JSON, all else as Python writes it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)


def build_trial_values(record: TrialRecord) -> dict[str, float]:
    """Return the metrics of a trial that have one value: test metrics, standard errors, and cost.

    The values of `validation/<name>` are a curve. Values that are not finite are left out: MLflow
    stores inf as the largest float.
    """
    values = {f"test/{name}": estimate.mean for name, estimate in record.test.items()}
    for split, estimates in (("test", record.test), ("validation", record.validation)):
        values |= {f"{split}/{name}_se": estimate.se for name, estimate in estimates.items()}
    if not record.is_open:
        values |= {f"cost/{name}": float(spent) for name, spent in asdict(record.cost).items()}
    return _clean_values(values)


def build_curve_points(
    measurements: Iterable[tuple[Measurement, int]],
    training: TrainingSettings,
    steps: Mapping[str, int],
) -> list[Point]:
    """Return the points of step metrics beyond the highest `steps` so far; times are in ms."""
    return [
        [name, value, when, measurement.step]
        for measurement, when in measurements
        for name, value in select_curve_values(measurement, training).items()
        if measurement.step > steps.get(name, -1)
    ]


def select_curve_values(measurement: Measurement, training: TrainingSettings) -> dict[str, float]:
    """Return the step metrics of a measurement that get a point, by the rule of `steps.is_kept`.

    The rule depends on the settings alone, so a trial that resumes keeps the same steps.
    """
    step, last = measurement.step, training.steps
    kept = ("train/",) if is_kept(step, last) else ()
    evaluation = -(-step // training.evaluate_every)
    if is_kept(evaluation, -(-last // training.evaluate_every)):
        kept = (*kept, "validation/")
    return _clean_values({k: v for k, v in measurement.metrics.items() if k.startswith(kept)})


def _clean_values(values: Mapping[str, float]) -> dict[str, float]:
    return {clean_name(k): float(v) for k, v in values.items() if math.isfinite(v)}
