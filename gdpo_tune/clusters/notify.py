"""Notify a webhook when runs end: one POST of JSON for each notice, repeated until it succeeds.

Notices are sent at least once: two ticks at the same time may both send one, and a receiver
recognises it by its `id`. A webhook delays a tick by at most `SECONDS`: after the first failure the
other notices wait for the next tick.
"""

from __future__ import annotations

import os
from typing import Any

from gdpo_tune.clusters.outside_calls import call_within, find_address_problem
from gdpo_tune.clusters.schedule_decisions import ScheduleContext
from gdpo_tune.clusters.schedule_state import DAY, Notice, ScheduleEvent

SECONDS = 5.0
"""Longest time for an answer of the webhook."""


def send_notices(context: ScheduleContext) -> None:
    """Send every wanted notice of the last 24 hours that was not sent yet; record the result."""
    settings = context.sweep.settings.notify
    if settings is None:
        return
    for number in [notice.number for notice in context.state.notices]:
        notice, now = _find_notice(context, number), context.clock()
        is_wanted = notice and notice.occasion in settings.on and now - notice.at <= DAY
        if notice is None or not is_wanted or notice.delivery == "sent":
            continue
        problem = post_message(
            os.environ.get(settings.webhook_env, ""), build_message(context, notice)
        )
        if problem and notice.delivery == "failed":
            return
        text = f"{context.sweep.name}: {settings.webhook_env}: {problem}" if problem else ""
        event = ScheduleEvent("not sent" if problem else "sent", now, text)
        while notice is not None:  # whatever other processes write meanwhile
            notice.delivery = "failed" if problem else "sent"
            notice = None if context.record(event) else _find_notice(context, number)
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


def post_message(address: str, message: dict[str, Any]) -> str:
    """POST a message as JSON; return why that failed, without the address, which is a secret."""
    import httpx

    problem = find_webhook_problem(address)
    if problem:
        return problem
    try:
        # a redirect is not followed: the message would be lost
        answer = call_within(SECONDS, lambda: httpx.post(address, json=message, timeout=SECONDS))
    except (TimeoutError, httpx.TimeoutException):
        return f"the webhook does not answer within {SECONDS:g} s"
    except (OSError, httpx.HTTPError) as error:
        reason = str(error) if isinstance(error, httpx.ConnectError) else type(error).__name__
        return f"the webhook does not answer ({reason})"
    return "" if answer.is_success else f"the webhook answered {answer.status_code}"


def find_webhook_problem(address: str) -> str:
    """Return why nothing can be sent to an address, without showing it; empty if it can."""
    problem = find_address_problem(address, query=True) if address else ""
    return f"not the address of a webhook: {problem}" if problem else "" if address else "not set"


def _find_notice(context: ScheduleContext, number: int) -> Notice | None:
    return next((each for each in context.state.notices if each.number == number), None)
