"""A line for `crontab`, in the sweep's own time zone."""

from __future__ import annotations

import re
import shlex

from gdpo_tune.clusters.render.base import RenderRequest
from gdpo_tune.clusters.render.cron_line import format_five_fields


def render(request: RenderRequest) -> dict[str, str]:
    """Render the line."""
    name, root = f"{request.sweep.name}.crontab", shlex.quote(str(request.sweep.root))
    command = f"cd {root} && {shlex.join(request.build_command(request.python))}"
    # before the shell cron reads \% as %, and some crons \\ as \: two quoted parts keep them apart
    command = re.sub(r"\\(?=[\\%])", r"\\''", command).replace("%", r"\%")
    fields = format_five_fields(request, star_decides=True)
    return {name: request.fill("crontab.jinja", name, fields=fields, command=command)}
