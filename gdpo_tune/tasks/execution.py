"""Execution of code problems: the sandbox of a sweep, and the job that a program becomes.

Apart from the task, because describing a task need not import the sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.core.settings import SandboxSettings
from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits, Result, Sandbox, Stream
from gdpo_tune.sandbox import UnsafeNoIsolationSandbox as UnsafeSandbox
from gdpo_tune.tasks.answers import extract_code
from gdpo_tune.tasks.base import Problem


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
    """Return the policy's program with every test of its problem; see `code_tests`."""
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
