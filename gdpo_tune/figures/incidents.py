"""What befell a sweep while it ran: nodes lost, attempts that failed, and who went on where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from gdpo_tune.results.summary import incidents_of


def incidents_list(sessions: Sequence[Mapping[str, Any]]) -> str | None:
    """A list with the time of each; None if nothing happened."""
    found = incidents_of(sessions)
    items = (f"<li><b>{_clock(what.time)}</b> {escape(str(what))}</li>" for what in found)
    return f'<ul class="failures">{"".join(items)}</ul>' if found else None


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S}"
