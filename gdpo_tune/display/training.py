"""Terminal output of one training, and of a merge beside its parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.text import abbreviate_parameter, format_duration, format_estimate
from gdpo_tune.core.trial_files import REWARDS, is_kept
from gdpo_tune.core.trials import Estimate, Measurement, Objective, title_candidate
from gdpo_tune.display.tables import build_console, format_metrics, make_table
from gdpo_tune.results.merge_request import MERGE_FILE, MergeProgress, MergeRequest, MergeStep


class TrainingDisplay(CloseableResource):
    """Display of the measurements that `train()` reports. Use it as a context manager."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or build_console()
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


def print_choice(request: MergeRequest, choice: MergeStep) -> None:
    """Print a merge that is not evaluated, and its prediction."""
    print(f"{request.text!r}: {_describe_parts(request, choice)}")
    _print_values(request, choice, {"merge, predicted on validation": choice.prediction})


def print_evaluation(request: MergeRequest, number: int, step: MergeStep) -> None:
    """Print one line about a merge that was just evaluated on validation prompts."""
    predicted = f", predicted {_format_values(request, step.prediction)}" if step.prediction else ""
    values = _format_values(request, step.validation)
    print(f"merge {number}: {_describe_parts(request, step)}: {values}{predicted}", flush=True)


def print_merge(request: MergeRequest, progress: MergeProgress, directory: Path) -> None:
    """Print the chosen merge: values, conditions, better parents, cost, and where its policy is."""
    result = progress.result
    assert result is not None, "only a finished merge is printed"
    step = progress.evaluations[result.index]
    print(f"{request.text!r}: {_describe_parts(request, step)}")
    rows = {
        "merge, predicted on validation": step.prediction,
        "merge, validation": step.validation,
        "merge, test": result.test,
    }
    _print_values(request, step, rows)
    broken = request.find_broken(result.test)
    for condition in request.conditions:
        estimate = result.test[condition.metric]
        holds = "does not hold" if condition in broken else "holds"
        is_narrow = abs(estimate.mean - condition.limit) < estimate.se
        margin = ", by less than its standard error" if is_narrow else ""
        print(f"{condition} {holds} on test prompts: {format_estimate(estimate)}{margin}")
    if better := request.find_better_parent(step):
        print(
            f"{title_candidate(better.name)} alone meets this better on validation prompts: "
            f"{_format_values(request, better.record.validation)}"
        )
    print(
        f"cost:    {result.cost.evaluation_completions:,} completions in evaluations, "
        f"{format_duration(result.cost.cpu_seconds)} of CPU time"
    )
    weights = request.format_weights(step.parts)
    print(f"repeat:  python -m gdpo_tune.merge {quote(request.source)} --weights {weights}")
    print(f"policy:  {directory / result.policy}")
    print(f"parents: {directory / MERGE_FILE}")


def _print_values(
    request: MergeRequest, step: MergeStep, rows: Mapping[str, Mapping[str, Estimate]]
) -> None:
    metrics = [metric.name for metric in request.chooser.aim.metrics]
    table = make_table("")
    for name in metrics:
        table.add_column(abbreviate_parameter(name), no_wrap=True, justify="right")
    shown = dict(rows)
    for parent in request.list_parents(step.parts):
        title = title_candidate(parent.name)
        shown[f"{title}, validation"] = parent.record.validation
        if parent.record.test:
            shown[f"{title}, test"] = parent.record.test
    for title, values in shown.items():
        table.add_row(title, *(format_estimate(values.get(name)) for name in metrics))
    build_console().print(table)


def _describe_parts(request: MergeRequest, step: MergeStep) -> str:
    parents = zip(step.parts, request.list_parents(step.parts), strict=True)
    return " + ".join(f"{part.weight:.3g} x {title_candidate(p.name)}" for part, p in parents)


def _format_values(request: MergeRequest, values: Mapping[str, Estimate]) -> str:
    names = [metric.name for metric in request.chooser.aim.metrics]
    return ", ".join(f"{name} {format_estimate(values.get(name))}" for name in names)
