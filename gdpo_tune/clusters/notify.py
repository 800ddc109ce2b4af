"""Notify a webhook when runs end: one POST of JSON for each notice, repeated until it succeeds.

Notices are sent at least once: two ticks at the same time may both send one, and a receiver
recognises it by its `id`. A webhook delays a tick by at most `webhook.SECONDS`: after the first
failure the other notices wait for the next tick.
"""

from __future__ import annotations

import os

from gdpo_tune.clusters.schedule_decisions import ScheduleContext
from gdpo_tune.clusters.schedule_state import DAY, Notice, ScheduleEvent
from gdpo_tune.core.http import post_message


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
        message = {
            "id": f"{context.sweep.name}/{notice.number}",
            "sweep": context.sweep.name,
            "occasion": notice.occasion,
            "at": notice.at.isoformat(),
            "text": notice.text,
            "storage": context.sweep.storage,
            **notice.details,
        }
        problem = post_message(os.environ.get(settings.webhook_env, ""), message)
        if problem and notice.delivery == "failed":
            return
        text = f"{context.sweep.name}: {settings.webhook_env}: {problem}" if problem else ""
        event = ScheduleEvent("not sent" if problem else "sent", now, text)
        while notice is not None:  # whatever other processes write meanwhile
            notice.delivery = "failed" if problem else "sent"
            notice = None if context.record(event) else _find_notice(context, number)
        if problem:
            return


def _find_notice(context: ScheduleContext, number: int) -> Notice | None:
    return next((each for each in context.state.notices if each.number == number), None)
