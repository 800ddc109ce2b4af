"""Score texts with the rewards and metrics of a search space, without training.

    python -m gdpo_tune.score mine.yaml --completions written.jsonl
    python -m gdpo_tune.score mine.yaml --reference --json scores.jsonl
    python -m gdpo_tune.score search_spaces/code.yaml --policy embedded -n 16

The values are those of a trial: its task, rewards, sandbox and batches. Each line of --completions
is a JSON object with `completion` and either `row`, the columns of one row of the data source, or
`prompt` and the other columns that the rewards take. --json writes one object for each completion:
{"rewards": {...}, "metrics": {...}, "detail": "..."}, null where a value is missing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gdpo_tune import cli
from gdpo_tune.core import errors, task_files
from gdpo_tune.core.files import explain_write_errors, write_atomically
from gdpo_tune.core.task_info import PROBLEM_SEED
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_count,
    format_number,
    join_turns,
    make_printable,
)
from gdpo_tune.core.trial_files import CUT

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tasks.base import Problem, Task

MOST_ROWS, LONGEST_CELL = 40, 120
"""Texts that the terminal lists, and characters of each."""


@dataclass
class ScoredText:
    """One completion of a problem, and what the task says of it."""

    number: int
    """Line of its file, or row of the data, from 1 on."""
    problem: Problem | None
    """None: there is nothing to score, for the reason in `detail`."""
    completion: Any
    """A text, or messages where the policy called tools."""
    tokens: Sequence[int] = ()
    """Tokens of the completion, the end token included."""
    length: int = 0
    """How many of them the policy wrote."""
    detail: str = ""
    """Verdict of the sandbox, and why values are missing."""
    rewards: dict[str, float | None] = field(default_factory=dict[str, float | None])
    metrics: dict[str, float | None] = field(default_factory=dict[str, float | None])


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    parser.file("space", "its task is used", metavar="SEARCH_SPACE.yaml")
    source = parser.add_mutually_exclusive_group(required=True)
    file = source.add_argument(
        "--completions", type=Path, metavar="FILE", help="file of JSON lines"
    )
    vars(file)["complete"] = cli.FILES
    source.add_argument("--reference", action="store_true", help="the data's own solutions")
    source.add_argument("--policy", metavar="NAME", help="what a policy samples")
    parser.add_argument(
        "-n",
        type=cli.integer(1),
        metavar="COUNT",
        help="completions: the first lines or rows (default: all), or those that the policy "
        "samples of validation prompts (default: 16)",
    )
    parser.file("--json", "file of JSON lines", type=Path, metavar="OUT")
    parser.overrides()
    return parser


def main(arguments: Sequence[str]) -> int:
    """Score what `arguments` name, show and write the values, and return the exit status."""
    options = build_parser().parse_args(arguments)
    spec = _load_task_spec(options)
    output: Path | None = options.json
    cli.check_output("--json", output)
    cli.set_written_variables(spec)
    if options.policy:
        cli.limit_devices(spec)  # before torch
        from gdpo_tune.results.retrain import build_evaluation_config
        from gdpo_tune.training.trial import sample_policy

        config = build_evaluation_config(spec, options.policy, spec.search.seed, Path())
        task, sampled = sample_policy(config, options.n or 16)
        texts = [ScoredText(number, *each) for number, each in enumerate(sampled, 1)]
    else:
        texts = []
        names = spec.space.domains  # an optional reward is on if the space has a weight for it
        task = task_files.build_task(
            spec.task, spec.training, spec.sandbox, spec.data, names, spec.scoring
        )
    with closing(task):  # a trial does not enter its task either
        if options.completions:
            from gdpo_tune.tasks.completions import read_stated_completions

            found = read_stated_completions(options.completions, spec.task, spec.data)
            texts = [ScoredText(*each) for each in found[: options.n]]
        elif options.reference:
            texts = _list_references(spec, task, options.n)
        if not options.policy:
            _read_back(spec, texts)
        _score_texts(spec, task, texts)
    print_scores(texts)
    longest = spec.training.max_completion_length
    if count := sum(len(text.tokens) > longest for text in texts):
        limit = f"training.max_completion_length = {longest}"
        print(f"{format_count(count, 'text')} longer than {limit} tokens, where a trial cuts")
    if output:
        keys = ("rewards", "metrics", "detail", *(() if options.completions else ("completion",)))
        lines = [{key: getattr(text, key) for key in keys} for text in texts]
        with explain_write_errors("the scores"):
            write_atomically(
                output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            )
        print(f"scores: {output}")
    return 0


def _load_task_spec(options: argparse.Namespace) -> SweepSpec:
    from gdpo_tune.results.retrain import override_policy
    from gdpo_tune.spec import load_spec

    overrides = ["search.warm_start=[]", *options.overrides]
    overrides += override_policy(options.policy) if options.policy else []
    lacks: list[errors.SpecProblem] = []
    spec = load_spec(options.space, overrides, needs=lacks)
    sections = ("sandbox",) if options.completions else ("sandbox", "data")
    if needed := tuple(lack for lack in lacks if lack.key.startswith(sections)):
        raise errors.SpecError(needed)
    return spec


def _list_references(spec: SweepSpec, task: Task, count: int | None) -> list[ScoredText]:
    """Return the reference solutions of the first `count` rows, None for all, as completions.

    Of a task that writes its own prompts, those of its validation prompts.
    """
    if not spec.data.source:
        write: Any = getattr(task, "write_reference", None)
        has_turns = bool(getattr(task, "tools", ()))
        if write is None or has_turns:
            raise errors.UsageError(
                f"--reference: the task {spec.task} states no solutions of its problems"
                f"{' in one turn, without tools' * has_turns}\n"
                "    fix: write some as lines of --completions FILE"
            )
        count = count or spec.training.validation_prompts
        problems = task.problems("validation", count, PROBLEM_SEED)
        return [ScoredText(number, one, write(one)) for number, one in enumerate(problems, 1)]
    from gdpo_tune.tasks.references import read_references

    texts = [
        ScoredText(number, None, "", detail=f"not scored: {one.reason}")
        if one.reason
        else ScoredText(number, one.problem, one.completion)
        for number, one in enumerate(islice(read_references(spec.data), count), 1)
    ]
    if not texts:
        raise errors.DataError(f"data.source = {spec.data.source} holds no row: give one that does")
    return texts


def _read_back(spec: SweepSpec, texts: Sequence[ScoredText]) -> None:
    """Replace texts by what rewards would see of them, and add their tokens."""
    from gdpo_tune.policies.prompt_choice import read_back

    written = [text.completion for text in texts]
    found = read_back(spec.policy, spec.model.revision, written)
    if texts and not found[0]:
        raise errors.PolicyError(
            f"policy {spec.policy!r} is not on this machine, and lengths are counted in its tokens"
            f"\n    fix: hf download {spec.policy}, or count with another: --set policy=embedded"
        )
    for text, tokens, seen in zip(texts, *found, strict=True):
        text.tokens, text.completion, text.length = tokens, seen, len(tokens)


def _score_texts(spec: SweepSpec, task: Task, texts: Sequence[ScoredText]) -> None:
    from gdpo_tune.tasks.base import check_ranges
    from gdpo_tune.tasks.references import describe_result

    # An evaluation is of a policy, and not of texts.
    measured = [name for name in task.metrics if name not in getattr(task, "evaluations", ())]
    for text in texts:
        text.rewards, text.metrics = dict.fromkeys(task.rewards), dict.fromkeys(measured)
    scorable = [(text, text.problem) for text in texts if text.problem is not None]
    size = spec.training.completions_per_step
    for start in range(0, len(scorable), size):
        batch, problems = zip(*scorable[start : start + size], strict=True)
        tokens = [text.tokens for text in batch]
        try:
            completions, lengths = [text.completion for text in batch], [t.length for t in batch]
            scores = task.score(problems, completions, lengths, tokens)
            check_ranges(scores, task)
        except errors.TrialFailure as error:  # what a function returned is no reward
            raise errors.TaskFileError(str(error)) from error
        for index, text in enumerate(batch):
            details = [describe_result(scores.results[index])] if scores.results else []
            for name, failed in scores.failures.items():
                if index in failed:
                    details.append(f"reward {name} raised: {failed[index]}")
            for found, columns in ((text.rewards, scores.rewards), (text.metrics, scores.metrics)):
                for name, column in columns.items():
                    value = column[index]
                    if value is not None and not math.isfinite(value):
                        details.append(f"{name} is {value}, which ends a trial")
                        value = None  # JSON lacks NaN and infinities
                    found[name] = value
            text.detail = "; ".join(dict.fromkeys(details))


def print_scores(texts: Sequence[ScoredText]) -> None:
    """Print texts with their values, and the means at the end.

    A metric whose values are those of the reward with its name has no column of its own. Of more
    than `MOST_ROWS` texts, those with the least of the first reward are printed.
    """
    from rich.text import Text

    from gdpo_tune.display.tables import build_console, make_table

    columns = {name: [text.rewards[name] for text in texts] for name in texts[0].rewards}
    first, least = next(iter(columns.items()))
    for name in texts[0].metrics:
        values = [text.metrics[name] for text in texts]
        if columns.get(name) != values:
            columns[f"metric {name}" if name in columns else name] = values
    table = make_table("#")
    table.add_column("completion", overflow="fold")
    for title in map(abbreviate_parameter, columns):
        table.add_column(title, justify="right", width=max(5, *map(len, title.split())))
    table.add_column("detail", overflow="fold")
    order = sorted(range(len(texts)), key=lambda row: -math.inf if (v := least[row]) is None else v)
    for row in sorted(order[:MOST_ROWS]):
        text, values = texts[row], [column[row] for column in columns.values()]
        cells = (NO_VALUE if value is None else f"{value:.4g}" for value in values)
        completion, detail = (Text(_shorten(each)) for each in (text.completion, text.detail))
        table.add_row(str(text.number), completion, *cells, detail)
    table.add_section()
    means = ([value for value in column if value is not None] for column in columns.values())
    cells = (format_number(fmean(values)) if values else NO_VALUE for values in means)
    count = sum(any(value is not None for value in text.rewards.values()) for text in texts)
    table.add_row("", f"mean of {count}", *cells, style="bold")
    build_console().print(table)
    if len(texts) > MOST_ROWS:
        print(f"{MOST_ROWS} of {len(texts)} texts, those with the least {first}; --json has all")


def _shorten(text: str | list[dict[str, Any]]) -> str:
    text = " ".join(make_printable(join_turns(text)).split())
    if len(text) <= LONGEST_CELL:
        return text
    half = LONGEST_CELL // 2 - 2
    return f"{text[:half]} {CUT} {text[-half:]}"


if __name__ == "__main__":
    cli.run_command(main)
