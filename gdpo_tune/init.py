"""Write a commented search space for a task and a policy: by questions, or by flags.

    python -m gdpo_tune.init
    python -m gdpo_tune.init my_math.yaml --task math --policy Qwen/Qwen2.5-1.5B --gpus 1
    python -m gdpo_tune.init sums.yaml --task sums.py:Sums --yes
    python -m gdpo_tune.init --task mine.py:Mine --data rows.jsonl   # writes mine.py, too

In a terminal it asks for what no flag says; with --yes, or without a terminal, it takes the
defaults. The file is checked as by `sweep` before it is written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.errors import ExitCode, SpecError, UsageError
from gdpo_tune.core.files import (
    expand_path,
    explain_write_errors,
    find_path_problem,
    is_directory,
    write_atomically,
)

if TYPE_CHECKING:
    from gdpo_tune.spec.starter import FirstFile


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__, abbreviations=True)
    text = "file to write (default: TASK.yaml)"
    parser.file("file", text, metavar="FILE.yaml", nargs="?", type=Path)
    parser.add_argument(
        "--task", help="code, math, gsm8k, tools, or a class of your own: path/to/file.py:MyTask"
    )
    parser.add_argument(
        "--policy", help="Hub id or directory (default: the small policy that ships for the task)"
    )
    parser.add_argument("--gpus", type=float, help="GPUs of one trial; fractions share one")
    text = "completions in training that the sweep may sample (default: by the policy)"
    parser.add_argument("--completions", type=int, help=text)
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help="Hub id or file of the prompts, or built-in (the task's); a .jsonl file for a class "
        "in a FILE.py that does not exist yet, which is then written",
    )
    parser.add_argument("--layout", help="columns of that data, such as mbpp (of a file: found)")
    parser.flag("--yes", "ask nothing: take the defaults")
    parser.flag("--force", "replace a file that exists")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write the file that `arguments` and answers describe and return the exit status."""
    options = build_parser().parse_args(arguments)

    from gdpo_tune.core.task_files import is_task_file

    if options.data and options.task and is_task_file(options.task):
        with _provide_class(options.task, options.data) as options.prompts:
            options.data = None
            return _write_space(options)
    options.prompts = {}
    return _write_space(options)


def _write_space(options: argparse.Namespace) -> int:
    from gdpo_tune.core.task_files import is_task_file
    from gdpo_tune.spec import load_spec
    from gdpo_tune.spec.dry_run import describe_time
    from gdpo_tune.spec.machine import count_visible_gpus

    try:
        answers = _collect_answers(options, ask=sys.stdin.isatty() and not options.yes)
    except KeyboardInterrupt:
        print("\nInterrupted. Nothing was written.", file=sys.stderr)
        return ExitCode.INTERRUPTED
    stem = Path(answers.task.partition(":")[0]).stem
    file: Path = options.file or Path(f"{stem}.yaml")
    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{file}: the name of a search space ends with .yaml")
    if problem := find_path_problem(str(file)):
        raise UsageError(f"no file can have that name: {problem}")
    if file.is_dir():
        raise UsageError(f"{file} is a directory\n    fix: write the name of a file")
    if file.exists() and not options.force:
        raise UsageError(f"{file} exists already\n    fix: another name, or --force to replace it")
    text = answers.render(file)
    with TemporaryDirectory() as directory:
        draft = Path(directory) / file.name
        draft.write_text(text)
        try:
            spec = load_spec(draft, needs=[])  # another machine may train
        except SpecError as error:
            raise UsageError(str(error).replace(str(draft), str(file))) from error
    with explain_write_errors("the search space"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    if answers.gpus and not count_visible_gpus(os.environ):
        print(f"{file} asks for GPUs, resources.gpus: {answers.gpus:g}; this machine has none")
    print(f"time: {describe_time(spec)}")
    print(f"wrote {file}. Next:")
    for step in ("score", "sweep") if is_task_file(spec.task) else ("sweep",):
        how = "--completions texts.jsonl" if step == "score" else "--dry-run"
        print(f"  python -m gdpo_tune.{step} {file} {how}")
    print(f"  python -m gdpo_tune.sweep {file}")
    return 0


PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "target", "label")


@contextmanager
def _provide_class(task: str, data: str) -> Generator[dict[str, int]]:
    """Write the class of a task that reads a file of JSON lines, unless its file exists.

    Yield its prompts by key of `training:`, and remove it if an error follows.
    """
    import jinja2  # late: `--help` is light

    from gdpo_tune.core import task_files
    from gdpo_tune.core.settings import TrainingSettings
    from gdpo_tune.tasks import custom, data_rows
    from gdpo_tune.tasks.generation import choose_row_split

    path, name = task_files.split_task_file(task)
    file, source = Path(path), expand_path(data)
    if file.exists():
        print(f"{file.name} exists and is kept: its rows() decide what is read, not --data {data}")
        yield {}
        return
    if source.suffix != ".jsonl":
        raise UsageError(
            f"--data {data}: a class is written for a .jsonl file, with one object on each line\n"
            f"    fix: convert it, or write {file.name} yourself (docs/own_task.md)"
        )
    found: dict[str, None] = {}
    for _, row in data_rows.read_local(data, "", "train", lambda _, columns: [*columns]):
        found |= dict.fromkeys(row)
    prompt = next((c for want in PROMPT_COLUMNS for c in found if c.lower() == want), None)
    if prompt is None:
        raise UsageError(
            f"{data} has the columns {', '.join(found) or 'of no row'}, none of them known as the "
            f"prompt\n    fix: name that column prompt (or {', '.join(PROMPT_COLUMNS[1:])})"
        )
    columns = [c for c in found if c not in (prompt, "prompt", "tools", *custom.RESERVED)]
    answer = next((c for want in ANSWER_COLUMNS for c in columns if c.lower() == want), None)
    template = jinja2.Template(
        (Path(__file__).parent / "spec" / "templates" / "task.py.jinja").read_text(),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    way = os.path.relpath(source.absolute(), file.parent)
    text = template.render(
        file=source.name, path=way, name=name, prompt=prompt, columns=columns, answer=answer
    )
    with explain_write_errors("the task"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    try:
        prompts = custom.collect_rows(task_files.load_class(task)(TrainingSettings()).rows())
        sizes = Counter(map(choose_row_split, prompts))
        print(f"wrote {file.name}: the prompt is {prompt}, rewards are yours to write")
        yield {f"{split}_prompts": sizes[split] for split in ("train", "validation", "test")}
    except BaseException:
        compiled = Path(cache_from_source(str(file)))
        file.unlink(missing_ok=True)
        compiled.unlink(missing_ok=True)
        with suppress(OSError):  # others are there, or bytecode is not written
            compiled.parent.rmdir()
        raise


def _collect_answers(options: argparse.Namespace, *, ask: bool) -> FirstFile:
    from gdpo_tune.core.registry import POLICIES, TASKS, describe_layout
    from gdpo_tune.core.task_files import is_task_file
    from gdpo_tune.core.text import join_names, suggest
    from gdpo_tune.spec.machine import count_visible_gpus
    from gdpo_tune.spec.starter import BUILT_IN, FirstFile
    from gdpo_tune.tasks.dataset import collect_data, propose_layout

    def answer(value: str | None, question: str, default: str) -> str:
        if value is not None or not ask:
            return default if value is None else value
        from rich.prompt import Prompt

        try:
            return Prompt.ask(question, default=default) or default
        except EOFError:
            print()
            raise UsageError("no answer, so nothing was written") from None

    found = propose_layout(options.data or "", options.task, options.layout)
    usual = describe_layout(found.layout).tasks[0] if found else "code"
    task = answer(options.task, "Task: code, math, gsm8k, tools or FILE.py:CLASS", usual)
    if task not in TASKS and not is_task_file(task):
        guess = suggest(task, TASKS)
        raise UsageError(f"task {task!r} is unknown: {guess}there are {join_names(TASKS)}")
    first = FirstFile(task)
    policy = answer(options.policy, "Policy: Hub id, directory or", first.info.embedded)
    first = FirstFile(task, policy)
    is_path = policy.startswith(("/", ".", "~", "$")) or policy.count("/") > 1
    if is_path and not is_directory(expand_path(policy)):
        raise UsageError(
            f"--policy {policy}: no such directory, and not the id of a policy on the Hub\n"
            "    fix: write the directory of a policy that save_pretrained has written, or an id "
            "such as Qwen/Qwen2.5-1.5B-Instruct"
        )
    usual = f"{int(first.chosen_policy not in POLICIES and count_visible_gpus(os.environ) > 0)}"
    gpus = _read_number(answer(_as_text(options.gpus), "GPUs of one trial", usual), "gpus", 0)
    data = answer(options.data, "Prompts: Hub id, file or built-in", first.suggest_data())
    usual = str(FirstFile(task, policy, gpus).usual_completions)
    text = answer(_as_text(options.completions), "Budget: completions in training", usual)
    completions = int(_read_number(text, "completions", 1))
    if options.layout and data == BUILT_IN:
        raise UsageError(
            f"--layout {options.layout} has no effect: the task writes its prompts itself\n"
            "    fix: name their source too, such as --data openai/gsm8k, or leave --layout out"
        )
    found = propose_layout(data, task, options.layout)
    if found is None:
        layout = options.layout or ""
        return FirstFile(task, policy, gpus, completions, data, layout, prompts=options.prompts)
    collected = collect_data(found)
    named = "".join(f", {name} is {column}" for name, column in found.columns.items())
    print(f"{data}: layout {found.layout}{named}; {collected}")
    return FirstFile(
        *(task, policy, gpus, completions, data, found.layout, found.columns),
        prompts={f"{name}_prompts": len(each) for name, each in collected.splits.items()},
    )


def _as_text(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _read_number(text: str, name: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= least or value == float("inf") or (name == "completions" and value % 1):
        kind = "a whole number" if name == "completions" else "a number"
        raise UsageError(f"{name} {text!r}: write {kind} of at least {least:g}")
    return value


if __name__ == "__main__":
    cli.run_command(main)
