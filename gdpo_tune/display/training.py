"""Terminal output of one training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.text import abbreviate_parameter, format_estimate
from gdpo_tune.core.trial_files import REWARDS, is_kept
from gdpo_tune.core.trials import Estimate, Measurement, Objective
from gdpo_tune.display.tables import build_console, format_metrics, make_table


class TrainingDisplay(CloseableResource):
    """Display of the measurements that `train()` reports. Use it as a context manager."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._console = build_console()
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
        """Show one step."""
        # Validation values if there are any, otherwise the mean of every reward.
        held_out = format_metrics(measurement.metrics, "validation/")
        rewards = format_metrics(measurement.metrics, f"train/{REWARDS}", "/mean")
        values = f"on validation prompts {held_out}" if held_out else f"rewards {rewards}"
        self._bar.update(self._task, completed=measurement.step, description=values)
        shown = measurement.has_validation or is_kept(measurement.step, self._steps)
        if shown and not self._console.is_terminal:
            clock = datetime.now().astimezone().strftime("%H:%M:%S")
            line = Text(f"{clock} step {measurement.step}/{self._steps}: {values}")
            self._console.print(line, soft_wrap=True, highlight=False)


def print_result(
    objectives: Sequence[Objective], columns: Mapping[str, Mapping[str, Estimate]]
) -> None:
    """Print every metric with its standard error in columns by their titles, objectives first."""
    table = make_table("metric", "direction")
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right")
    goals = {goal.name: goal.direction for goal in objectives}
    directions = {"maximize": "higher is better", "minimize": "lower is better"}
    for name in dict.fromkeys([*goals, *chain(*columns.values())]):
        direction = directions[goals[name]] if name in goals else ""
        cells = [format_estimate(column.get(name)) for column in columns.values()]
        table.add_row(abbreviate_parameter(name), direction, *cells)
    build_console().print(table)
