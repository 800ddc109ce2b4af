"""Files with which another scheduler calls `tick` every five minutes, and manifests of jobs.

Nothing of a schedule is translated. When a sweep is due, what a missed time means, whether runs
overlap and what they may cost stay in its file, which `tick` reads. So all schedulers do the same.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import jinja2

from gdpo_tune.clusters import TARGETS
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import KubeRayBackend, LocalBackend, SlurmBackend
from gdpo_tune.core.errors import SpecError, SpecProblem
from gdpo_tune.core.object_store import is_url

LONGEST_NAME = 52
"""Characters of the name of a CronJob."""
MARGIN = 15 * 60
"""Seconds of a job beyond `max_runtime`: Ray starts, and a sweep that stops writes checkpoints."""
PLAIN = re.compile(r"[A-Za-z/]([A-Za-z0-9_./:-]*[A-Za-z0-9/-])?|--?[a-z][a-z-]*|[0-9]+[KMGT]i?")
"""Text that needs no quotes in YAML."""
YAML_WORD = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
"""Text that YAML 1.1, which Kubernetes reads, takes for something else."""
PLAIN_PATH = re.compile(r"[\w%+:,./-]+")
UNQUOTED = re.compile(r"[A-Za-z0-9_./:=@+-]+")


def render_ticker(sweeps: Sequence[ScheduledSweep], path: str, target: str) -> dict[str, str]:
    """Return file -> text for a target that ticks the sweeps of `path`, a directory or a file.

    The files have the name of the project's directory, or of the only sweep.

    Raises:
        SpecError: every sweep that the target cannot tick.
    """
    problems = tuple(_find_problems(sweeps, target))
    if problems:
        raise SpecError(problems)
    place, root = Path(path).absolute(), sweeps[0].root
    relative = str(place.relative_to(root))
    relative = f"./{relative}" if relative.startswith("-") else relative  # which would be an option
    python = "python" if target == "kuberay" else sys.executable
    label = root.name if place.is_dir() else sweeps[0].name
    name = re.sub(r"[^a-z0-9]+", "-", f"gdpo-tune-{label.lower()}")[:LONGEST_NAME].rstrip("-")
    values: dict[str, Any] = {
        "name": name,
        "root": str(root),
        "command": [python, "-m", "gdpo_tune.schedule", relative, "tick"],
        "backend": sweeps[0].settings.backend,
        "storage": sweeps[0].storage,
    }
    return {
        f"{name}.{ending}": fill_template(f"{ending}.jinja", **values) for ending in TARGETS[target]
    }


def _find_problems(sweeps: Sequence[ScheduledSweep], target: str) -> Iterator[SpecProblem]:
    first: tuple[str, dict[str, str]] | None = None
    for sweep in sweeps:
        file, backend = str(sweep.file), sweep.settings.backend
        if target == "slurm" and isinstance(backend, LocalBackend):
            reason = "its process would end with the job of Slurm that ticks"
            yield SpecProblem(file, "backend.kind", "local", reason, "write kind: slurm")
        if target != "kuberay":
            continue
        if not isinstance(backend, KubeRayBackend):
            fix = "name a single file, or keep the files of kuberay in a directory of their own"
            reason = "a pod ticks only sweeps of kuberay"
            yield SpecProblem(file, "backend.kind", backend.kind, reason, fix)
            continue
        if is_url(backend.working_dir):
            reason = "the pod that ticks reads sweeps/ from its image, not from an archive"
            fix = "write the directory of the image that holds them"
            yield SpecProblem(file, "backend.working_dir", backend.working_dir, reason, fix)
        if not backend.claim:
            reason = "the pod that ticks would lose the state of its schedules"
            fix = "write claim: and the volume of storage:, or tick on a machine outside"
            yield SpecProblem(file, "backend.claim", "", reason, fix)
        keys = ("image", "working_dir", "namespace", "claim", "secret", "service_account")
        pod = {f"backend.{key}": getattr(backend, key) for key in keys}
        pod["storage"] = sweep.storage
        first = first or (file, pod)
        for key, value in pod.items():
            if value != first[1][key]:
                reason = f"one pod ticks all files, and {first[0]} has {first[1][key]!r}"
                yield SpecProblem(file, key, value, reason, "name each file by itself")


def build_ray_job(
    sweep: ScheduledSweep, backend: KubeRayBackend, name: str, command: Sequence[str]
) -> str:
    """Return the RayJob of one attempt, which KubeRay does not repeat."""
    in_archive = is_url(backend.working_dir)
    change_directory = "" if in_archive else f"cd {shlex.quote(backend.working_dir)} && "
    return fill_template(
        "ray_job.yaml.jinja",
        entrypoint=change_directory + shlex.join(command),
        in_archive=in_archive,
        backend=backend,
        sweep=sweep,
        policy=sweep.settings.policy,
        name=name,
    )


def build_job_script(
    sweep: ScheduledSweep, backend: SlurmBackend, name: str, command: list[str], directory: Path
) -> str:
    """Return the script of a job of Slurm, which keeps its pid and exit status in a directory."""
    longest = sweep.settings.policy.max_runtime
    path = shlex.quote(str(Path(sys.executable).parent))
    return fill_template(
        "slurm.sbatch.jinja",
        name=name,
        command=command,
        backend=backend,
        log=_quote_log(directory),
        job_directory=shlex.quote(str(directory)),
        root=str(sweep.root),
        setup=backend.setup or f"export PATH={path}:$PATH",
        time_limit=longest and re.sub(" days?, ", "-", str(timedelta(seconds=longest + MARGIN))),
    )


def fill_template(template: str, **values: Any) -> str:
    """Return the text of a template of `templates/` with these variables.

    Filters: `scalar` writes a text for YAML, `quote` one word for a shell, `join_words` several,
    `unit` several for systemd, `cron` a command for a crontab.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"scalar": _write_scalar, "quote": shlex.quote, "join_words": shlex.join}
    environment.filters |= {"unit": _escape_words, "cron": _escape_cron}
    return environment.get_template(template).render(values)


def _write_scalar(value: str) -> str:
    if PLAIN.fullmatch(value) and not YAML_WORD.fullmatch(value):
        return value
    # JSON's text in quotes is YAML's, but for the line breaks that only YAML knows
    return json.dumps(value, ensure_ascii=any(each in value for each in "\x85\u2028\u2029"))


def _escape_words(words: Sequence[str]) -> str:
    if re.search(r"[\"'\\$]", words[0]):  # systemd.service(5) takes no such program
        words = ["/bin/sh", "-c", 'exec "$0" "$@"', *words]
    escaped = [word.replace("%", "%%").replace("$", "$$") for word in words]
    quoted = (e if UNQUOTED.fullmatch(e) else json.dumps(e, ensure_ascii=False) for e in escaped)
    return " ".join(quoted)


def _escape_cron(command: str) -> str:
    # before the shell cron reads \% as %, and some crons \\ as \: two quoted parts keep them apart
    return re.sub(r"\\(?=[\\%])", r"\\''", command).replace("%", r"\%")


def _quote_log(directory: Path) -> str:
    """Return the path of a job's log as a line of sbatch's options has it.

    A `%` is doubled. Where a backslash is, no `%` has a meaning: sbatch(1), filename pattern.
    """
    path, plain = str(directory), "\\" not in str(directory)
    path = path.replace("%", "%%") if plain else path.replace("\\", "\\\\")
    path = f"{path}/log.txt"
    # a backslash keeps a mark as it is, but not a blank, which needs quotes
    return path if PLAIN_PATH.fullmatch(path) else '"' + re.sub(r'(["\\#])', r"\\\1", path) + '"'
