"""A batch script for Slurm that runs a sweep on the nodes it gets, and its line in scrontab."""

from __future__ import annotations

import shlex

from gdpo_tune.clusters.backends import batch_script
from gdpo_tune.clusters.backends.batch_script import Batch
from gdpo_tune.clusters.render.base import Rendered, Request, refuse
from gdpo_tune.clusters.render.cron_line import five_fields
from gdpo_tune.clusters.schedule_spec import SlurmBackend


def render(request: Request) -> Rendered:
    """Script and line.

    Raises:
        SpecError: the sweep says nothing of Slurm, or the schedule cannot be said.
    """
    sweep, backend = request.sweep, request.sweep.settings.backend
    if not isinstance(backend, SlurmBackend):
        fix = "write backend: {kind: slurm, nodes: 1}"
        refuse(sweep, "backend.kind", backend.kind, "slurm needs to know of nodes", fix)
    script, line = f"{sweep.name}.sbatch", f"{sweep.name}.scrontab"
    left_out = _left_out(request)
    stop = ["python", "-m", "gdpo_tune.schedule", request.file, "stop", sweep.name, "--here"]
    about = Batch(
        name=sweep.name,
        log=str(sweep.root / f"{sweep.name}-%j.log"),
        command=[shlex.quote(word) for word in request.command("python", "--here")],
        on_term=shlex.join(stop),
        alone=True,
    )
    head = request.head(script, left_out)
    submit = f"sbatch {shlex.quote(str(request.folder / script))}"
    entry = f"{five_fields(request, star_decides=False)} {submit}"
    scrontab = [
        *(f"# {each}" for each in request.head(line, left_out)),
        f"#SCRON --job-name={sweep.name}-submit",
        "#SCRON --time=00:05:00",
        entry if sweep.settings.enabled else f"# enabled: false  {entry}",
    ]
    files = {
        script: batch_script.script(backend, sweep, about, request.python, head),
        line: "\n".join(scrontab) + "\n",
    }
    return Rendered(files, tuple(left_out))


def _left_out(request: Request) -> list[str]:
    policy, zone = request.sweep.settings.policy, request.schedule.timezone
    found = [
        f"the time zone: scrontab goes by the controller's clock, which should be {zone}'s; where "
        "it is not, runs begin late by the difference"
    ]
    if policy.missed == "run_once":
        found.append("times at which Slurm was down: scrontab makes up for none")
    if policy.overlap != "queue":
        found.append(f"overlap {policy.overlap}: a time that comes during a run waits for its end")
    if policy.max_runtime is None:
        found.append("a time limit, without max_runtime: the partition's own ends the job")
    return found
