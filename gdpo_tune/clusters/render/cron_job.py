"""A CronJob of Kubernetes whose pod runs our command and waits, while KubeRay runs RayJobs.

With `--ray-cron-job` a RayCronJob instead: KubeRay keeps the schedule.
"""

from __future__ import annotations

from gdpo_tune.clusters.render.base import RenderRequest, refuse
from gdpo_tune.clusters.render.cron_line import find_skipped_days, format_five_fields
from gdpo_tune.clusters.render.ray_job import find_backend, list_values_here
from gdpo_tune.clusters.scheduler import TICK_TOLERANCE
from gdpo_tune.core.object_store import is_url

FIRST_CRON_JOB, FIRST_ZONE = (1, 6), (1, 7)
"""KubeRay's version that brought RayCronJob, and the one that gave it a time zone."""


def render(request: RenderRequest) -> dict[str, str]:
    """Render the manifest."""
    backend, policy = find_backend(request), request.sweep.settings.policy
    values = {"fields": format_five_fields(request, star_decides=False)}
    values |= {"skipped_days": find_skipped_days(request)}
    if request.ray_cron_job:
        template = "ray_cron_job.yaml.jinja"
        _check_ray_cron_job(request, backend.queue)
        values |= list_values_here(request) | {"has_zone": request.kuberay >= FIRST_ZONE}
    else:
        template = "cron_job.yaml.jinja"
        if is_url(backend.working_dir):
            fix = "write the image's directory with sweeps/ in it, or take --to rayjob"
            reason = "the CronJob's pod reads the file of the sweep from its image"
            refuse(request.sweep, "backend.working_dir", backend.working_dir, reason, fix)
        late = TICK_TOLERANCE.total_seconds()
        grace = policy.missed_grace if policy.missed == "run_once" else late
        # below 10 seconds Kubernetes may never start any
        values |= {"command": request.build_command("python"), "deadline": max(round(grace), 60)}
    name = f"{request.sweep.name}.yaml"
    return {name: request.fill(template, name, **values)}


def _check_ray_cron_job(request: RenderRequest, queue: str) -> None:
    version, zone = ".".join(map(str, request.kuberay)), request.schedule.timezone
    if request.kuberay < FIRST_CRON_JOB:
        reason = f"KubeRay {version} has no RayCronJob, which came with 1.6"
        refuse(request.sweep, "", "", reason, "leave out --ray-cron-job: a CronJob needs none")
    if request.kuberay < FIRST_ZONE and zone != "UTC":
        reason = f"RayCronJob of KubeRay {version} has no time zone, which came with 1.7"
        fix = "write UTC, or leave out --ray-cron-job"
        refuse(request.sweep, "schedule.timezone", zone, reason, fix)
    if queue:
        reason = "a RayCronJob cannot give its RayJobs the label by which Kueue knows them"
        refuse(request.sweep, "backend.queue", queue, reason, "leave out --ray-cron-job")
