"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_list,
    format_number,
    format_parameter,
    get_mode,
)
from gdpo_tune.results.front_table import BASELINES, FrontRow, build_front_row, list_rows
from gdpo_tune.results.live import Running
from gdpo_tune.results.wording import describe_role

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

    For a console that is too narrow, the table drops the probability, then ever more parameters:
    the normalization and the weights, which trade the objectives off, stay longest. `rows`: only so
    many first members, and no baselines.
    """
    shown = list_rows(front, MOST_ROWS)
    if rows is not None:
        shown = [build_front_row(front, member) for member in front.members[:rows]]
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


def explain_marks(front: Front) -> str:
    """Return a line that explains the marks of a table."""
    shown = list_rows(front, MOST_ROWS)
    parts = [
        f"{SEVERAL_SEEDS} several seeds",
        f"{ONE_SEED} one seed: provisional",
        "±: one standard error",
    ]
    if any(row.worse for row in shown):
        names = [BASELINES[b.role] for b in front.baselines if not b.is_on_front]
        parts.append(f"{WORSE} clearly worse than the {format_list(names, 'or')}")
    hidden = len(front.members) - sum(row.policy.is_on_front for row in shown)
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
    front: Front, shown: Sequence[FrontRow], dimensions: Sequence[str], *, probability: bool
) -> Table:
    table = make_table("", "policy", *map(abbreviate_parameter, dimensions))
    for goal in front.objectives:
        table.add_column(abbreviate_parameter(goal.name), justify="right", no_wrap=True)
    if probability:
        table.add_column("P(front)", justify="right", no_wrap=True)
    table.add_column("", max_width=REMARKS)
    for row in shown:
        policy, is_trained = row.policy, row.policy.role != "untrained"
        mark = ONE_SEED if policy.is_provisional else SEVERAL_SEEDS
        values = zip(front.objectives, row.cells, strict=True)
        chance = f"{policy.probability:.2f}" if policy.is_on_front else NO_VALUE
        cells = [
            mark * is_trained,
            policy.name,
            *[format_parameter(policy.params.get(n) if is_trained else None) for n in dimensions],
            *[f"{f'{WORSE} ' * (goal.name in row.worse)}{cell}" for goal, cell in values],
            *([chance] if probability else []),
            ", ".join(filter(None, [*row.labels, row.baseline])),
        ]
        table.add_row(*map(Text, cells), style="" if policy.is_on_front else "dim")
    return table
