r"""Real data sets: what is read of each, and whether its own solutions and graders agree with ours.

    python benchmarks/real_data.py DIRECTORY [--math-rule math_equivalence.py]
    python benchmarks/real_data.py --small

Each data file in DIRECTORY is read with the layout of `LAYOUTS` for files of these names, else with
the section that `gdpo-tune init --data FILE` proposes. Then every solution in the file is scored by
the rewards of its task; solutions of HumanEval also as bodies alone. Rows with `completions` and
`right`, answers of a model and the verdicts of another grader, are scored too.

--math-rule compares equality of mathematical answers with Math-Verify and with MATH's own judge, a
file of github.com/hendrycks/math: references against themselves, against each other and rewritten.
Verdicts that differ from those of Math-Verify are printed. --small does all but that with small
files that ship with the tests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import runpy
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gdpo_tune.core import registry
from gdpo_tune.core.files import list_data_files
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.task_files import build_task
from gdpo_tune.tasks.answers import is_same_answer
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data_rows import read_rows
from gdpo_tune.tasks.dataset import propose_layout
from gdpo_tune.tasks.references import Reference, read_references

SMALL = Path(__file__).parents[1] / "tests" / "data"
LAYOUTS = {
    "aime24.jsonl": "math",
    "amc23.jsonl": "math",
    "asdiv.jsonl": "asdiv",
    "college_math.jsonl": "question_answer",
    "gaokao2023en.jsonl": "question_answer",
    "graded_math.jsonl": "math",
    "gsm8k.jsonl": "gsm8k",
    "humaneval.jsonl": "humaneval",
    "mawps.jsonl": "mawps",
    "mbpp.jsonl": "mbpp",
    "minerva_math.jsonl": "math",
    "olympiadbench.jsonl": "olympiadbench",
    "rlla_sft.json": "rlla_sft",
    "svamp_columns.jsonl": "svamp",
    "svamp_gsm8k.jsonl": "gsm8k",
    "toolrl_test.parquet": "toolrl",
}
"""File -> the layout in its `data:` section."""
BODIES = "humaneval"
"""Layout whose solutions are bodies of functions."""
MOST_PAIRS = 500
"""References of a file that are compared with others."""
BATCH = 512
SEED = 0


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--math-rule", type=Path, metavar="FILE")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    directory: Path = SMALL if options.small else options.directory
    if directory is None:
        parser.error("name a directory of data files, or --small")
    table: list[dict[str, Any]] = []
    golds: dict[str, list[str]] = {}
    for file in list_data_files(directory):
        if file.parent != directory:
            continue
        data = choose_section(file)
        for is_body in (False, True) if data.layout == BODIES else (False,):
            found, golds[file.name], wrong = measure_file(data, is_body=is_body)
            table.append({"file": file.name, "bodies": is_body, **found})
            print(", ".join(f"{name} {value}" for name, value in table[-1].items()), flush=True)
            for line in wrong[:5]:
                print(f"    {line}")
    pairs = compare_equality(golds, options.math_rule) if options.math_rule else {}
    print(json.dumps({"benchmark": "real_data", "files": table, "equality": pairs}))


def choose_section(file: Path) -> DataSettings:
    """Return the `data:` section of a file."""
    if file.name in LAYOUTS:
        return DataSettings(source=str(file), layout=LAYOUTS[file.name])
    section = propose_layout(str(file), None, None)
    if section is None:
        raise SystemExit(f"{file}: no layout fits")
    return section.replace(source=str(file))


def measure_file(
    data: DataSettings, *, is_body: bool
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return what was found, right answers of mathematics, and what earned less than full marks.

    `unusable` rows give no problem; `right` references earn full marks.
    """
    layout = registry.describe_layout(data.layout)
    began = time.perf_counter()
    references = list(read_references(data))
    usable = [one for one in references if one.problem is not None]
    scorable = [one for one in usable if not one.reason]
    graded = list(read_graded(data, usable))
    if is_body:
        bodies = (row["canonical_solution"] for _, row in read_rows(data, layout))
        scorable = [
            one._replace(completion=f"```python\n{body}```")
            for one, body in zip(scorable, bodies, strict=True)
        ]
    with build_task(layout.tasks[0], TrainingSettings(), SandboxSettings(), data) as task:
        texts = [(one.problem, one.completion) for one in scorable]
        values = [*score(task, texts), *score(task, [text for text, _ in graded])]
    full = next(iter(task.reward_funcs.values())).high
    marks = [value == full for value in values]
    wrong = [
        f"{one.place}: {one.completion[-60:]!r}"
        for one, right in zip(scorable, marks, strict=False)
        if not right
    ]
    section = data.model_dump(include={"layout", "columns", "prompt_template"})
    found = {
        "section": ", ".join(f"{key}: {value}" for key, value in section.items() if value),
        "rows": len(references),
        "unusable": len(references) - len(usable),
        "references": len(scorable),
        "right": sum(marks[: len(scorable)]),
        "graded": len(graded),
        "agreeing": sum(map(bool.__eq__, marks[len(scorable) :], (right for _, right in graded))),
        "seconds": round(time.perf_counter() - began, 1),
    }
    answers = [
        one.problem.data["answer"] for one in usable if one.problem and "answer" in one.problem.data
    ]
    return found, answers, wrong


def read_graded(
    data: DataSettings, references: Sequence[Reference]
) -> Iterator[tuple[tuple[Problem, str], bool]]:
    """Yield problem, completion and verdict of each answer that another grader has judged."""
    if not Path(data.source).name.endswith(".jsonl"):
        return
    lines = Path(data.source).read_text(encoding="utf-8").split("\n")
    for line, one in zip(filter(None, lines), references, strict=False):
        row: dict[str, Any] = json.loads(line)
        for completion, right in zip(row.get("completions", ()), row.get("right", ()), strict=True):
            if one.problem:
                yield (one.problem, completion), bool(right)


def score(task: Any, texts: Sequence[tuple[Problem | None, str]]) -> Iterator[float | None]:
    """Yield the metric of the first reward for each text."""
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        problems, completions = zip(*batch, strict=True)
        # As in a sweep, whose held-out metric also counts answers without a tool call.
        yield from task.score(problems, completions, [1] * len(batch)).metrics[task.rewards[0]]


# Equality of answers, beside its peers ------------------------------------------------------------


def compare_equality(golds: dict[str, list[str]], rule: Path) -> dict[str, Any]:
    """Print and return the verdicts of this package, Math-Verify and MATH's judge on pairs."""
    from math_verify import parse, verify

    judge = runpy.run_path(str(rule))
    rng = random.Random(SEED)
    pairs: list[tuple[str, str, str]] = []
    for answers in golds.values():
        for gold in rng.sample(answers, min(MOST_PAIRS, len(answers))):
            pairs += [("itself", gold, gold), ("rewritten", gold, rewrite(gold, rng))]
            pairs.append(("another", gold, rng.choice(answers)))

    def ask_math_verify(gold: str, answer: str) -> bool:
        marked = [text if "$" in text else f"${text}$" for text in (gold, answer)]
        return verify(*(parse(text) for text in marked))

    def ask_math_rule(gold: str, answer: str) -> bool:
        plain = [text.strip().removeprefix("$").removesuffix("$") for text in (gold, answer)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(AssertionError):
            return bool(judge["is_equiv"](*plain))
        return False

    began = time.perf_counter()
    ours = [is_same_answer(answer, gold) for _, gold, answer in pairs]
    seconds = time.perf_counter() - began
    count: Counter[str] = Counter()
    for (kind, gold, answer), own in zip(pairs, ours, strict=True):
        library, rule_says = ask_math_verify(gold, answer), ask_math_rule(gold, answer)
        count[f"{kind}: pairs"] += 1
        count[f"{kind}: equal"] += own
        count[f"{kind}: as Math-Verify"] += own == library
        count[f"{kind}: as MATH"] += own == rule_says
        if own != library:
            print(f"{kind}: {own}, Math-Verify {library}, MATH {rule_says}: {gold!r} | {answer!r}")
    for name, value in count.items():
        print(f"{name:32}{value:7}")
    return {**count, "seconds": round(seconds, 1)}


def rewrite(answer: str, rng: random.Random) -> str:
    """Return an answer that is written in another way and equals it."""
    ways = [answer.replace(r"\frac", r"\dfrac"), f"{answer}.", answer.replace("^{2}", "^2")]
    ways.append(answer.replace("$", "") if "$" in answer else f"${answer}$")
    if re.fullmatch(r"-?\d+(\.0+)?", answer):
        ways += [f"{float(answer):.2f}", f"{int(float(answer)):,}"]
    return rng.choice(ways)


if __name__ == "__main__":
    main()
