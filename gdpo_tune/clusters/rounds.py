"""Ticks over the files of a folder, for `tick` and `serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gdpo_tune.clusters.console import print_events
from gdpo_tune.clusters.load_schedules import ScheduledSweep, load_sweeps
from gdpo_tune.clusters.tick import Clock, Desk, open_desk, tick
from gdpo_tune.core.errors import GdpoTuneError


class Rounds:
    """Ticks over the files of one folder, which remember what they have read and said."""

    def __init__(self, folder: str, clock: Clock) -> None:
        self.folder = folder
        self._clock = clock
        self._desks: dict[tuple[str, str], Desk] = {}
        self._said: set[str] = set()

    def once(self) -> int:
        """One tick of every sweep; return the exit status."""
        try:
            loaded = load_sweeps(self.folder)
        except GdpoTuneError as error:
            self._say([str(error)])
            return error.exit_status
        errors: list[GdpoTuneError] = [] if loaded.error is None else [loaded.error]
        texts = [str(error) for error in errors]
        for sweep in loaded.sweeps:
            found = self._errors_of(sweep)
            errors += found
            texts += [f"{sweep.file}: {error}" for error in found]
        self._say(texts)
        return worst(errors)

    def _errors_of(self, sweep: ScheduledSweep) -> list[GdpoTuneError]:
        """Tick for a sweep; return what went wrong, which keeps no other sweep from running."""
        try:
            return self._tick(sweep)
        except (GdpoTuneError, OSError) as error:
            self._desks.pop((sweep.storage, sweep.name), None)  # read all of it again
            return [error if isinstance(error, GdpoTuneError) else GdpoTuneError(str(error))]

    def _tick(self, sweep: ScheduledSweep) -> list[GdpoTuneError]:
        place = (sweep.storage, sweep.name)
        desk = self._desks.get(place)
        if desk is None:
            desk = self._desks[place] = open_desk(sweep, self._clock)
        desk.sweep = sweep
        desk.refresh()
        desk.added.clear()
        desk.trouble.clear()
        try:
            tick(desk)
        finally:
            print_events(sweep.name, desk.added)
        return list(desk.trouble)

    def _say(self, texts: Sequence[str]) -> None:
        """Print errors that were not there the last time."""
        for text in dict.fromkeys(texts):
            if text not in self._said:
                print(f"error: {text}", file=sys.stderr, flush=True)
        self._said = set(texts)


def worst(errors: Sequence[GdpoTuneError]) -> int:
    """The exit status of several errors: what must be mended counts for more than what may pass."""
    return min((error.exit_status for error in errors), default=0)
