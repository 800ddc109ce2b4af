"""A service of systemd that runs a sweep and waits, and the timer that starts it.

Both are units of a user: they belong into `~/.config/systemd/user`.
"""

from __future__ import annotations

import json
import re

from gdpo_tune.clusters.render.base import Rendered, Request
from gdpo_tune.clusters.render.cron_line import on_calendar, spring_note
from gdpo_tune.clusters.schedule_spec import LocalBackend

PLAIN = re.compile(r"[A-Za-z0-9_./:=@+-]+")
DETACHED = [
    "# the sweep is a process of its own, and goes on when this one is stopped",
    "KillMode=process",
]


def render(request: Request) -> Rendered:
    """Service and timer.

    Raises:
        SpecError: the schedule cannot be said.
    """
    sweep, events = request.sweep, on_calendar(request)
    name, left_out = f"gdpo-{sweep.name}", _left_out(request)
    local = isinstance(sweep.settings.backend, LocalBackend)
    service = [
        *_comments(request, f"{name}.service", left_out),
        "[Unit]",
        f"Description=Sweep {sweep.name}",
        "",
        "[Service]",
        "Type=exec",
        f"WorkingDirectory={str(sweep.root).replace('%', '%%')}",
        f"ExecStart={' '.join(word(each) for each in request.command(request.python))}",
        "# 3: skipped; 4: the budget is spent; 5: stopped",
        "SuccessExitStatus=3 4 5",
        "# 6: the backend does not answer",
        "RestartForceExitStatus=6",
        "RestartSec=5min",
        *(DETACHED if local else []),
        "TimeoutStopSec=30s",
    ]
    timer = [
        *_comments(request, f"{name}.timer", left_out),
        "[Unit]",
        f"Description=When sweep {sweep.name} starts",
        "",
        "[Timer]",
        *(f"OnCalendar={event}" for event in events),
        f"Persistent={str(sweep.settings.policy.missed == 'run_once').lower()}",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    texts = {f"{name}.service": service, f"{name}.timer": timer}
    files = {file: "\n".join(lines) + "\n" for file, lines in texts.items()}
    return Rendered(files, tuple(left_out))


def word(text: str) -> str:
    """A word of a command as systemd reads it."""
    escaped = text.replace("%", "%%").replace("$", "$$")
    return escaped if PLAIN.fullmatch(escaped) else json.dumps(escaped, ensure_ascii=False)


def _comments(request: Request, file: str, left_out: list[str]) -> list[str]:
    return [f"# {each}" for each in request.head(file, left_out)]


def _left_out(request: Request) -> list[str]:
    policy, found = request.sweep.settings.policy, list[str]()
    if policy.missed == "run_once":
        found.append("missed_grace: a time that was missed is made up for, however late")
    if policy.overlap != "skip":
        found.append(f"overlap {policy.overlap}: no second run is begun while one is under way")
    if not request.sweep.settings.enabled:
        found.append("enabled: false: leave the timer disabled")
    return found + spring_note(request, "systemd")
