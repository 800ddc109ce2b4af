"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_estimate,
    format_list,
    format_number,
    format_parameter,
    get_mode,
)
from gdpo_tune.display.progress import Running
from gdpo_tune.results.summary import ROLES, describe_role

MOST_ROWS = 16
"""Members of a front that the terminal lists; report and front.csv have all."""
REMARKS = 24
"""Columns of the remarks, which may take several lines."""
UNBOUNDED = 10_000
SEVERAL_SEEDS, ONE_SEED, WORSE = "●", "○", "▾"
"""Marks of rows, as in the pictures, and of a value that is clearly worse than a baseline's."""


def build_front_table(
    front: Front, dimensions: Sequence[str], console: Console, *, rows: int | None = None
) -> Table:
    """Return the front, best in the first objective first, with standard errors.

    Only `MOST_ROWS` members are shown: those that have a label, and of the others an even
    selection. For a console that is too narrow, the table drops the probability, then ever more
    parameters: the normalization and the weights, which trade the objectives off, stay longest.

    Args:
        front: its members are shown.
        dimensions: parameters that get a column, after `normalization`.
        console: the table is to fit into it.
        rows: the first members alone, at most this many; default: the baselines too.
    """
    shown = list(front.members[:rows]) if rows is not None else select_rows(front)
    mode = "normalization"
    names = [mode, *(name for name in dimensions if name != mode)]
    droppable = sorted(names, key=lambda name: (name.startswith("reward_weights."), name == mode))
    table = _fill_front_table(front, shown, names, probability=True)
    # With its default options rich never measures more columns than the console has.
    unbounded = console.options.update(max_width=UNBOUNDED)
    for count in range(len(names) + 1):
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
        kept = [name for name in names if name not in droppable[:count]]
        table = _fill_front_table(front, shown, kept, probability=False)
    return table


def select_rows(front: Front) -> list[Configuration]:
    """Select the members that the terminal lists, in order, and the baselines at the end."""
    named = [m for m in front.members if front.list_labels(m) or m.role in ROLES]
    others = [m for m in front.members if m not in named]
    room = max(MOST_ROWS - len(named), 0)
    count = min(room, len(others))
    even = {index * len(others) // count for index in range(count)}
    kept = {id(member) for member in (*named, *(others[index] for index in even))}
    members = [member for member in front.members if id(member) in kept]
    return members + [baseline for baseline in front.baselines if not baseline.is_on_front]


def explain_marks(front: Front, shown: Sequence[Configuration]) -> str:
    """Return a line that explains the marks of a table."""
    parts = [
        f"{SEVERAL_SEEDS} several seeds",
        f"{ONE_SEED} one seed: provisional",
        "±: one standard error",
    ]
    if any(front.list_worse_objectives(member) for member in shown if member.is_on_front):
        roles = [b.role for b in front.baselines if not b.is_on_front]
        names = format_list([ROLES[role] for role in roles], "or")
        parts.append(f"{WORSE} clearly worse than the {names}")
    hidden = len(front.members) - sum(member.is_on_front for member in shown)
    return "; ".join([*parts, *([f"{hidden} more in the report"] if hidden > 0 else [])])


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
    front: Front, shown: Sequence[Configuration], dimensions: Sequence[str], *, probability: bool
) -> Table:
    table = make_table("", "policy", *map(abbreviate_parameter, dimensions))
    for goal in front.objectives:
        table.add_column(abbreviate_parameter(goal.name), justify="right", no_wrap=True)
    if probability:
        table.add_column("P(front)", justify="right", no_wrap=True)
    table.add_column("", max_width=REMARKS)
    for configuration in shown:
        params = configuration.params if configuration.role != "untrained" else {}
        is_trained = configuration.role != "untrained"
        mark = ONE_SEED if configuration.is_provisional else SEVERAL_SEEDS
        cells = [
            mark if is_trained else "",
            configuration.name,
            *[format_parameter(params.get(name)) for name in dimensions],
            *_format_values(front, configuration),
        ]
        if probability:
            chance = f"{configuration.probability:.2f}" if configuration.is_on_front else NO_VALUE
            cells.append(chance)
        cells.append(_list_remarks(front, configuration))
        table.add_row(*map(Text, cells), style="" if configuration.is_on_front else "dim")
    return table


def _format_values(front: Front, configuration: Configuration) -> list[str]:
    is_baseline = configuration.role in ROLES
    worse = set[str]() if is_baseline else front.list_worse_objectives(configuration)
    return [
        f"{f'{WORSE} ' * (goal.name in worse)}{format_estimate(configuration.mean[goal.name])}"
        for goal in front.objectives
    ]


def _list_remarks(front: Front, configuration: Configuration) -> str:
    remarks = front.list_labels(configuration)
    if configuration.role in ROLES:
        remarks.append(ROLES[configuration.role])
    return ", ".join(remarks)
