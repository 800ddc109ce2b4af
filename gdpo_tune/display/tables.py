"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.candidates import format_parts
from gdpo_tune.core.formatting import (
    NO_VALUE,
    abbreviate_parameter,
    format_estimate,
    format_number,
    format_parameter,
    get_mode,
)
from gdpo_tune.display.progress import Running
from gdpo_tune.results.summary import describe_role

REMARKS = 22
"""Columns of the remarks, which may take several lines."""
UNBOUNDED = 10_000
BASELINES = {"untrained": "untrained policy", "published": "published weights"}


def build_front_table(
    front: Front, dimensions: Sequence[str], console: Console, *, rows: int | None = None
) -> Table:
    """Return the front, best in the first objective first, with standard errors.

    For a console that is too narrow, the table drops the probability, then ever more parameters:
    the normalization and the weights, which trade the objectives off, stay longest.

    Args:
        front: its members are shown.
        dimensions: parameters that get a column, after `normalization`.
        console: the table is to fit into it.
        rows: most members to show; default: all, then the baselines too.
    """
    shown = list(front.members[:rows])
    if rows is None:
        shown += [baseline for baseline in front.baselines if not baseline.is_on_front]
    mode = "normalization"
    names = [mode, *(name for name in dimensions if name != mode)]
    droppable = sorted(names, key=lambda name: (name.startswith("reward_weights."), name == mode))
    remarks = {c.first: _list_remarks(front, c, final=rows is None) for c in shown}
    table = _fill_front_table(front, shown, names, remarks, probability=True)
    # With its default options rich never measures more columns than the console has.
    unbounded = console.options.update(max_width=UNBOUNDED)
    for count in range(len(names) + 1):
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
        kept = [name for name in names if name not in droppable[:count]]
        table = _fill_front_table(front, shown, kept, remarks, probability=False)
    return table


def build_running_table(running: Sequence[Running], steps: int) -> Table:
    """Return the trials that run now, with their latest validation values."""
    table = make_table("trial", "role", "normalization")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("latest on validation prompts")
    for trial in running:
        record = trial.record
        step = "starting" if trial.latest is None else f"{trial.latest.step}/{steps}"
        if not record.is_training:
            step = "evaluating"
        metrics = {} if trial.validated is None else trial.validated.metrics
        values = Text(format_metrics(metrics, "validation/"))
        table.add_row(
            record.name,
            Text(describe_role(record)),
            get_mode(record.params) if record.is_training else NO_VALUE,
            step,
            values,
        )
    return table


def format_metrics(metrics: Mapping[str, float], prefix: str, suffix: str = "") -> str:
    """Return `correctness 0.500, format 0.900` of the metrics with a prefix and a suffix."""
    return ", ".join(
        f"{name.removeprefix(prefix).removesuffix(suffix)} {format_number(value)}"
        for name, value in metrics.items()
        if name.startswith(prefix) and name.endswith(suffix)
    )


def make_table(*columns: str) -> Table:
    """Return an empty table with columns that do not wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _fill_front_table(
    front: Front,
    shown: Sequence[Configuration],
    dimensions: Sequence[str],
    remarks: Mapping[int, str],
    *,
    probability: bool,
) -> Table:
    table = make_table("trials", *map(abbreviate_parameter, dimensions))
    for goal in front.objectives:
        table.add_column(abbreviate_parameter(goal.name), justify="right", no_wrap=True)
    if probability:
        table.add_column("P(front)", justify="right", no_wrap=True)
    table.add_column("", max_width=REMARKS)
    for configuration in shown:
        params = configuration.params if configuration.role != "untrained" else {}
        cells = [
            ", ".join([configuration.name, *_list_replicates(configuration)]),
            *[format_parameter(params.get(name)) for name in dimensions],
            *[format_estimate(configuration.mean[goal.name]) for goal in front.objectives],
        ]
        if probability:
            chance = f"{configuration.probability:.2f}" if configuration.is_on_front else NO_VALUE
            cells.append(chance)
        cells.append(remarks[configuration.first])
        table.add_row(*map(Text, cells), style="" if configuration.is_on_front else "dim")
    return table


def _list_replicates(configuration: Configuration) -> list[str]:
    return [str(number) for number in configuration.numbers if number != configuration.first]


def _list_remarks(front: Front, configuration: Configuration, *, final: bool) -> str:
    remarks = [format_parts(configuration.parts)] if configuration.role == "merge" else []
    remarks += front.list_labels(configuration, ties=final)
    if configuration.role in BASELINES:
        remarks.append(BASELINES[configuration.role])
    if final:
        remarks += front.list_shortfalls(configuration)
    if configuration.is_on_front and configuration.is_provisional:
        remarks.append("provisional")
    return ", ".join(remarks)
