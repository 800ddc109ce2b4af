"""Terminal output while a sweep runs: a live table in a terminal, one line per event elsewhere."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from datetime import datetime
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from gdpo_tune.core import events
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.text import format_duration, format_estimate, format_number
from gdpo_tune.core.trials import TrialRecord, format_parts, title_candidate
from gdpo_tune.display.tables import build_console, build_front_table, build_running_table
from gdpo_tune.results.front_table import build_front_row
from gdpo_tune.results.live import ENDED, LiveState
from gdpo_tune.results.wording import describe_parameters, describe_role, name_state
from gdpo_tune.spec import SweepSpec

MAX_MEMBERS = 12
"""Rows of the front in the live table."""
PRINTED = events.SearchStarted | events.IncidentOccurred | events.SweepSteered
"""Events that are printed above the live table too."""


class LiveDisplay(CloseableResource):
    """Listener that shows a sweep while it runs. Use it as a context manager.

    In a terminal its own thread draws, so that an event costs next to nothing. `tracking` returns
    the state of MLflow, or None where nothing is tracked.
    """

    def __init__(
        self,
        spec: SweepSpec,
        console: Console | None = None,
        tracking: Callable[[], events.TrackingState | None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._console = console or build_console()
        self._state = LiveState(spec.list_objectives(), spec.training.steps)
        self._tracking = tracking
        self._printed_kind = "up to date"
        """Kind of the tracking state that was printed last."""
        self._live: Live | None = None
        self._started = time.monotonic()
        self._waits_for = "starting Ray" if self._console.is_terminal else ""
        """Step of the start that is under way; empty once a trial runs."""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            screen = self._console
            self._live = Live(
                get_renderable=self.render, console=screen, refresh_per_second=2, transient=True
            )
            self._live.start()
        return self

    def close(self) -> None:
        """Stop drawing and free the terminal; may be called more than once."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: events.Event) -> None:
        """Apply one event, and print it where no live table shows it."""
        self._state.apply(event)
        if isinstance(event, events.SearchStarted | events.TrialStarted):
            self._waits_for = "starting trials" * isinstance(event, events.SearchStarted)
        if isinstance(event, events.SweepStarted) and event.moved_aside is not None:
            note = f"the earlier sweep of this name is now in {event.moved_aside}"
            self._console.print(Text(note), soft_wrap=True)
        if self._console.is_terminal and not isinstance(event, PRINTED):
            return
        lines, state = [self._describe_event(event)], self._tracking()
        if state is not None and state.kind != self._printed_kind:
            self._printed_kind = state.kind
            lines.append(str(state))
        for line in filter(None, lines):
            clock = datetime.now().astimezone().strftime("%H:%M:%S")
            # Text, since a reason may hold what rich would take for markup.
            self._console.print(Text(f"{clock} {line}"), soft_wrap=True, highlight=False)

    @property
    def note(self) -> str:
        """How the sweep ended, in a few words; empty until it has."""
        return self._state.ending

    def render(self) -> RenderableType:
        """Return what the terminal shows now."""
        front, counts = self._state.get_front(), self._state.count_states()
        elapsed = format_duration(time.monotonic() - self._started)
        head = f": {self._describe_counts()}, {elapsed} so far{self._describe_time_left()}"
        ended, total = sum(counts[state] for state in ENDED), max(self._state.outlook.planned, 1)
        bar = ProgressBar(total, ended, 60, complete_style="green", finished_style="green")
        parts: list[RenderableType] = [Text.assemble((self._spec.name, "bold"), head), bar]
        state = self._tracking()
        if state is not None:
            parts.append(Text(str(state), style="yellow" if state.kind == "away" else "dim"))
        if pause := self._describe_pause():
            parts.append(Text(pause, style="yellow"))
        running = self._state.list_running()
        if running:
            parts.append(build_running_table(running, self._state.steps))
        if front.members:
            rows = [build_front_row(front, member) for member in front.members[:MAX_MEMBERS]]
            parts.append(Text(f"Front so far, hypervolume {format_number(front.hypervolume)}"))
            parts.append(build_front_table(front, rows, (), self._console))
            if more := front.members[MAX_MEMBERS:]:
                parts.append(Text(f"... and {len(more)} more", style="dim"))
        return Group(*parts)

    def _describe_counts(self) -> str:
        counts = self._state.count_states()
        ended = sum(counts[state] for state in ENDED)
        parts = [self._waits_for or f"{counts['running']} running"]
        parts += [
            f"{counts[s]} {name_state(s)}" for s in ("paused", "pruned", "failed") if counts[s]
        ]
        return f"{ended} of at most {self._state.outlook.planned} trials done, {', '.join(parts)}"

    def _describe_time_left(self) -> str:
        seconds = self._state.estimate_seconds_left()
        if self._state.outlook.hours == 0:
            return ", the hours are used up: what runs comes to its end"
        return "" if seconds is None else f", about {format_duration(seconds)} left"

    def _describe_event(self, event: events.Event) -> str:
        if isinstance(event, events.TrialProgress | events.Outlook):
            return ""
        if isinstance(event, events.SweepStarted):
            parts = [self._describe_counts(), self._spec.location, self._describe_pause()]
            return f"{self._spec.name}: {'; '.join(filter(None, parts))}"
        if isinstance(event, events.SearchStarted):
            return f"{self._spec.name}: {event.slots} at a time; proposals by {event.sampler}"
        if isinstance(event, events.TrialStarted):
            title = title_candidate(event.record.name)
            verb = "goes on" if event.record.rungs else "starts"
            return f"{title} {verb}: {_describe_trial(event.record)}"
        if isinstance(event, events.TrialPaused):
            if event.record.parts:
                return f"{title_candidate(event.record.name)} waits for what else joins the front"
            text = f"trial {event.record.number} waits at rung {event.record.paused_at:,}"
            return f"{text}; {self._describe_counts()}{self._describe_time_left()}"
        if isinstance(event, events.TrialFinished):
            return self._describe_end(event.record)
        if isinstance(event, events.IncidentOccurred):
            return str(event.incident)
        if isinstance(event, events.SweepSteered):
            pause = self._describe_pause() if event.request.effect.paused else ""
            return f"{event.request}{pause and '; '}{pause}"
        return f"{self._spec.name}: {self.note}"

    def _describe_pause(self) -> str:
        pause = self._state.pause
        if pause is None:
            return ""
        command = f"python -m gdpo_tune.steer {shlex.quote(self._spec.location)} resume"
        return f"Paused by {pause.author}: no further trial starts. Go on with: {command}"

    def _describe_end(self, record: TrialRecord) -> str:
        head = f"{title_candidate(record.name)} {name_state(record.state)}"
        if record.state != "complete":
            return f"{head}: {record.reason or 'no reason recorded'}"
        values = ", ".join(
            f"{goal.name} {format_estimate(record.test.get(goal.name))}"
            for goal in self._state.objectives
        )
        parts = [f"{head} after {format_duration(record.cost.seconds)}: {values}"]
        if record.is_unchanged:
            parts.append("unchanged: every gradient was 0")
        front = self._state.compute_front()
        if front is not None:
            volume = format_number(front.hypervolume)
            parts.append(f"hypervolume {volume}, {len(front.members)} on the front")
        return "; ".join([*parts, f"{self._describe_counts()}{self._describe_time_left()}"])


def _describe_trial(record: TrialRecord) -> str:
    if record.is_initial:
        return f"the {describe_role(record)}"
    if record.parts:
        return f"evaluates {format_parts(record.parts)}"
    kinds = ("normalization", "group_size", "learning_rate")
    shown = [n for n in record.params if n in kinds or n.startswith("reward_weights.")]
    return f"{describe_role(record)}; {describe_parameters(record.params, shown)}"
