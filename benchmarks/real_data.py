r"""Real data sets: what is read of each, and whether its own solutions and graders agree with ours.

    python benchmarks/real_data.py DIRECTORY [--math-rule math_equivalence.py]
    python benchmarks/real_data.py --small

Each data file in DIRECTORY is read with one `data:` section: that of `SECTIONS` for files of these
names, else the one that `gdpo-tune init --data FILE` proposes. Then every solution in the file
is scored by the rewards of its task; solutions of HumanEval also as bodies alone. Rows with
`completions` and `right`, answers of a model and the verdicts of another grader, are scored too.

--math-rule compares equality of mathematical answers with Math-Verify and with MATH's own judge, a
file of github.com/hendrycks/math: references against themselves, against each other and rewritten.
Verdicts that differ from those of Math-Verify are printed. --small does all but that with small
files that ship with the tests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
SECTIONS: dict[str, DataSettings] = {
    "aime24.jsonl": DataSettings(layout="math"),
    "amc23.jsonl": DataSettings(layout="math"),
    "asdiv.jsonl": DataSettings(layout="asdiv"),
    "college_math.jsonl": DataSettings(layout="question_answer"),
    "gaokao2023en.jsonl": DataSettings(layout="question_answer"),
    "graded_math.jsonl": DataSettings(layout="math"),
    "gsm8k.jsonl": DataSettings(layout="gsm8k"),
    "humaneval.jsonl": DataSettings(layout="humaneval"),
    "mawps.jsonl": DataSettings(layout="mawps"),
    "mbpp.jsonl": DataSettings(layout="mbpp"),
    "minerva_math.jsonl": DataSettings(layout="math"),
    "olympiadbench.jsonl": DataSettings(layout="olympiadbench"),
    "rlla_sft.json": DataSettings(layout="rlla_sft"),
    "svamp_columns.jsonl": DataSettings(layout="svamp"),
    "svamp_gsm8k.jsonl": DataSettings(layout="gsm8k"),
    "toolrl_test.parquet": DataSettings(layout="toolrl"),
}
"""File -> its `data:` section without the source."""
BODIES = "humaneval"
"""Layout whose solutions are bodies of functions."""
MOST_PAIRS = 500
"""References of a file that are compared with others."""
BATCH = 512
SEED = 0


@dataclass(frozen=True)
class Row:
    """What was found in one file."""

    file: str
    section: str
    rows: int
    unusable: int
    """Rows that give no problem."""
    references: int
    right: int
    """References that earn full marks."""
    graded: int
    agreeing: int
    seconds: float


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
    files = [file for file in list_data_files(directory) if file.parent == directory]
    table: list[Row] = []
    golds: dict[str, list[str]] = {}
    print(
        f"{'file':22}{'rows':>6}{'unusable':>9}{'references':>13}{'bodies':>10}{'graded':>10}{'s':>7}"
    )
    for file in files:
        data = choose_section(file)
        for is_body in (False, True) if data.layout == BODIES else (False,):
            found, answers, wrong = measure_file(data, is_body=is_body)
            table.append(found)
            golds[file.name] = answers
            shares = (f"{found.right}/{found.references}", "", "")
            if is_body:
                shares = ("", shares[0], "")
            elif found.graded:
                shares = (shares[0], "", f"{found.agreeing}/{found.graded}")
            cells = "".join(
                f"{cell:>{width}}" for cell, width in zip(shares, (13, 10, 10), strict=True)
            )
            print(
                f"{file.name:22}{found.rows:6}{found.unusable:9}{cells}{found.seconds:7.1f}",
                flush=True,
            )
            for line in wrong[:5]:
                print(f"    {line}")
    pairs = compare_equality(golds, options.math_rule) if options.math_rule else {}
    print(json.dumps({"files": [asdict(row) for row in table], "equality": pairs}))


def choose_section(file: Path) -> DataSettings:
    """Return the `data:` section of a file."""
    section = SECTIONS.get(file.name) or propose_layout(str(file), None, None)
    if section is None:
        raise SystemExit(f"{file}: no layout fits")
    return section.replace(source=str(file))


def measure_file(data: DataSettings, *, is_body: bool) -> tuple[Row, list[str], list[str]]:
    """Return what was found, right answers of mathematics, and what earned less than full marks."""
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
    verdicts = [right for _, right in graded]
    found = Row(
        Path(data.source).name,
        ", ".join(
            f"{key}: {value}"
            for key, value in data.model_dump().items()
            if value and key in ("layout", "columns", "prompt_template")
        ),
        len(references),
        len(references) - len(usable),
        len(scorable),
        sum(marks[: len(scorable)]),
        len(graded),
        sum(map(bool.__eq__, marks[len(scorable) :], verdicts)),
        time.perf_counter() - began,
    )
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

    spec = importlib.util.spec_from_file_location("math_rule", rule)
    assert spec is not None
    assert spec.loader is not None
    judge: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)
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
            return bool(judge.is_equiv(*plain))
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
