"""The webhook hears how runs end: one POST of JSON for each notice, repeated until it succeeds.

Notices are sent at least once: two ticks at the same time may both send one, and receivers know it
again by its `id`. A webhook delays a tick by at most `SECONDS`: after the first failure the other
notices wait for the next tick.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

from gdpo_tune.clusters.outside_calls import call_within
from gdpo_tune.clusters.schedule_context import ScheduleContext
from gdpo_tune.clusters.schedule_state import DAY, Notice, ScheduleEvent
from gdpo_tune.core.service_url import split_service_url

SECONDS = 5.0
"""Longest time for an answer of the webhook."""


def send_notices(context: ScheduleContext) -> None:
    """Send every wanted notice of the last 24 hours that was not sent yet; record the result."""
    settings = context.sweep.settings.notify
    if settings is None:
        return
    while (notice := _next_notice(context, settings.on)) is not None:
        address = os.environ.get(settings.webhook_env, "")
        problem = post(address, build_message(context, notice))
        if problem and notice.failed:
            return
        event = ScheduleEvent("sent", context.clock())
        if problem:
            text = f"{context.sweep.name}: {settings.webhook_env}: {problem}"
            event = ScheduleEvent("not sent", context.clock(), text)
        _record_result(context, notice.number, event)
        if problem:
            return


def build_message(context: ScheduleContext, notice: Notice) -> dict[str, Any]:
    """Build the JSON object of a notice."""
    return {
        "id": f"{context.sweep.name}/{notice.number}",
        "sweep": context.sweep.name,
        "occasion": notice.occasion,
        "at": notice.at.isoformat(),
        "text": notice.text,
        "storage": context.sweep.storage,
        **notice.details,
    }


def post(address: str, message: dict[str, Any]) -> str:
    """POST a message as JSON; return why that failed, without the address, which is a secret."""
    problem = webhook_problem(address)
    if problem:
        return problem
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(message).encode(), headers)
    try:
        opener = urllib.request.build_opener(NoRedirects)
        call_within(SECONDS, lambda: opener.open(request).close())
    except urllib.error.HTTPError as error:
        error.close()
        return f"the webhook answered {error.code}"
    except urllib.error.URLError as error:
        return f"the webhook does not answer ({error.reason})"
    except TimeoutError:
        return f"the webhook does not answer within {SECONDS:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"the webhook does not answer ({type(error).__name__})"
    return ""


def webhook_problem(address: str) -> str:
    """Return why nothing can be sent to an address, without showing it; empty if it can."""
    if not address:
        return "not set"
    try:
        parts = split_service_url(address)
    except ValueError as error:
        return f"not the address of a webhook: {error}"
    if parts.username or parts.password:
        return "an address with a user or a password, which would not be sent"
    return ""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect counts as a failure: it would be followed by GET, without the message."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """Follow no redirect."""


def _next_notice(context: ScheduleContext, occasions: tuple[str, ...]) -> Notice | None:
    now = context.clock()
    for notice in context.state.notices:
        if notice.occasion in occasions and not notice.sent and now - notice.at <= DAY:
            return notice
    return None


def _record_result(context: ScheduleContext, number: int, event: ScheduleEvent) -> None:
    """Note that a notice was sent or not, whatever other processes write meanwhile."""
    recorded = False
    while not recorded:
        for notice in context.state.notices:
            if notice.number == number:
                notice.sent, notice.failed = event.kind == "sent", event.kind != "sent"
        recorded = context.record(event)
