"""A batch script for Slurm that runs one command on a Ray cluster over its nodes.

As a target: the script that runs a sweep for its schedule, and its line for scrontab.
"""

from __future__ import annotations

import re
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render.base import RenderRequest, fill_template, refuse
from gdpo_tune.clusters.render.cron_line import format_five_fields
from gdpo_tune.clusters.schedule_spec import SlurmBackend

PLAIN = re.compile(r"[\w%+:,./-]+")
MARGIN = 15 * 60
"""Seconds of a job beyond `max_runtime`: Ray starts, and a sweep that stops writes checkpoints."""


def render(request: RenderRequest) -> dict[str, str]:
    """Render script and line."""
    sweep, backend = request.sweep, request.sweep.settings.backend
    if not isinstance(backend, SlurmBackend):
        fix = "write backend: {kind: slurm, nodes: 1}"
        refuse(sweep, "backend.kind", backend.kind, "slurm requires the number of nodes", fix)
    script, line = f"{sweep.name}.sbatch", f"{sweep.name}.scrontab"
    stop = ["python", "-m", "gdpo_tune.schedule", request.file, "stop", sweep.name, "--here"]
    values = _list_values(sweep, backend, request.python)
    values |= {"name": sweep.name, "log": _quote_log(sweep.root, f"{sweep.name}-%j.log")}
    values |= {"command": request.build_command("python", "--here"), "on_term": shlex.join(stop)}
    fields = format_five_fields(request, star_decides=False)
    path = shlex.quote(str(request.directory / script))
    return {
        script: request.fill("slurm.sbatch.jinja", script, job_directory="", **values),
        line: request.fill("slurm.scrontab.jinja", line, fields=fields, script=path),
    }


def build_job_script(
    sweep: ScheduledSweep, backend: SlurmBackend, name: str, command: list[str], directory: Path
) -> str:
    """Return the script of a backend's job, which keeps its pid and exit status in a directory."""
    quoted = shlex.quote(str(directory))
    values = _list_values(sweep, backend, sys.executable) | {"name": name, "command": command}
    values |= {"backend": backend, "log": _quote_log(directory, "log.txt"), "job_directory": quoted}
    return fill_template(
        "slurm.sbatch.jinja", on_term=f'kill -TERM "$(cat {quoted}/pid)"', **values
    )


def _list_values(sweep: ScheduledSweep, backend: SlurmBackend, python: str) -> dict[str, Any]:
    longest = sweep.settings.policy.max_runtime
    return {
        "root": shlex.quote(str(sweep.root)),
        "setup": backend.setup or f"export PATH={shlex.quote(str(Path(python).parent))}:$PATH",
        "time_limit": longest and re.sub(" days?, ", "-", str(timedelta(seconds=longest + MARGIN))),
    }


def _quote_log(directory: Path, name: str) -> str:
    """Return the path of a log as a line of sbatch's options has it; `%j` is the job's id.

    A `%` is doubled. Where a backslash is, no `%` has a meaning: sbatch(1), filename pattern.
    """
    path, plain = str(directory), "\\" not in str(directory)
    path = path.replace("%", "%%") if plain else path.replace("\\", "\\\\")
    path = f"{path}/{name if plain else name.replace('-%j', '')}"
    # a backslash keeps a mark as it is, but not a blank, which needs quotes
    return path if PLAIN.fullmatch(path) else '"' + re.sub(r'(["\\#])', r"\\\1", path) + '"'
