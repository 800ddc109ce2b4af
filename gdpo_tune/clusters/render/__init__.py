"""A sweep's schedule in the files of another scheduler, which keeps it instead of `tick`.

Each target fills a template of `templates/` so that its scheduler calls `run NAME --wait`: state,
attempts, budgets and webhook are those of any other run. What a target cannot express is named in
its file.
"""

from __future__ import annotations

from dataclasses import dataclass

NEWEST_KUBERAY = (1, 7)


@dataclass(frozen=True)
class RenderTarget:
    """Another scheduler."""

    function: str
    """`module:function` of a function `render(request) -> Rendered`."""
    separator: str = "\n"
    """Text between two of its files in one stream."""


TARGETS: dict[str, RenderTarget] = {
    "kuberay": RenderTarget("gdpo_tune.clusters.render.cron_job:render", "---\n"),
    "rayjob": RenderTarget("gdpo_tune.clusters.render.ray_job:render", "---\n"),
    "slurm": RenderTarget("gdpo_tune.clusters.render.batch_script:render"),
    "systemd": RenderTarget("gdpo_tune.clusters.render.systemd:render"),
    "crontab": RenderTarget("gdpo_tune.clusters.render.crontab:render"),
}
"""Name -> how its files are written. Light: the command line needs it first of all."""
