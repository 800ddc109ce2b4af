"""Code problems: their data, the sandbox of a sweep, and the job that a program becomes.

`Problem.data` of a code problem from a data set:

    function  the function to write; empty for a program that reads and prints
    head      Python above the policy's program, such as imports that are taken for granted
    tail      Python below it
    asserts   Python statements, at least one `assert` each
    streams   [input, expected output, tolerance]: the program is run on the input
    judge     rule by which results are compared: `sandbox.jobs.Comparison`
    seconds   CPU seconds of one test by the data set or its judge, for a machine of the speed that
              `measure_slowness` measures by; 0.0 if none are stated
    modules   modules beyond the standard library that the asserts import

There are streams, or asserts. The first `MOST_TESTS` tests of a problem are kept. They share one
candidate's limits, unless `seconds` gives each its own.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits, Result, Sandbox, Stream
from gdpo_tune.sandbox.jobs import read_assert
from gdpo_tune.sandbox.local_sandbox import UnsafeNoIsolationSandbox
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.columns import Row, RowError, get_optional_text, require_list, require_texts
from gdpo_tune.tasks.programs import extract_program, list_bound_names, list_missing_names

if TYPE_CHECKING:
    from gdpo_tune.core.settings import SandboxSettings

RunPrograms = Callable[[Sequence[Problem], Sequence[str]], list[Result | None]]
"""Runs the program of each of N completions; see `run_programs`."""
MOST_TESTS = 20
STREAMS_NOTE = "Read the input from standard input and print the answer.\n"
"""Ends the prompt of a problem that has streams."""
TOLERANCE = 1e-6
"""Of a printed number that is expected with a decimal point: other ways to print it are right."""
_LOOP = "def f():\n    x = 0\n    for i in range(300_000): x = (31 * x + i) % 65521"
"""The program that measures a machine."""
_REFERENCE_SECONDS = 0.02
"""CPU time of that program on the machine of `docs/measurements.md`."""
_MOST_SLOWNESS = 10.0
_logger = logging.getLogger(__name__)
_LONGEST = 86_400.0
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
    comparison: str = "exact",
    seconds: float = 0.0,
) -> Problem:
    """Return a code problem; streams are pairs of input and expected output."""
    asserts = list(asserts[:MOST_TESTS])
    nodes = [node for test in asserts if "import" in test for node in ast.walk(ast.parse(test))]
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    data = {
        "function": function,
        "head": head,
        "tail": tail,
        "asserts": asserts,
        "streams": [
            [*stream, TOLERANCE if _NUMBER_WITH_POINT.search(stream[1]) else 0.0]
            for stream in streams[:MOST_TESTS]
        ],
        "judge": comparison,
        "seconds": seconds,
        "modules": sorted(
            name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names
        ),
    }
    return Problem(prompt, family, data)


def build_stated_problem(prompt: str, row: Row) -> Problem:
    """Return a code problem of the columns `asserts` or `streams`, `function`, `head` and `tail`.

    Raises:
        RowError: the sandbox cannot run these tests.
    """
    asserts = require_texts(row.get("asserts") or [], "asserts")
    listed = require_list(row.get("streams") or [], "streams")
    pairs = [require_list(pair, "streams") for pair in listed]
    if any(len(pair) != 2 for pair in pairs):
        raise RowError("streams", "not pairs of input and expected output")
    if bool(asserts) == bool(pairs):
        raise RowError("asserts", "a program needs asserts, or streams, and not both")
    function, head = get_optional_text(row, "function"), get_optional_text(row, "head")
    return build_code_problem(
        prompt,
        "stated",
        function=function,
        head=head,
        tail=get_optional_text(row, "tail"),
        asserts=[check_assert(each, "asserts", head, function) for each in asserts],
        streams=check_streams([pair[0] for pair in pairs], [pair[1] for pair in pairs], "streams"),
    )


def check_assert(source: str, column: str, head: str = "", function: str = "") -> str:
    """Return a test that the sandbox can run, with what it uses of `head` above it.

    Imports and functions of the head then run beside the test, where the program that defines
    `function` cannot replace them. What needs a class of the head, or names that `import *` gives,
    stays with the program: such a function may make arguments, and nothing else.

    Raises:
        RowError: it is not Python, or nothing in it can fail; it calls another `function` than the
            program's; or the program could replace a function of the head that decides it.
    """
    try:
        is_call = read_assert(source) is not None
    except ValueError as error:
        raise RowError(column, str(error).partition("\n")[0]) from error
    own = {name for node in ast.parse(source).body for name in list_bound_names(node)}
    if function in own or (hasattr(builtins, function) and not is_call):
        raise RowError(column, f"{function} is the test's or Python's, and not the program's")
    return _join_head(source, column, head, function) if head else source


def _join_head(source: str, column: str, head: str, function: str) -> str:
    try:
        statements = ast.parse(head).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source  # nor can a program run below it
    test = ast.parse(source)
    providers = {name: node for node in statements for name in list_bound_names(node)}
    used = providers.keys() & list_missing_names(test) - {function}
    callers = {node.arg for node in ast.walk(test) if isinstance(node, ast.arg)} | {function}
    deciding = list_missing_names(_WithoutInputs(callers).visit(ast.parse(source)))
    taken: set[ast.stmt] = set()
    for name in sorted(used):
        needed = _find_needed(name, providers)
        bound = {each for node in needed for each in list_bound_names(node)}
        missing = {each for node in needed for each in list_missing_names(node)} - bound
        has_class = any(isinstance(node, ast.ClassDef) for node in needed)
        if not missing and not has_class and function not in bound:
            taken |= needed
        elif name in deciding and isinstance(providers[name], ast.FunctionDef):
            raise RowError(column, f"a program could replace {name}, which decides this test")
    parts = [ast.unparse(node) for node in statements if node in taken]
    return "\n".join([*parts, source])


def _find_needed(name: str, providers: Mapping[str, ast.stmt]) -> set[ast.stmt]:
    """Return the statements of a module that a name of it needs, its own included."""
    needed: set[ast.stmt] = set()
    waiting = {name}
    while waiting:
        node = providers.get(waiting.pop())
        if node is not None and node not in needed:
            needed.add(node)
            waiting |= list_missing_names(node)
    return needed


class _WithoutInputs(ast.NodeTransformer):
    """Removes the arguments of calls of the tested function, by its name or a parameter's."""

    def __init__(self, callers: Collection[str]) -> None:
        self._callers = callers

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Return what is called in place of such a call."""
        match node.func:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in self._callers:
                return self.generic_visit(node.func)
            case _:
                return self.generic_visit(node)


def check_streams(inputs: object, outputs: object, column: str) -> list[tuple[str, str]]:
    """Return pairs of input and expected output that the sandbox can run.

    Raises:
        RowError: they are no lists of texts of one length, nothing is expected, so that every
            program would pass, or a text is not Unicode.
    """
    given, expected = require_texts(inputs, column), require_texts(outputs, column)
    if len(given) != len(expected):
        raise RowError(column, f"{len(given)} inputs and {len(expected)} outputs")
    pairs = list(zip(given, expected, strict=True))
    for pair in pairs:
        try:
            Stream(*pair)
        except ValueError as error:
            raise RowError(column, str(error).partition("\n")[0]) from error
    return pairs


def open_sandbox(settings: SandboxSettings) -> Sandbox:
    """Start the sandbox that `settings.type` names; the caller closes it.

    Raises:
        SandboxUnavailable: this machine offers no such sandbox.
    """
    is_unsafe = settings.type == "unsafe_no_isolation"
    kind = UnsafeNoIsolationSandbox if is_unsafe else CodeSandbox
    return kind(settings.workers, modules=settings.modules)


def run_programs(
    sandbox: Sandbox,
    settings: SandboxSettings,
    problems: Sequence[Problem],
    completions: Sequence[str],
) -> list[Result | None]:
    """Run the program of each of N completions; the result is None if there is no program.

    A program that answers the same problem several times is run once.
    """
    by_key: dict[str | int, Problem] = {}
    keys: list[tuple[str | int, str]] = []
    for problem, completion in zip(problems, completions, strict=True):
        key = problem.prompt
        if by_key.setdefault(key, problem) != problem:  # the same prompt with other tests
            key = id(problem)
            by_key[key] = problem
        data = problem.data
        # Generated problems count a program in thoughts that never end; those of data do not.
        reads = "visible" in data
        head = data.get("head", "")
        program = extract_program(completion, data["function"], head, reads_open_thoughts=reads)
        keys.append((key, program))
    limits = Limits(settings.cpu_seconds, settings.wall_seconds, settings.memory_mb << 20)
    distinct = [key for key in dict.fromkeys(keys) if key[1]]
    is_scaled = any(by_key[k].data.get("seconds") for k, _ in distinct)
    slowness = measure_slowness(sandbox) if is_scaled else 1.0
    jobs = [build_program_job(by_key[key], program, limits, slowness) for key, program in distinct]
    results = sandbox.run_batch(jobs) if jobs else []
    return list(map(dict(zip(distinct, results, strict=True)).get, keys))


def run_stated_programs(
    completions: Sequence[str], columns: Mapping[str, Any]
) -> list[Result | None]:
    """Run the program of each of N completions by the columns of `build_stated_problem`.

    Programs of a batch run once, whatever number of reward functions asks for their results.
    """
    from gdpo_tune.core.settings import SandboxSettings  # late: exports do without it

    names = ("prompts", "function", "head", "tail", "asserts", "streams")
    rows = [
        {name: columns[name][row] for name in names if name in columns}
        for row in range(len(completions))
    ]
    settings: Any = columns.get("sandbox_settings") or SandboxSettings()
    return _run_rows(json.dumps([rows, list(completions)]), settings, os.getpid())


@lru_cache(maxsize=1)
def _run_rows(batch: str, settings: Any, process: int) -> list[Result | None]:
    rows, completions = json.loads(batch)
    problems = [build_stated_problem(str(row.get("prompts")), row) for row in rows]
    return run_programs(_share_sandbox(settings, process), settings, problems, completions)


@lru_cache(maxsize=1)
def _share_sandbox(settings: Any, process: int) -> Sandbox:
    """Open a sandbox that ends with this process; a fork has one of its own."""
    sandbox = open_sandbox(settings)
    atexit.register(sandbox.close)
    return sandbox


@lru_cache(maxsize=1)
def measure_slowness(sandbox: Sandbox) -> float:
    """Return how much slower a small program runs than on the reference, at least 1, at best."""
    limits = Limits(cpu_seconds=_REFERENCE_SECONDS * _MOST_SLOWNESS, wall_seconds=60.0)
    results = sandbox.run_batch([Job(_LOOP, (Call("f", (), None),), limits=limits)] * 3)
    seconds = min(result.cpu_seconds for result in results)
    return min(max(1.0, seconds / _REFERENCE_SECONDS), _MOST_SLOWNESS)


def build_program_job(problem: Problem, program: str, limits: Limits, slowness: float = 1.0) -> Job:
    """Return the policy's program with every test of its problem; see above.

    `slowness` scales the seconds that a problem states. They never shorten `limits`.
    """
    data = problem.data
    if "visible" in data:  # a problem that `code` wrote
        tests = [*data["visible"], *data["hidden"]]
        calls = tuple(Call(data["function"], (argument,), value) for argument, value in tests)
        return Job(program, calls, limits=limits)
    if data.get("seconds"):
        each = max(limits.cpu_seconds, data["seconds"] * slowness)
        times = each * max(len(data["streams"]), len(data["asserts"])) / limits.cpu_seconds
        limits = replace(
            limits,
            cpu_seconds=min(limits.cpu_seconds * times, _LONGEST),
            wall_seconds=min(limits.wall_seconds * times, _LONGEST),
            test_cpu_seconds=min(each, _LONGEST),
        )
    head = data["head"]
    if head and "__future__" in program:
        # NOTE: these imports must stand above everything else.
        future = re.compile(r"^from __future__ import .*$", flags=re.MULTILINE)
        head = "\n".join([*future.findall(program), head])
        program = future.sub("", program)
    return Job(
        "\n".join(part for part in (head, program, data["tail"]) if part),
        asserts=tuple(data["asserts"]),
        streams=tuple(Stream(*stream) for stream in data["streams"]),
        limits=limits,
        comparison=data.get("judge", "exact"),
    )


class BackgroundRunner:
    """Runs programs in a thread of its own, and keeps each result until it is gathered once.

    A verdict depends on a program and its tests alone, so it may be found while other completions
    are still being sampled.
    """

    def __init__(self, run: RunPrograms) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="program-runner")
        self._lock = threading.Lock()
        self._waiting: list[tuple[Problem, str, Future[Result | None]]] = []
        self._results: dict[tuple[str, str], Future[Result | None]] = {}

    def submit(self, problem: Problem, completion: str) -> None:
        """Run the program of a completion as soon as possible, unless it runs already."""
        key = (problem.prompt, completion)
        with self._lock:
            if key in self._results:
                return
            future: Future[Result | None] = Future()
            self._results[key] = future
            self._waiting.append((problem, completion, future))
        self._thread.submit(self._run_waiting)

    def gather(
        self, problems: Sequence[Problem], completions: Sequence[str]
    ) -> list[Result | None]:
        """Return the result of each of N completions; those that did not begin run now.

        So do those whose early run raised.
        """
        keys = [(one.prompt, text) for one, text in zip(problems, completions, strict=True)]
        with self._lock:
            begun = {
                key: self._results.pop(key) for key in dict.fromkeys(keys) if key in self._results
            }
        wait(begun.values())
        errors = {key: error for key, future in begun.items() if (error := future.exception())}
        if errors:
            first = next(iter(errors.values()))
            _logger.warning("%d programs run once more: %r", len(errors), first)
        late = [row for row, key in enumerate(keys) if key not in begun or key in errors]
        ran = self._run([problems[row] for row in late], [completions[row] for row in late])
        by_row = dict(zip(late, ran, strict=True))
        return [
            by_row[row] if row in by_row else begun[key].result() for row, key in enumerate(keys)
        ]

    def close(self) -> None:
        """Forget what was not collected, and end the thread."""
        with self._lock:
            self._waiting.clear()
            self._results.clear()
        self._thread.shutdown()

    def _run_waiting(self) -> None:
        # All that wait by now are one batch, so that the sandbox shares it out.
        with self._lock:
            taken, self._waiting = self._waiting, []
        if not taken:
            return
        try:
            results = self._run(
                [problem for problem, _, _ in taken], [text for _, text, _ in taken]
            )
        except BaseException as error:
            for _, _, future in taken:  # `gather` runs these once more
                future.set_exception(error)
            raise
        for (_, _, future), result in zip(taken, results, strict=True):
            future.set_result(result)
