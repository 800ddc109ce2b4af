"""A webhook hears how runs end: one POST of JSON for each, again at the next tick where it failed.

News are sent at least once: two calls at the same time may both send them, and `id` tells
receivers that they are the same. A webhook never holds a run up for longer than `SECONDS`, and
after the first failure the rest waits for the next tick.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gdpo_tune.clusters.book import time_of
from gdpo_tune.clusters.deadline import within
from gdpo_tune.clusters.decide import run_name
from gdpo_tune.clusters.log import Event
from gdpo_tune.clusters.outcome import told
from gdpo_tune.core.service_url import split_service_url

if TYPE_CHECKING:
    from gdpo_tune.clusters.tick import Desk

SECONDS = 5.0
"""How long a webhook may take to answer."""
WITHIN = timedelta(hours=24)
"""Older news are not sent any more."""
LEFT_OUT = ("missed", "overlap", "disabled", "stopped")
"""Why runs are skipped, the budget aside."""


def tell(desk: Desk) -> None:
    """Send every piece of news that is wanted and was not sent yet; write down how that went."""
    settings = desk.sweep.settings.notify
    if settings is None:
        return
    for number, event in list(desk.book.news.items()):
        now = desk.clock()
        if occasion(event) not in settings.on or now - event.at > WITHIN:
            continue
        problem = send(os.environ.get(settings.webhook_env, ""), message(desk, number, event))
        if not problem:
            desk.note(Event("told", now, {"of": number}))
            continue
        if number not in desk.book.untold:
            why = f"{settings.webhook_env}: {problem}"
            desk.note(Event("untold", now, {"of": number, "why": why}))
        return


def occasion(event: Event) -> str:
    """What an event is, in the words of `notify.on`."""
    if event.kind == "ended":
        return str(event.about["state"])
    return "skipped" if event.about["why"] in LEFT_OUT else "budget"


def message(desk: Desk, number: int, event: Event) -> dict[str, Any]:
    """What is sent: the event, and the same in words."""
    name = desk.sweep.name
    return {
        "id": f"{name}/{number}",
        "sweep": name,
        "occasion": occasion(event),
        "at": event.at.isoformat(),
        "text": words(name, event),
        "storage": desk.sweep.storage,
        **event.about,
    }


def words(name: str, event: Event) -> str:
    """An event in words."""
    about = dict(event.about)
    reason = f": {about['reason']}" if about.get("reason") else ""
    if event.kind == "ended":
        return f"{about['run']} {about['state']}{reason}. {told(about)}".rstrip()
    first, last = (run_name(name, time_of(about[key])) for key in ("first", "last"))
    which = first if about["count"] == 1 else f"{about['count']} runs from {first} to {last}"
    return f"{which} skipped ({about['why']}){reason}."


def send(address: str, content: dict[str, Any]) -> str:
    """POST `content` as JSON; return why that failed, without the address, which is a secret."""
    wrong = why_no_webhook(address)
    if wrong:
        return wrong
    body = json.dumps(content).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        within(SECONDS, lambda: urllib.request.build_opener(NoRedirects).open(request).close())
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


def why_no_webhook(address: str) -> str:
    """Why nothing can be sent to an address; empty if something can. It shows nothing of it."""
    if not address:
        return "not set"
    try:
        parts = split_service_url(address)
    except ValueError as error:
        return f"not the address of a webhook: {error}"
    if parts.username or parts.password:
        return "an address with a user or a password, which nobody would be sent"
    return ""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Who is led elsewhere would ask there by GET, and lose what was to be told."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """Go nowhere: the answer counts as a failure."""
