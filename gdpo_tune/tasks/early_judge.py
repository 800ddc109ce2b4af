"""Programs that run while other completions are still being sampled.

A verdict depends on a program and its tests alone, so it may be found before it is asked for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from gdpo_tune.core import compute_lock
from gdpo_tune.tasks.base import Problem

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result

Run = Callable[[Sequence[Problem], Sequence[str]], list["Result | None"]]
"""Runs the program of each of N completions; see `execution.run_programs`."""
_Key = tuple[str, str]
"""Prompt and completion."""
_logger = logging.getLogger(__name__)


class EarlyJudge:
    """Runs programs in a thread of its own, and keeps each result until it is collected once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="early-judge")
        self._lock = threading.Lock()
        self._waiting: list[tuple[Problem, str, Future[Result | None]]] = []
        self._results: dict[_Key, Future[Result | None]] = {}

    def begin(self, problem: Problem, completion: str) -> None:
        """Run the program of a completion as soon as possible, unless it runs already."""
        key = (problem.prompt, completion)
        with self._lock:
            if key in self._results:
                return
            future: Future[Result | None] = Future()
            self._results[key] = future
            self._waiting.append((problem, completion, future))
        self._thread.submit(self._run_waiting)

    def collect(
        self, problems: Sequence[Problem], completions: Sequence[str]
    ) -> list[Result | None]:
        """Return the result of each of N completions; those that did not begin run now.

        So do those whose early run raised: other trials may share that run, but not this one.
        """
        keys = [(one.prompt, text) for one, text in zip(problems, completions, strict=True)]
        with self._lock:
            begun = {
                key: self._results.pop(key) for key in dict.fromkeys(keys) if key in self._results
            }
        with compute_lock.yield_lock():
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
        """Run all programs that wait by now as one batch, so that the sandbox shares it out."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        if not taken:
            return
        try:
            results = self._run(
                [problem for problem, _, _ in taken], [text for _, text, _ in taken]
            )
        except BaseException as error:
            for _, _, future in taken:  # `collect` runs these once more
                future.set_exception(error)
            raise
        for (_, _, future), result in zip(taken, results, strict=True):
            future.set_result(result)
