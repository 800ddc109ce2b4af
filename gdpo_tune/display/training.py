"""One training in the terminal: a bar there, a line now and then elsewhere, a table at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gdpo_tune.core.closing import Closing
from gdpo_tune.core.formatting import abbreviate, format_estimate, format_number
from gdpo_tune.core.steps import is_kept
from gdpo_tune.core.trials import Estimate, Measurement, Objective

REWARD = "train/reward/"
VALIDATION = "validation/"


class TrainingDisplay(Closing):
    """What `train()` reports, shown. Use it as a context manager."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(40),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def close(self) -> None:
        """Stop drawing and free the terminal."""
        self._bar.stop()

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        """Take in one step."""
        seen = _seen(measurement.metrics)
        self._bar.update(self._task, completed=measurement.step, description=seen)
        shown = measurement.validated or is_kept(measurement.step, self._steps)
        if shown and not self._console.is_terminal:
            clock = datetime.now().astimezone().strftime("%H:%M:%S")
            line = Text(f"{clock} step {measurement.step}/{self._steps}: {seen}")
            self._console.print(line, soft_wrap=True, highlight=False)


def print_result(
    objectives: Sequence[Objective],
    validation: Mapping[str, Estimate],
    test: Mapping[str, Estimate],
    console: Console | None = None,
) -> None:
    """Print every held-out metric with its standard error, objectives first."""
    out = console or Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("held out", "better", "validation", "test"):
        table.add_column(name, no_wrap=True, justify="left" if name == "held out" else "right")
    goals = {goal.name: "more" if goal.direction == "maximize" else "less" for goal in objectives}
    for name in dict.fromkeys([*goals, *test]):
        cells = [format_estimate(found.get(name)) for found in (validation, test)]
        table.add_row(abbreviate(name), goals.get(name, ""), *cells)
    out.print(table)


def _seen(metrics: Mapping[str, float]) -> str:
    """Validation values where there are any, else the mean of every reward."""
    held_out = {
        name.removeprefix(VALIDATION): value
        for name, value in metrics.items()
        if name.startswith(VALIDATION)
    }
    if held_out:
        return f"on validation prompts {_listed(held_out)}"
    rewards = {
        name[len(REWARD) : -len("/mean")]: value
        for name, value in metrics.items()
        if name.startswith(REWARD) and name.endswith("/mean")
    }
    return f"rewards {_listed(rewards)}"


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_number(value)}" for name, value in values.items())
