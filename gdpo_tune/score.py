"""Score texts with the rewards and metrics of a search space, without training.

    python -m gdpo_tune.score mine.yaml --completions rows.jsonl
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
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gdpo_tune import cli
from gdpo_tune.core import task_files
from gdpo_tune.core.errors import (
    GdpoTuneError,
    PolicyError,
    SpecError,
    SpecProblem,
    TaskFileError,
    TrialFailure,
    UsageError,
)
from gdpo_tune.core.files import explain_write_errors, is_directory, write_atomically
from gdpo_tune.core.formatting import format_count, make_printable
from gdpo_tune.core.prompt_order import PROBLEM_SEED
from gdpo_tune.core.registry import describe_layout
from gdpo_tune.tasks.base import CallContext, Problem, call_score
from gdpo_tune.tasks.data_rows import (
    SURROGATE,
    RowError,
    get_optional_text,
    get_text,
    get_texts,
    read_rows,
    require_list,
    require_mapping,
)

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tasks.base import Task

FACTS = {
    "math": ("answer",),
    "gsm8k": ("answer", "written_answer"),
    "tools": ("calls", "response"),
    "code": ("function", "head", "tail", "asserts", "streams"),
}
"""Task -> columns that a line with a `prompt` may have."""
LONGEST_VALUE = 60
"""Characters of a value in an error."""


@dataclass(frozen=True)
class Text:
    """One completion of a problem, to be scored."""

    place: str
    """Line of its file, or row of the data."""
    problem: Problem | None
    """None: there is nothing to score, for the reason in `note`."""
    completion: str
    tokens: Sequence[int] = ()
    """Tokens of the completion, the end token included."""
    note: str = ""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser without a heavy import, so that `--help` answers at once."""
    parser = argparse.ArgumentParser(
        prog="python -m gdpo_tune.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    space = parser.add_argument("space", metavar="SEARCH_SPACE.yaml", help="its task is used")
    source = parser.add_mutually_exclusive_group(required=True)
    file = source.add_argument(
        "--completions", type=Path, metavar="FILE", help="file of JSON lines"
    )
    source.add_argument("--reference", action="store_true", help="the data's own solutions")
    source.add_argument("--policy", metavar="NAME", help="what a policy samples")
    parser.add_argument(
        "-n",
        type=_parse_count,
        metavar="COUNT",
        help="completions: the first rows of the data (default: all), or those that the policy "
        "samples of validation prompts (default: 16)",
    )
    output = parser.add_argument("--json", metavar="OUT", help="write JSON lines; - is the output")
    cli.add_override_argument(parser)
    for action in (space, file, output):
        cli.complete_files(action)
    return parser


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    """Score what `arguments` name, show or write the values, and return the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.completions and options.n:
        parser.error("-n has no effect with --completions, whose lines are all scored")

    from gdpo_tune.display.tables import print_scores

    spec = load_task_spec(options)
    output = None if options.json in (None, "-") else Path(options.json)
    if output and (is_directory(output) or not is_directory(output.absolute().parent)):
        raise UsageError(
            f"--json {output}: it is a directory, or its directory is missing\n"
            "    fix: name a file in a directory that exists"
        )
    cli.set_written_variables(spec)
    if options.policy:
        task, texts = sample_texts(spec, options.n or 16)
    else:
        texts = read_completions(spec, options.completions) if options.completions else []
        names = spec.space.domains  # an optional reward is on if the space has a weight for it
        task = task_files.build_task(
            spec.task, spec.training, spec.sandbox, spec.data, names, spec.scoring
        )
    with closing(task):  # a trial does not enter its task either
        if options.reference:
            texts = list_references(spec, task, options.n)
        if not options.policy:
            texts = measure_texts(spec, texts)
        scored = score_texts(spec, task, texts)
    shown = ("rewards", "metrics", "detail", *(() if options.completions else ("completion",)))
    lines = [json.dumps({key: line[key] for key in shown}, ensure_ascii=False) for line in scored]
    if options.json == "-":
        print("\n".join(lines))
        return 0
    print_scores(scored)
    longest = spec.training.max_completion_length
    count = sum(len(text.tokens) > longest for text in texts)
    if count:
        limit = f"training.max_completion_length = {longest}"
        print(f"{format_count(count, 'text')} longer than {limit} tokens, where a trial cuts")
    if output:
        with explain_write_errors("the scores"):
            write_atomically(output, "".join(f"{line}\n" for line in lines))
        print(f"scores: {output}")
    return 0


def load_task_spec(options: argparse.Namespace) -> SweepSpec:
    """Load the search space, without what only a training or a search needs.

    Raises:
        SpecError: the file has problems, or this machine lacks a package or the data that is read.
    """
    from gdpo_tune.spec import load_spec

    overrides = ["search.warm_start=[]", *options.overrides]
    if options.policy:
        overrides.append(f"policy={json.dumps(options.policy)}")
    lacks: list[SpecProblem] = []
    spec = load_spec(options.space, overrides, needs=lacks)
    sections = ("sandbox",) if options.completions else ("sandbox", "data")
    needed = tuple(lack for lack in lacks if lack.key.startswith(sections))
    if needed:
        raise SpecError(needed)
    return spec


def read_completions(spec: SweepSpec, file: Path) -> list[Text]:
    """Read the lines of `--completions`; blank ones are skipped.

    Raises:
        UsageError: every line that cannot be used, with its place, value, reason and fix.
    """
    try:
        content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        reason = f"--completions {file} cannot be read: {error.strerror}"
        raise UsageError(f"{reason}\n    fix: name a file of JSON lines") from error
    texts: list[Text] = []
    problems: list[SpecProblem] = []
    fix = f"write {_describe_line(spec)}"
    for number, source in enumerate(content.splitlines(), 1):
        if not source.strip():
            continue
        line: dict[str, Any] = {}
        try:
            line = require_mapping(json.loads(source), "")
            completion = line.pop("completion", None)
            if not isinstance(completion, str) or SURROGATE.search(completion):
                raise RowError("completion", "missing, or not a text that a tokenizer reads")
            problem = build_stated_problem(spec, line)
            if task_files.is_task_file(spec.task) and texts:
                first = cast("Problem", texts[0].problem)
                if bool(problem.turns) != bool(first.turns):
                    raise RowError(
                        "prompt", "a text here and messages there, unlike the first line"
                    )
                if set(problem.data) != set(first.data):
                    columns = ", ".join(first.data) or "none"
                    reason = f"other columns than {columns} of the first line"
                    raise RowError(", ".join(problem.data) or "prompt", reason)
            texts.append(Text(str(number), problem, completion))
        except RowError as error:
            row = line.get("row")
            value = {**(row if isinstance(row, dict) else {}), **line}.get(error.column)
            shown = "" if value is None else repr(value)[:LONGEST_VALUE]
            where = f"{file}:{number}"
            problems.append(SpecProblem(where, error.column, shown, error.reason, fix))
        except (ValueError, RecursionError) as error:
            reason = f"not a line of JSON: {error}"
            problems.append(SpecProblem(f"{file}:{number}", "", "", reason, fix))
    if problems or not texts:
        found = "\n".join(map(str, problems)) or f"{file}: it has no line\n    fix: {fix}"
        raise UsageError(f"{format_count(len(problems), 'problem')} in --completions\n{found}")
    return texts


def build_stated_problem(spec: SweepSpec, line: Mapping[str, Any]) -> Problem:
    """Return the problem that a line of `--completions` states with its `row` or `prompt`.

    Raises:
        RowError: it has neither or both, or columns that are missing, unknown or unusable.
    """
    from gdpo_tune.tasks.custom import collect_rows

    if ("row" in line) == ("prompt" in line):
        raise RowError(
            "row", "row and prompt are both here" if "row" in line else "no row, and no prompt"
        )
    is_own = task_files.is_task_file(spec.task)
    if "row" in line and len(line) > 1:
        others = ", ".join(name for name in line if name != "row")
        raise RowError(others, "stands beside row, which has all columns")
    if "row" in line and not is_own:
        row = require_mapping(line["row"], "row")
        if not spec.data.layout:
            raise RowError("row", "the search space has no data.layout that says what columns mean")
        layout = describe_layout(spec.data.layout)
        missing = [name for name in layout.columns if name not in row]
        if missing:
            raise RowError("row", f"without {', '.join(missing)} of the layout {spec.data.layout}")
        return layout.convert(row)
    stated = dict(require_mapping(line["row"], "row") if "row" in line else line)
    if is_own:
        try:
            (problem,) = collect_rows([stated]).values()
        except UsageError as error:
            reason = str(error).partition("\n")[0].removeprefix("rows(): ")
            raise RowError("prompt", reason.replace("row 0", "this line")) from error
        return problem
    prompt = get_text(stated, "prompt")
    del stated["prompt"]
    for name in stated:
        if name not in FACTS[spec.task]:
            known = ", ".join(FACTS[spec.task])
            raise RowError(name, f"no column that the task {spec.task} takes; these are {known}")
    return Problem(prompt, "stated", _read_facts(spec.task, stated))


def _read_facts(task: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the rewards of a task that ships read of a problem."""
    from gdpo_tune.tasks.execution import build_code_problem, check_assert, check_streams
    from gdpo_tune.tasks.layouts import parse_call

    if task in ("math", "gsm8k"):
        return {**stated, "answer": get_text(stated, "answer")}
    if task == "tools":
        calls = [parse_call(call) for call in require_list(stated.get("calls"), "calls")]
        return {"calls": calls, "response": bool(stated.get("response", not calls))}
    function, head, tail = (get_optional_text(stated, name) for name in FACTS["code"][:3])
    asserts = [
        check_assert(each, "asserts") for each in get_texts({"asserts": [], **stated}, "asserts")
    ]
    pairs = [
        get_texts({"streams": pair}, "streams")
        for pair in require_list(stated.get("streams", ()), "streams")
    ]
    if any(len(pair) != 2 for pair in pairs):
        raise RowError("streams", "not pairs of input and expected output")
    streams = check_streams([pair[0] for pair in pairs], [pair[1] for pair in pairs], "streams")
    if bool(asserts) == bool(streams):
        raise RowError("asserts", "the task code needs asserts, or streams, and not both")
    problem = build_code_problem(
        "", "", function=function, head=head, tail=tail, asserts=asserts, streams=streams
    )
    return dict(problem.data)


def _describe_line(spec: SweepSpec) -> str:
    """Return an example of a line of `--completions` for a search space."""
    if spec.data.layout:
        columns = ", ".join(f'"{name}": ...' for name in describe_layout(spec.data.layout).columns)
        return f'{{"completion": "...", "row": {{{columns}}}}}'
    column = FACTS.get(spec.task, ("column",))[-1 if spec.task == "code" else 0]
    return f'{{"completion": "...", "prompt": "...", "{column}": ...}}'


def list_references(spec: SweepSpec, task: Task, count: int | None) -> list[Text]:
    """Return the reference solutions of the first `count` rows, None for all, as completions.

    Of a task that writes its own prompts, those of its validation prompts.

    Raises:
        UsageError: the task, or the layout of the data, has no references.
    """
    if not spec.data.source:
        write: Any = getattr(task, "write_reference", None)
        if write is None:
            raise UsageError(
                f"--reference: the task {spec.task} states no solutions of its problems\n"
                "    fix: write some as lines of --completions FILE"
            )
        count = count or spec.training.validation_prompts
        problems = task.problems("validation", count, PROBLEM_SEED)
        return [Text(str(n), problem, write(problem)) for n, problem in enumerate(problems, 1)]
    layout = describe_layout(spec.data.layout)
    texts: list[Text] = []
    for place, row in islice(
        read_rows(spec.data, layout.columns, (*layout.optional, *layout.solution)), count
    ):
        number = re.split("[: ]", place)[-1]
        try:
            texts.append(Text(number, layout.convert(row), layout.write_reference(row)))
        except RowError as error:
            texts.append(Text(number, None, "", note=f"not scored: {error}"))
    return texts


def measure_texts(spec: SweepSpec, texts: Sequence[Text]) -> list[Text]:
    """Return texts with their tokens, as if the policy of the search space had written them.

    Raises:
        PolicyError: the policy's tokenizer is not on this machine.
    """
    from gdpo_tune.policies.prompts import load_local_tokenizer

    tokenizer: Any = load_local_tokenizer(spec.policy, spec.model.revision)
    if tokenizer is None:
        raise PolicyError(
            f"policy {spec.policy!r} is not on this machine, and lengths are counted in its tokens"
            f"\n    fix: hf download {spec.policy}, or count with another: --set policy=embedded"
        )
    ids: list[list[int]] = tokenizer([text.completion for text in texts], add_special_tokens=False)[
        "input_ids"
    ]
    return [
        replace(text, tokens=(*own, tokenizer.eos_token_id))
        for text, own in zip(texts, ids, strict=True)
    ]


def sample_texts(spec: SweepSpec, count: int) -> tuple[Task, list[Text]]:
    """Return the task, which the caller closes, and what its policy samples; see `sample_policy`.

    Raises:
        PolicyError, DataError: as in a trial.
    """
    cli.limit_devices(spec)  # before torch
    from gdpo_tune.training.trial import sample_policy

    params = dict.fromkeys(spec.space.domains, 0)  # their names switch optional rewards on
    task, sampled = sample_policy(spec.build_trial_config(params, spec.search.seed, Path()), count)
    return task, [Text(str(number), *each) for number, each in enumerate(sampled, 1)]


def score_texts(spec: SweepSpec, task: Task, texts: Sequence[Text]) -> list[dict[str, Any]]:
    """Score texts in batches as large as those of a trial.

    Returns:
        For each text in order, `place`, `prompt`, `completion`, `rewards`, `metrics` and `detail`.

    Raises:
        TaskFileError: a task in a file gives no rewards that a trial could use.
    """
    scored: dict[int, dict[str, Any]] = {}
    present = [row for row, text in enumerate(texts) if text.problem is not None]
    size = spec.training.completions_per_step
    for batch in (present[start : start + size] for start in range(0, len(present), size)):
        given = [texts[row] for row in batch]
        problems = [cast("Problem", text.problem) for text in given]
        try:
            tokens = [text.tokens for text in given]
            completions, lengths = [text.completion for text in given], list(map(len, tokens))
            scores = call_score(task, problems, completions, lengths, CallContext(tokens))
        except TrialFailure as error:  # what a function returned is no reward
            text = str(error).removeprefix(f"{spec.task}: ")
            raise TaskFileError(f"{spec.task}: {text}") from error
        except GdpoTuneError:
            raise
        except Exception as error:  # of a user's own class
            reason = f"score() raised {task_files.describe_error(error)}, which ends a trial"
            raise TaskFileError(f"{spec.task}: {reason}") from error
        for index, row in enumerate(batch):
            details = [describe_result(scores.results[index])] if scores.results else []
            for name, failed in scores.failures.items():
                if failed.count and scores.rewards[name][index] is None:
                    details.append(f"reward {name} raised: {failed.first}")
            rewards = {name: column[index] for name, column in scores.rewards.items()}
            metrics = {name: column[index] for name, column in scores.metrics.items()}
            for name, value in {**metrics, **rewards}.items():
                if value is not None and not math.isfinite(value):
                    details.append(f"{name} is {value}, which ends a trial")
            scored[row] = {
                "rewards": _replace_infinite(rewards),
                "metrics": _replace_infinite(metrics),
                "detail": "; ".join(details),
            }
    missing = {"rewards": dict.fromkeys(task.rewards), "metrics": dict.fromkeys(task.metrics)}
    return [
        {
            "place": text.place,
            "completion": text.completion,
            **scored.get(row, {**missing, "detail": text.note}),
        }
        for row, text in enumerate(texts)
    ]


def _replace_infinite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return values with None for NaN and infinities, which JSON lacks."""
    return {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}


def describe_result(result: Result | None) -> str:
    """Return the sandbox's verdict on a program in one line; its detail comes from the program."""
    if result is None:
        return "no program"
    passed, detail = result.verdicts.count("passed"), " ".join(result.untrusted_detail.split())
    verdict = f"{result.status} ({passed} of {len(result.verdicts)} tests)"
    return f"{verdict}: {make_printable(detail)}" if detail else verdict


if __name__ == "__main__":
    cli.run_command(main)
