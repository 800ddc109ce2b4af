"""The targets: a batch script of Slurm, manifests for KubeRay, units of systemd, a crontab.

- Slurm: the script runs one command on a Ray cluster over its nodes; scrontab starts it.
- KubeRay: a CronJob of Kubernetes, whose pod runs our command and waits, while KubeRay runs
  RayJobs; with `--ray-cron-job` a RayCronJob, where KubeRay keeps the schedule. A RayJob runs a
  sweep once: for `kubectl create`, a pipeline, or a queue of Kueue.
- systemd: a service that runs a sweep and waits, and the timer that starts it. Both are units of a
  user and belong in `~/.config/systemd/user`.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render.base import (
    RenderRequest,
    fill_template,
    find_skipped_days,
    format_calendar_events,
    format_five_fields,
    refuse_key,
)
from gdpo_tune.clusters.schedule_spec import KubeRayBackend, SlurmBackend
from gdpo_tune.clusters.scheduler import TICK_TOLERANCE
from gdpo_tune.core.object_store import is_url

PLAIN_PATH = re.compile(r"[\w%+:,./-]+")
MARGIN = 15 * 60
"""Seconds of a job beyond `max_runtime`: Ray starts, and a sweep that stops writes checkpoints."""


def render_batch_script(request: RenderRequest) -> dict[str, str]:
    """Render script and line of scrontab."""
    sweep, backend = request.sweep, request.sweep.settings.backend
    if not isinstance(backend, SlurmBackend):
        fix = "write backend: {kind: slurm, nodes: 1}"
        refuse_key(sweep, "backend.kind", backend.kind, "slurm requires the number of nodes", fix)
    script, line = f"{sweep.name}.sbatch", f"{sweep.name}.scrontab"
    stop = ["python", "-m", "gdpo_tune.schedule", request.file, "stop", sweep.name, "--here"]
    values = _list_script_values(sweep, backend, request.python)
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
    return fill_template(
        "slurm.sbatch.jinja",
        name=name,
        command=command,
        backend=backend,
        log=_quote_log(directory, "log.txt"),
        job_directory=quoted,
        on_term=f'kill -TERM "$(cat {quoted}/pid)"',
        **_list_script_values(sweep, backend, sys.executable),
    )


def _list_script_values(
    sweep: ScheduledSweep, backend: SlurmBackend, python: str
) -> dict[str, Any]:
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
    return path if PLAIN_PATH.fullmatch(path) else '"' + re.sub(r'(["\\#])', r"\\\1", path) + '"'


FIRST_VERSION = (1, 2)
"""KubeRay's version with the last of the fields that are used: `backoffLimit`."""


def render_ray_job(request: RenderRequest) -> dict[str, str]:
    """Render the manifest."""
    name = f"{request.sweep.name}.rayjob.yaml"
    return {name: request.fill("ray_job.yaml.jinja", name, name="", **list_values_here(request))}


def build_ray_job(
    sweep: ScheduledSweep, backend: KubeRayBackend, name: str, command: Sequence[str]
) -> str:
    """Return the RayJob of one attempt, which KubeRay does not repeat."""
    values = _list_job_values(backend, command, 0) | {"backend": backend, "sweep": sweep}
    values |= {"policy": sweep.settings.policy, "name": name}
    return fill_template("ray_job.yaml.jinja", request=None, **values)


def list_values_here(request: RenderRequest) -> dict[str, Any]:
    """Return the values of a RayJob whose driver keeps the schedule's state beside the sweep.

    KubeRay tries again only if the head was lost: a run that failed for good stays so.
    """
    command = request.build_command("python", "--here", "--once")
    retries = request.sweep.settings.policy.max_attempts - 1
    return _list_job_values(find_backend(request), command, retries)


def find_backend(request: RenderRequest) -> KubeRayBackend:
    """Return the KubeRay settings of a sweep."""
    backend = request.sweep.settings.backend
    if not isinstance(backend, KubeRayBackend):
        fix = "write backend: {kind: kuberay, image: ...}; cluster: names an existing RayCluster"
        refuse_key(request.sweep, "backend.kind", backend.kind, "pods need an image", fix)
    if request.kuberay < FIRST_VERSION:
        version = ".".join(map(str, request.kuberay))
        reason = f"KubeRay {version} does not know backoffLimit, which came with 1.2"
        refuse_key(request.sweep, "", "", reason, "install KubeRay 1.2 or later")
    return backend


def _list_job_values(
    backend: KubeRayBackend, command: Sequence[str], retries: int
) -> dict[str, Any]:
    in_archive = is_url(backend.working_dir)
    change_directory = "" if in_archive else f"cd {shlex.quote(backend.working_dir)} && "
    entrypoint = change_directory + shlex.join(command)
    return {"entrypoint": entrypoint, "in_archive": in_archive, "retries": retries}


FIRST_CRON_JOB, FIRST_ZONE = (1, 6), (1, 7)
"""KubeRay's version that brought RayCronJob, and the one that gave it a time zone."""


def render_cron_job(request: RenderRequest) -> dict[str, str]:
    """Render the manifest."""
    backend, policy = find_backend(request), request.sweep.settings.policy
    values = {"fields": format_five_fields(request, star_decides=False)}
    values |= {"skipped_days": find_skipped_days(request)}
    if request.ray_cron_job:
        template, without = "ray_cron_job.yaml.jinja", "leave out --ray-cron-job"
        version, zone = ".".join(map(str, request.kuberay)), request.schedule.timezone
        if request.kuberay < FIRST_CRON_JOB:
            reason = f"KubeRay {version} has no RayCronJob, which came with 1.6"
            refuse_key(request.sweep, "", "", reason, f"{without}: a CronJob needs none")
        if request.kuberay < FIRST_ZONE and zone != "UTC":
            reason = f"RayCronJob of KubeRay {version} has no time zone, which came with 1.7"
            refuse_key(request.sweep, "schedule.timezone", zone, reason, f"write UTC, or {without}")
        if backend.queue:
            reason = "a RayCronJob cannot give its RayJobs the label by which Kueue knows them"
            refuse_key(request.sweep, "backend.queue", backend.queue, reason, without)
        values |= list_values_here(request) | {"has_zone": request.kuberay >= FIRST_ZONE}
    else:
        template = "cron_job.yaml.jinja"
        if is_url(backend.working_dir):
            fix = "write the image's directory with sweeps/ in it, or take --to rayjob"
            reason = "the CronJob's pod reads the file of the sweep from its image"
            refuse_key(request.sweep, "backend.working_dir", backend.working_dir, reason, fix)
        late = TICK_TOLERANCE.total_seconds()
        grace = policy.missed_grace if policy.missed == "run_once" else late
        # below 10 seconds Kubernetes may never start any
        values |= {"command": request.build_command("python"), "deadline": max(round(grace), 60)}
    name = f"{request.sweep.name}.yaml"
    return {name: request.fill(template, name, **values)}


UNQUOTED = re.compile(r"[A-Za-z0-9_./:=@+-]+")


def render_systemd(request: RenderRequest) -> dict[str, str]:
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


def render_crontab(request: RenderRequest) -> dict[str, str]:
    """Render the line."""
    name, root = f"{request.sweep.name}.crontab", shlex.quote(str(request.sweep.root))
    command = f"cd {root} && {shlex.join(request.build_command(request.python))}"
    # before the shell cron reads \% as %, and some crons \\ as \: two quoted parts keep them apart
    command = re.sub(r"\\(?=[\\%])", r"\\''", command).replace("%", r"\%")
    fields = format_five_fields(request, star_decides=True)
    return {name: request.fill("crontab.jinja", name, fields=fields, command=command)}
