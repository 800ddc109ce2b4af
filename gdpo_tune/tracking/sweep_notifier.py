"""The listener that notifies the webhook of `notify:`, without ever delaying the sweep."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock, Thread
from typing import Any

from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.events import Event, SweepFinished, SweepStarted, TrialFinished, TrialStarted
from gdpo_tune.core.http import post_message
from gdpo_tune.core.redaction import redact_text
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import SweepOccasion

NOTICES = "notices.jsonl"
"""File in the sweep's directory with every message, and why it was not delivered."""
PAUSES = (0.0, 1.0, 3.0)
"""Seconds before each attempt to deliver a message."""
CLOSING_SECONDS = 10.0


@dataclass
class Delivery:
    """A message on its way to the webhook."""

    message: dict[str, Any]
    thread: Thread | None = None
    problem: str = f"no answer within {CLOSING_SECONDS:g} s"
    """Why it was not delivered; empty if it was."""
    is_recorded: bool = False


class SweepNotifier:
    """Sends messages about a sweep in threads of their own. Use it as a context manager.

    A sweep that starts no trial has no news, so it sends nothing. Without `notify:` nothing happens
    at all.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._is_open = False
        self._has_started_trial = False
        self._has_failed_trial = False
        self._ending: SweepFinished | None = None
        self._deliveries: list[Delivery] = []
        self._lock = Lock()

    def __enter__(self) -> SweepNotifier:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Send the message about the end; print a warning if one could not be delivered."""
        if self._spec.notify is None:
            return
        if error is not None:
            self._send_error(error)
        elif self._ending is not None and self._has_started_trial:
            self._send_end(self._ending)
        warning = self._wait(CLOSING_SECONDS)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)

    def __call__(self, event: Event) -> None:
        """Take notice of an event; the first failure of a trial is sent at once."""
        match event:
            case SweepStarted():
                self._is_open = True
            case TrialStarted():
                self._has_started_trial = True
            case TrialFinished() if event.record.state == "failed" and not self._has_failed_trial:
                self._has_failed_trial = True
                reason = redact_text(event.record.reason)
                text = f"goes on, but trial {event.record.number} failed: {reason}"
                self._send("trial_failed", text, trial=event.record.number, reason=reason)
            case SweepFinished():
                self._ending = event
            case _:
                pass

    def _send_error(self, error: BaseException) -> None:
        """Send that the sweep ended with an error, unless another process may be running it."""
        if not self._is_open:
            return
        if isinstance(error, KeyboardInterrupt):
            self._send("interrupted", "was interrupted. The same command resumes it")
            return
        kind = "" if isinstance(error, GdpoTuneError) else f"{type(error).__name__}: "
        first_line, _, _ = str(error).partition("\n")
        reason = redact_text(f"{kind}{first_line}")
        self._send("failed", f"ended with an error: {reason}", reason=reason)

    def _send_end(self, ending: SweepFinished) -> None:
        from gdpo_tune.analysis.front import build_front  # only now, because of numpy
        from gdpo_tune.results.front_table import (
            build_knee,
            describe_knee,
            describe_summary,
            summarize_front,
        )
        from gdpo_tune.results.wording import REPORT_FILE

        front = build_front(ending.records, self._spec.list_objectives())
        knee = build_knee(front)
        occasion: SweepOccasion = "finished" if front.members else "failed"
        text = f"finished: {ending.reason}"
        if ending.interrupted:
            occasion, text = "interrupted", "was interrupted. The same command resumes it"
        elif not front.members:
            trained = [record for record in ending.records if not record.is_initial]
            all_failed = all(record.state == "failed" for record in trained)
            reason = "every trial failed" if all_failed else "no trial satisfies all constraints"
            text = f"failed: {reason}"
        parts = [text, describe_summary(front), *([describe_knee(knee)] if knee else [])]
        report = str(self._spec.directory.absolute() / REPORT_FILE)
        details = {**summarize_front(front), "knee": knee, "report": report}
        self._send(occasion, ". ".join(parts), **details)

    def _send(self, occasion: SweepOccasion, text: str, **details: Any) -> None:
        if self._spec.notify is None or occasion not in self._spec.notify.on:
            return
        name, now = self._spec.name, datetime.now(UTC).isoformat(timespec="seconds")
        message = {
            "id": f"{name}/{occasion}/{now}",
            "sweep": name,
            "occasion": occasion,
            "at": now,
            "text": f"{name} {text}.",
            "location": self._spec.address or str(self._spec.directory.absolute()),
            **details,
        }
        delivery = Delivery(message)
        # A daemon, because a webhook that hangs must not keep the process alive.
        arguments = delivery, self._spec.notify.webhook_env
        delivery.thread = Thread(target=self._deliver, args=arguments, daemon=True)
        self._deliveries.append(delivery)
        delivery.thread.start()

    def _deliver(self, delivery: Delivery, variable: str) -> None:
        for pause in PAUSES:
            time.sleep(pause)
            delivery.problem = post_message(os.environ.get(variable, ""), delivery.message)
            if not delivery.problem:
                break
        self._record(delivery)

    def _wait(self, seconds: float) -> str:
        """Wait for the deliveries; return a warning about those that failed, or an empty text."""
        deadline = time.monotonic() + seconds
        for delivery in self._deliveries:
            if delivery.thread is not None:
                delivery.thread.join(max(0.0, deadline - time.monotonic()))
            self._record(delivery)
        lost = [delivery for delivery in self._deliveries if delivery.problem]
        if not lost or self._spec.notify is None:
            return ""
        occasions = ", ".join(delivery.message["occasion"] for delivery in lost)
        return (
            f"notify: {self._spec.notify.webhook_env}: {lost[-1].problem}, so nobody was notified "
            f"({occasions}); the messages are in {self._spec.directory / NOTICES}"
        )

    def _record(self, delivery: Delivery) -> None:
        with self._lock, suppress(OSError):  # a full disk must not end the sweep here
            if not delivery.is_recorded:
                delivery.is_recorded = True
                line = json.dumps({**delivery.message, "problem": delivery.problem})
                with (self._spec.directory / NOTICES).open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
