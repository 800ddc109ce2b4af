"""Programs in completions, run in the sandbox that an export brings along."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gdpo_tune.sandbox import Result, Sandbox
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.execution import open_sandbox, run_programs

SANDBOX: Any = SimpleNamespace()
"""Settings of the sandbox, by the names of the section `sandbox:`."""
SERVICE = "SANDBOX_FUSION_URL"
"""Environment variable with the address of a service that runs the programs instead."""


def run_programs_once(
    problems: Sequence[Problem], completions: Sequence[str]
) -> list[Result | None]:
    """Run the program of each of N completions; the result is None if there is no program.

    Raises:
        SandboxUnavailable: this machine offers no isolation, so nothing was run.
    """
    return run_programs(_open_own_sandbox(os.getpid()), SANDBOX, problems, completions)


@functools.cache
def _open_own_sandbox(process: int) -> Sandbox:
    """Start the sandbox of a process, which ends with it: a fork needs its own."""
    url = os.environ.get(SERVICE, "")
    service = {"type": "external", "url": url} if url else {}
    settings: Any = SimpleNamespace(**{**vars(SANDBOX), **service})
    sandbox = open_sandbox(settings)
    atexit.register(sandbox.close)
    return sandbox
