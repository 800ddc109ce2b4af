"""Stand-in for `programs` in tasks that run no code."""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.tasks.base import Problem


def run_programs_once(problems: Sequence[Problem], completions: Sequence[str]) -> Sequence[None]:
    """Return no result for each of N completions: this task runs no code."""
    return [None] * len(completions)
