"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.formatting import (
    NO_VALUE,
    abbreviate,
    format_estimate,
    format_number,
    format_parameter,
    mode_of,
)
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.display.progress import Running

REMARKS = 18
"""Columns of the remarks, which may take several lines."""
UNBOUNDED = 10_000


def front_table(
    front: Front, dimensions: Sequence[str], console: Console, *, rows: int | None = None
) -> Table:
    """The front, best in the first objective first, with standard errors.

    A console that is too narrow for all of it gets no probability, then ever fewer parameters: the
    normalization and the weights, which trade the objectives, stay longest.

    Args:
        front: what to show.
        dimensions: parameters that get a column, after `normalization`.
        console: where the table is to fit.
        rows: most members to show; default all, then the baselines too.
    """
    shown = list(front.members[:rows])
    if rows is None:
        shown += [baseline for baseline in front.baselines if not baseline.on_front]
    mode = "normalization"
    everything = [mode, *(name for name in dimensions if name != mode)]
    least = sorted(everything, key=lambda name: (name.startswith("reward_weights."), name == mode))
    fewer = [[n for n in everything if n not in least[:k]] for k in range(1, len(least))]
    table = _front_table(front, shown, everything, likely=True)
    for names in (everything, *fewer, []):
        if _width(table, console) <= console.width:
            break
        table = _front_table(front, shown, names, likely=False)
    return table


def running_table(running: Sequence[Running], steps: int) -> Table:
    """Trials that run now, with their latest validation values."""
    table = _table("trial", "role", "normalization")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("latest on validation prompts")
    for trial in running:
        record = trial.record
        step = "starting" if trial.latest is None else f"{trial.latest.step}/{steps}"
        seen = "" if trial.validated is None else _seen(trial.validated.metrics)
        table.add_row(str(record.number), role(record), mode_of(record.params), step, Text(seen))
    return table


def role(record: TrialRecord) -> str:
    """Why a trial was run, in a word or three."""
    if record.role == "replicate":
        return f"replicate of {record.replicate_of}"
    return record.role


def _front_table(
    front: Front, shown: Sequence[Configuration], dimensions: Sequence[str], *, likely: bool
) -> Table:
    table = _table("trials", *map(abbreviate, dimensions))
    for goal in front.objectives:
        table.add_column(abbreviate(goal.name), justify="right", no_wrap=True)
    if likely:
        table.add_column("P(front)", justify="right", no_wrap=True)
    table.add_column("", max_width=REMARKS)
    for configuration in shown:
        cells = _cells(front, configuration, dimensions, likely=likely)
        table.add_row(*map(Text, cells), style="" if configuration.on_front else "dim")
    return table


def _cells(
    front: Front, configuration: Configuration, dimensions: Sequence[str], *, likely: bool
) -> list[str]:
    trained = configuration.role != "untrained"
    params = configuration.params if trained else {}
    remarks = front.picked_as(configuration)
    if configuration.role != "search":
        remarks.append(f"{configuration.role} {'weights' if trained else 'policy'}")
    if configuration.on_front and configuration.provisional:
        remarks.append("provisional")
    probability = f"{configuration.probability:.2f}" if configuration.on_front else NO_VALUE
    return [
        ", ".join(map(str, configuration.numbers)),
        *[format_parameter(params.get(name)) for name in dimensions],
        *[format_estimate(configuration.mean[goal.name]) for goal in front.objectives],
        *([probability] if likely else []),
        ", ".join(remarks),
    ]


def _width(table: Table, console: Console) -> int:
    """Columns that a table takes if nothing in it is cut."""
    # Unless told otherwise rich never answers more than the console has.
    return console.measure(table, options=console.options.update(max_width=UNBOUNDED)).maximum


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _seen(metrics: Mapping[str, float]) -> str:
    prefix = "validation/"
    return "  ".join(
        f"{name.removeprefix(prefix)} {format_number(value)}"
        for name, value in metrics.items()
        if name.startswith(prefix)
    )
