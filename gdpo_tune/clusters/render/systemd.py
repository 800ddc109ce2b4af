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
    words, root = request.build_command(request.python), str(request.sweep.root)
    if re.search(r"[\"'\\$]", request.python):  # systemd.service(5) takes no such program
        words = ["/bin/sh", "-c", 'exec "$0" "$@"', *words]
    values = {
        "command": " ".join(_escape_word(word) for word in words),
        # one backslash at the end of a line would join it with the next
        "root": root.replace("%", "%%") + ("/." if root.endswith(("\\", " ")) else ""),
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
