"""Tables of a card: values on test prompts, members of the front, and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_tune.analysis.front import Front, trace_training
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.metrics import COST_METRICS, MetricInfo
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import (
    NO_VALUE,
    format_interval,
    format_number,
    format_parameter,
)
from gdpo_tune.publishing.publication import Publication, PublishedPolicy
from gdpo_tune.results.front_table import BASELINES, list_rows
from gdpo_tune.spec.text import show


def list_columns(front: Front, configuration: Configuration) -> list[str]:
    """Return the heads of the table of values: the policy, and the baselines beside it."""
    return ["this policy", *(BASELINES[b.role] for b in _list_baselines(front, configuration))]


def build_metric_rows(
    publication: Publication, configuration: Configuration
) -> list[tuple[str, list[str]]]:
    """Return each metric with its values of a policy and the baselines, objectives first."""
    objectives = list(publication.spec.objectives)
    names = [*objectives, *(name for name in configuration.mean if name not in objectives)]
    columns = [configuration, *_list_baselines(publication.front, configuration)]
    return [(n, [_format_value(publication, c, n) for c in columns]) for n in names]


def build_member_rows(
    publication: Publication, published: Sequence[str], own: str = ""
) -> tuple[list[list[str]], list[list[str]]]:
    """Return a row for each member of the front and each baseline: those that stand out, and all.

    `own` is the name of the policy of the card, in bold.
    """
    first: list[list[str]] = []
    rows: list[list[str]] = []
    for row in list_rows(publication.front):
        name, title = row.policy.name, row.title
        if name in published and publication.is_front:
            repository = publication.name_repository(name)
            title = f"[{title}](https://huggingface.co/{repository.path})"
        title = f"**{title}**" if name == own else title
        notes = [*row.labels, *row.shortfalls]
        notes += ["one seed"] * (row.policy.is_provisional and row.policy.role != "untrained")
        notes += ["published weights"] * (row.policy.role == "published")
        rows.append([title, *row.cells, ", ".join(notes)])
        if row.stands_out or name == own:
            first.append(rows[-1])
    return first, rows


def describe_training(publication: Publication, candidate: PublishedPolicy) -> dict[str, Any]:
    """Return how a policy was made: parameters and schedule, or the parts of a merge."""
    records, record = publication.sweep.records, candidate.record
    steps = publication.spec.training.steps
    if len(record.parts) > 1:
        parts = [
            {
                "weight": show(part.weight),
                "name": f"{part.trial}@{part.step}",
                "params": _format_params(publication, records[part.trial].params),
            }
            for part in record.parts
        ]
        return {"parts": parts, "names": list(parts[0]["params"])}
    number, step = record.number, steps
    if record.parts:
        number, step = record.parts[0].trial, record.parts[0].step
    training = trace_training(records, number, step if record.parts else float("inf"))
    return {
        "parts": [],
        "params": _format_params(publication, training.params),
        "seed": training.seed,
        "steps": step,
        "schedule": [
            (segment.step, _format_params(publication, {**training.params, **segment.params}))
            for segment in training.schedule
        ],
    }


def get_metric(publication: Publication, name: str) -> MetricInfo:
    """Return the description of a metric of the sweep's task."""
    spec = publication.sweep.spec  # a task in a file is there under its whole path alone
    return {**COST_METRICS, **load_task_info(spec.task, spec.space.domains).metrics}[name]


def _list_baselines(front: Front, configuration: Configuration) -> list[Configuration]:
    return [baseline for baseline in front.baselines if baseline is not configuration]


def _format_value(publication: Publication, configuration: Configuration, name: str) -> str:
    """Return a mean with its interval at 95 %, within the range of the metric."""
    value = configuration.mean.get(name)
    if value is None:
        return NO_VALUE
    metric = get_metric(publication, name)
    interval = format_interval(max(value.low, metric.low), min(value.high, metric.high))
    return f"{format_number(value.mean)} ({interval})"


def _format_params(publication: Publication, params: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that are in effect; weights as trained, the largest is 1."""
    spec = publication.spec
    active = spec.space.select_active(params)
    prefix = "reward_weights."
    largest = max((abs(v) for n, v in params.items() if n.startswith(prefix)), default=1) or 1
    return {
        name: format_parameter(value / largest if name.startswith(prefix) else value)
        for name, value in params.items()
        if name in active
    }
