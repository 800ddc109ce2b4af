"""A line for `crontab`, by the sweep's own clock."""

from __future__ import annotations

import shlex

from gdpo_tune.clusters.render.base import Rendered, Request
from gdpo_tune.clusters.render.cron_line import five_fields


def render(request: Request) -> Rendered:
    """The line.

    Raises:
        SpecError: the schedule cannot be said.
    """
    sweep = request.sweep
    name = f"{sweep.name}.crontab"
    left_out = ["times at which the machine was off: cron makes up for none"]
    if sweep.settings.policy.missed == "skip":
        left_out = []
    left_out += ["a clock of its own, where cron is Debian's: it ignores CRON_TZ; cronie does not"]
    root, words = shlex.quote(str(sweep.root)), shlex.join(request.command(request.python))
    command = f"cd {root} && {words}".replace("%", r"\%")
    line = f"{five_fields(request, star_decides=True)} {command}"
    text = [
        *(f"# {each}" for each in request.head(name, left_out)),
        f"CRON_TZ={request.schedule.timezone}",
        line if sweep.settings.enabled else f"# enabled: false  {line}",
    ]
    return Rendered({name: "\n".join(text) + "\n"}, tuple(left_out))
