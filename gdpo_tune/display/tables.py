"""Consoles, and the tables that they show."""

from __future__ import annotations

import sys
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
from gdpo_tune.results.front_table import BASELINES, FrontRow
from gdpo_tune.results.live import Running
from gdpo_tune.results.wording import describe_role

MAX_ROWS = 16
"""Members of a front that the terminal lists; report and front.csv have all."""
SEVERAL_SEEDS, ONE_SEED, WORSE = "●", "○", "▾"
"""Marks of rows, as in the pictures, and of a value that is clearly worse than a baseline's."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with status 1 and without a word


def build_console(width: int | None = None) -> Console:
    """Build a console that draws live in a terminal alone.

    For rich `FORCE_COLOR` makes a terminal of any file. Jupyter and CI set it, and would keep every
    frame of a live table.
    """
    is_terminal = None if sys.stdout.isatty() else False
    return _Console(force_terminal=is_terminal, width=width, emoji=False)  # :x: is no picture


def make_table(*columns: str) -> Table:
    """Return an empty table with columns that do not wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def build_front_table(
    front: Front, rows: Sequence[FrontRow], dimensions: Sequence[str], console: Console
) -> Table:
    """Return rows of the front with standard errors.

    For a console that is too narrow, the table drops the probability, then ever more parameters:
    the normalization and the weights, which trade the objectives off, stay longest.
    """
    mode = "normalization"
    names = [mode, *(name for name in dimensions if name != mode)]
    droppable = sorted(names, key=lambda name: (name.startswith("reward_weights."), name == mode))
    # With its default options rich never measures more columns than the console has.
    unbounded = console.options.update(max_width=10_000)
    table = make_table()
    for count in range(-1, len(names) + 1):
        kept = [name for name in names if name not in droppable[: max(count, 0)]]
        table = _fill_front_table(front, rows, kept, probability=count < 0)
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    return table


def _fill_front_table(
    front: Front, rows: Sequence[FrontRow], dimensions: Sequence[str], *, probability: bool
) -> Table:
    table = make_table("", "policy", *map(abbreviate_parameter, dimensions))
    for goal in front.objectives:
        table.add_column(abbreviate_parameter(goal.name), justify="right", no_wrap=True)
    if probability:
        table.add_column("P(front)", justify="right", no_wrap=True)
    table.add_column("", max_width=24)  # remarks may take several lines
    for row in rows:
        policy, is_trained = row.policy, not row.policy.is_initial
        values = zip(front.objectives, row.cells, strict=True)
        chance = f"{policy.probability:.2f}" if policy.is_on_front else NO_VALUE
        cells = [
            _mark_seeds(row),
            policy.name,
            *[format_parameter(policy.params.get(n) if is_trained else None) for n in dimensions],
            *[f"{f'{WORSE} ' * (goal.name in row.worse)}{cell}" for goal, cell in values],
            *([chance] if probability else []),
            ", ".join(filter(None, [*row.labels, row.baseline])),
        ]
        table.add_row(*map(Text, cells), style="" if policy.is_on_front else "dim")
    return table


def _mark_seeds(row: FrontRow) -> str:
    if row.policy.is_initial:
        return ""
    return ONE_SEED if row.policy.is_provisional else SEVERAL_SEEDS


def explain_marks(front: Front, rows: Sequence[FrontRow]) -> str:
    """Return a line that explains the marks that some row of a table has."""
    marks = {
        SEVERAL_SEEDS: f"{SEVERAL_SEEDS} several seeds",
        ONE_SEED: f"{ONE_SEED} one seed: provisional",
    }
    shown = {_mark_seeds(row) for row in rows}
    parts = [text for mark, text in marks.items() if mark in shown]
    parts.append("±: one standard error")
    if any(row.worse for row in rows):
        names = [BASELINES[b.role] for b in front.baselines if not b.is_on_front]
        parts.append(f"{WORSE} clearly worse than the {format_list(names, 'or')}")
    hidden = len(front.members) - sum(row.policy.is_on_front for row in rows)
    return "; ".join([*parts, *([f"{hidden} more in the report"] if hidden > 0 else [])])


def build_running_table(running: Sequence[Running], steps: int) -> Table:
    """Return the trials that run now, with their latest validation values."""
    table = make_table("trial", "role", "normalization")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("latest on validation prompts")
    for trial in running:
        record = trial.record
        step = "starting" if trial.latest is None else f"{trial.latest.step}"
        step += f"/{steps}" if trial.latest and record.is_training else ""
        metrics = {} if trial.validated is None else trial.validated.metrics
        table.add_row(
            record.name,
            Text(describe_role(record)),
            get_mode(record.params) if record.is_training else NO_VALUE,
            step if record.is_training or record.role == "start" else "evaluating",
            Text(format_metrics(metrics, "validation/")),
        )
    return table


def format_metrics(metrics: Mapping[str, float], prefix: str, suffix: str = "") -> str:
    """Return `correctness 0.500, format 0.900` of the metrics with a prefix and a suffix."""
    return ", ".join(
        f"{name.removeprefix(prefix).removesuffix(suffix)} {format_number(value)}"
        for name, value in metrics.items()
        if name.startswith(prefix) and name.endswith(suffix)
    )
