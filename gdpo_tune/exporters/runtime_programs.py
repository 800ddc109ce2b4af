"""Programs in completions, run in the sandbox that an export carries beside this module."""

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

SERVICE = "SANDBOX_FUSION_URL"
"""Environment variable with the address of a service that runs the programs instead."""


class ProgramRunner:
    """A sandbox with the settings of the section `sandbox:`, opened once a process: a fork needs
    its own."""

    def __init__(self, **settings: Any) -> None:
        url = os.environ.get(SERVICE, "")
        service = {"type": "external", "url": url} if url else {}
        self._settings: Any = SimpleNamespace(**{**settings, **service})

    def __call__(
        self, problems: Sequence[Problem], completions: Sequence[str]
    ) -> list[Result | None]:
        """Run the program of each of N completions; the result is None if there is no program.

        Raises:
            SandboxUnavailable: this machine offers no isolation, so nothing was run.
        """
        return run_programs(self._open(os.getpid()), self._settings, problems, completions)

    @functools.cache  # noqa: B019 - one runner a process, which lives as long as it does
    def _open(self, process: int) -> Sandbox:
        sandbox = open_sandbox(self._settings)
        atexit.register(sandbox.close)
        return sandbox
