"""A sweep's schedule in the files of another scheduler, which keeps it instead of `tick`.

Each target fills a template of `templates/` so that its scheduler calls `run NAME --wait`: state,
attempts, budgets and webhook are those of any other run. What a target cannot express is named in
its file.
"""

from __future__ import annotations

NEWEST_KUBERAY = (1, 7)
TARGETS: dict[str, str] = {
    "kuberay": "gdpo_tune.clusters.render.targets:render_cron_job",
    "rayjob": "gdpo_tune.clusters.render.targets:render_ray_job",
    "slurm": "gdpo_tune.clusters.render.targets:render_batch_script",
    "systemd": "gdpo_tune.clusters.render.targets:render_systemd",
    "crontab": "gdpo_tune.clusters.render.targets:render_crontab",
}
"""Name -> `module:function` that returns the files of a `RenderRequest`, or raises a `SpecError` if
the target cannot express the sweep. Light: the command line needs it first of all."""
