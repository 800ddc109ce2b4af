"""Code problems: their data, the sandbox of a sweep, and the job that a program becomes.

`Problem.data` of a code problem from a data set:

    function  the function to write; empty for a program that reads and prints
    head      Python above the policy's program, such as imports that are taken for granted
    tail      Python below it
    asserts   Python statements, at least one `assert` each
    streams   [input, expected output, tolerance]: the program is run on the input

There are streams, or asserts. The first `MOST_TESTS` tests of a problem are kept: all of
them share one candidate's limits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits, Result, Sandbox, Stream
from gdpo_tune.sandbox import UnsafeNoIsolationSandbox as UnsafeSandbox
from gdpo_tune.sandbox.asserts import read_assert
from gdpo_tune.tasks.answers import extract_code
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data_rows import RowError

if TYPE_CHECKING:
    from gdpo_tune.core.settings import SandboxSettings

MOST_TESTS = 20
STREAMS_NOTE = "Read the input from standard input and print the answer.\n"
"""Ends the prompt of a problem that has streams."""
TOLERANCE = 1e-6
"""Of a printed number that is expected with a decimal point: other ways to print it are right."""
_NUMBER_WITH_POINT = re.compile(r"(?<!\S)[-+]*\d+\.\d+(?!\S)")


def build_code_problem(
    prompt: str,
    family: str,
    *,
    function: str = "",
    head: str = "",
    tail: str = "",
    asserts: Sequence[str] = (),
    streams: Sequence[tuple[str, str]] = (),
) -> Problem:
    """Return a code problem; streams are pairs of input and expected output."""
    data = {
        "function": function,
        "head": head,
        "tail": tail,
        "asserts": list(asserts[:MOST_TESTS]),
        "streams": [
            [*stream, TOLERANCE if _NUMBER_WITH_POINT.search(stream[1]) else 0.0]
            for stream in streams[:MOST_TESTS]
        ],
    }
    return Problem(prompt, family, data)


def check_assert(source: str, column: str) -> str:
    """Return a test that the sandbox can run.

    Raises:
        RowError: it is not Python, or nothing in it can fail.
    """
    try:
        read_assert(source)
    except ValueError as error:
        raise RowError(column, str(error).partition("\n")[0]) from error
    return source


def check_streams(
    inputs: Sequence[str], outputs: Sequence[str], column: str
) -> list[tuple[str, str]]:
    """Return pairs of input and expected output that the sandbox can run.

    Raises:
        RowError: there are more inputs than outputs, or fewer; nothing is expected, so that every
            program would pass; or a text is not Unicode.
    """
    if len(inputs) != len(outputs):
        raise RowError(column, f"{len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    for pair in pairs:
        try:
            Stream(*pair)
        except ValueError as error:
            raise RowError(column, str(error).partition("\n")[0]) from error
    return pairs


def open_sandbox(settings: SandboxSettings) -> Sandbox:
    """Start the sandbox that `settings.type` names; the caller closes it.

    Raises:
        SandboxUnavailable: this machine, or the service, offers no such sandbox.
    """
    match settings.type:
        case "local":
            return CodeSandbox(settings.workers, modules=settings.modules)
        case "unsafe_no_isolation":
            return UnsafeSandbox(settings.workers, modules=settings.modules)
        case "external":
            # Late, because it imports an HTTP client.
            from gdpo_tune.sandbox.external import ExternalSandbox

            return ExternalSandbox(settings.url, workers=settings.workers)


def run_programs(
    sandbox: Sandbox,
    settings: SandboxSettings,
    problems: Sequence[Problem],
    completions: Sequence[str],
) -> list[Result | None]:
    """Run the program of each of N completions; the result is None if there is no program.

    A program that answers the same problem several times is run once.
    """
    keys = [
        (problem.prompt, extract_code(completion, problem.data["function"]))
        for problem, completion in zip(problems, completions, strict=True)
    ]
    by_prompt = {problem.prompt: problem for problem in problems}
    limits = Limits(settings.cpu_seconds, settings.wall_seconds, settings.memory_mb << 20)
    distinct = [key for key in dict.fromkeys(keys) if key[1]]
    jobs = [build_job(by_prompt[prompt], program, limits) for prompt, program in distinct]
    results = sandbox.run_batch(jobs) if jobs else []
    return list(map(dict(zip(distinct, results, strict=True)).get, keys))


def build_job(problem: Problem, program: str, limits: Limits) -> Job:
    """Return the policy's program with every test of its problem; see above."""
    data = problem.data
    if "visible" in data:  # a problem of `code_problems`
        tests = [*data["visible"], *data["hidden"]]
        calls = tuple(Call(data["function"], (argument,), value) for argument, value in tests)
        return Job(program, calls, limits=limits)
    return Job(
        "\n".join(part for part in (data["head"], program, data["tail"]) if part),
        asserts=tuple(data["asserts"]),
        streams=tuple(Stream(*stream) for stream in data["streams"]),
        limits=limits,
    )
