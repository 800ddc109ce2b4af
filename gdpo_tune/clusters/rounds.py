"""Ticks of every sweep of a directory, for `tick` and `serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gdpo_tune.clusters.console import print_events
from gdpo_tune.clusters.load_schedules import ScheduledSweep, load_sweeps
from gdpo_tune.clusters.schedule_context import Clock, ScheduleContext, open_context
from gdpo_tune.clusters.tick import tick
from gdpo_tune.core.errors import GdpoTuneError


class Rounds:
    """Repeated ticks over one directory, with the states and errors of the last round."""

    def __init__(self, directory: str, clock: Clock) -> None:
        self.directory = directory
        self._clock = clock
        self._contexts: dict[tuple[str, str], ScheduleContext] = {}
        self._printed: set[str] = set()

    def tick_all(self) -> int:
        """Tick every sweep once; return the exit status."""
        try:
            loaded = load_sweeps(self.directory)
        except GdpoTuneError as error:
            self._print_errors([str(error)])
            return error.exit_status
        errors: list[GdpoTuneError] = [] if loaded.error is None else [loaded.error]
        texts = [str(error) for error in errors]
        for sweep in loaded.sweeps:
            errors_of_sweep = self._tick(sweep)
            errors += errors_of_sweep
            texts += [f"{sweep.file}: {error}" for error in errors_of_sweep]
        self._print_errors(texts)
        return worst_status(errors)

    def _tick(self, sweep: ScheduledSweep) -> list[GdpoTuneError]:
        """Tick one sweep; return its errors, which keep no other sweep from running."""
        key = (sweep.storage, sweep.name)
        context = self._contexts.pop(key, None)
        try:
            if context is None:
                context = open_context(sweep, self._clock)
            context.sweep, context.events, context.trouble = sweep, [], []
            context.history.refresh()
            try:
                tick(context)
            finally:
                print_events(context)
        except (GdpoTuneError, OSError) as error:
            # the context is not kept: the next tick reads the state again
            return [error if isinstance(error, GdpoTuneError) else GdpoTuneError(str(error))]
        self._contexts[key] = context
        return context.trouble

    def _print_errors(self, texts: Sequence[str]) -> None:
        """Print the errors that were not there in the last round."""
        for text in dict.fromkeys(texts):
            if text not in self._printed:
                print(f"error: {text}", file=sys.stderr, flush=True)
        self._printed = set(texts)


def worst_status(errors: Sequence[GdpoTuneError]) -> int:
    """Return the exit status of several errors: a user's mistake comes before an outage."""
    return min((error.exit_status for error in errors), default=0)
