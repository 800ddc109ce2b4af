"""Terminal output of a merge: its prediction and estimates beside those of its parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from gdpo_tune.core.text import abbreviate_parameter, format_duration, format_estimate
from gdpo_tune.core.trials import Estimate, Part, title_candidate
from gdpo_tune.display.consoles import build_console
from gdpo_tune.display.tables import make_table
from gdpo_tune.results.merge_file import MERGE_FILE, MergeProgress
from gdpo_tune.results.merge_request import MergeChoice, MergeEvaluation, MergeRequest, find_broken


def print_choice(request: MergeRequest, choice: MergeChoice) -> None:
    """Print a merge that is not evaluated, and its prediction."""
    print(f"{request.text!r}: {_describe(request, choice.parts)}")
    rows = {"merge, predicted on validation": choice.prediction}
    _print_table(request, choice.parts, rows)


def print_evaluation(request: MergeRequest, number: int, evaluation: MergeEvaluation) -> None:
    """Print one line about a merge that was just evaluated on validation prompts."""
    values = _format_values(request, evaluation.validation)
    choice = evaluation.choice
    expected = f", predicted {_format_values(request, choice.prediction)}"
    print(
        f"merge {number}: {_describe(request, choice.parts)}: {values}"
        f"{expected if choice.prediction else ''}",
        flush=True,
    )


def print_merge(request: MergeRequest, progress: MergeProgress, directory: Path) -> None:
    """Print the chosen merge with its values, its cost and where its policy is."""
    result = progress.result
    assert result is not None, "only a finished merge is printed"
    evaluation = progress.evaluations[result.index]
    choice = evaluation.choice
    print(f"{request.text!r}: {_describe(request, choice.parts)}")
    rows = {
        "merge, predicted on validation": choice.prediction,
        "merge, validation": evaluation.validation,
        "merge, test": result.test,
    }
    _print_table(request, choice.parts, rows)
    for line in _judge(request, evaluation, result.test):
        print(line)
    cost = result.cost
    print(
        f"cost:    {cost.evaluation_completions:,} completions in evaluations, "
        f"{format_duration(cost.cpu_seconds)} of CPU time"
    )
    weights = request.format_weights(choice.parts)
    print(f"repeat:  python -m gdpo_tune.merge {quote(request.source)} --weights {weights}")
    print(f"policy:  {directory / result.policy}")
    print(f"parents: {directory / MERGE_FILE}")


def _judge(
    request: MergeRequest, evaluation: MergeEvaluation, test: Mapping[str, Estimate]
) -> list[str]:
    """Return a line for each condition, and one if a parent meets the wish better."""
    lines: list[str] = []
    broken = find_broken(request.conditions, test)
    for bound in request.conditions:
        estimate = test[bound.metric.name]
        holds = "does not hold" if bound in broken else "holds"
        narrow = abs(estimate.mean - bound.limit) < estimate.se
        margin = ", by less than its standard error" if narrow else ""
        lines.append(f"{bound} {holds} on test prompts: {format_estimate(estimate)}{margin}")
    better = request.find_better_parent(evaluation)
    if better is not None:
        lines.append(
            f"{title_candidate(better.name)} alone meets this better on validation prompts: "
            f"{_format_values(request, better.record.validation)}"
        )
    return lines


def _print_table(
    request: MergeRequest, parts: Sequence[Part], rows: Mapping[str, Mapping[str, Estimate]]
) -> None:
    metrics = [metric.name for metric in request.chooser.aim.metrics]
    table = make_table("")
    for name in metrics:
        table.add_column(abbreviate_parameter(name), no_wrap=True, justify="right")
    shown = dict(rows)
    for parent in request.list_parents(parts):
        title = title_candidate(parent.name)
        shown[f"{title}, validation"] = parent.record.validation
        if parent.record.test:
            shown[f"{title}, test"] = parent.record.test
    for title, values in shown.items():
        table.add_row(title, *(format_estimate(values.get(name)) for name in metrics))
    build_console().print(table)


def _describe(request: MergeRequest, parts: Sequence[Part]) -> str:
    parents = zip(parts, request.list_parents(parts), strict=True)
    return " + ".join(f"{part.weight:.3g} x {title_candidate(p.name)}" for part, p in parents)


def _format_values(request: MergeRequest, values: Mapping[str, Estimate]) -> str:
    names = [metric.name for metric in request.chooser.aim.metrics]
    return ", ".join(f"{name} {format_estimate(values.get(name))}" for name in names)
