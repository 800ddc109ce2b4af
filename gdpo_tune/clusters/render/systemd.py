"""A service of systemd that runs a sweep and waits, and the timer that starts it.

Both are units of a user and belong in `~/.config/systemd/user`.
"""

from __future__ import annotations

import json
import re

from gdpo_tune.clusters.render.base import RenderRequest
from gdpo_tune.clusters.render.cron_line import find_skipped_days, format_calendar_events

UNQUOTED = re.compile(r"[A-Za-z0-9_./:=@+-]+")


def render(request: RenderRequest) -> dict[str, str]:
    """Render service and timer."""
    values = {
        "command": " ".join(_escape_word(word) for word in request.build_command(request.python)),
        "events": format_calendar_events(request),
        "skipped_days": find_skipped_days(request),
    }
    names = {suffix: f"gdpo-{request.sweep.name}.{suffix}" for suffix in ("service", "timer")}
    return {
        name: request.fill(f"systemd.{suffix}.jinja", name, **values)
        for suffix, name in names.items()
    }


def _escape_word(word: str) -> str:
    escaped = word.replace("%", "%%").replace("$", "$$")
    return escaped if UNQUOTED.fullmatch(escaped) else json.dumps(escaped, ensure_ascii=False)
