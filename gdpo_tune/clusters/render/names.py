"""The targets by name. Light: the command line needs it before anything else."""

from __future__ import annotations

from dataclasses import dataclass

NEWEST_KUBERAY = (1, 7)


@dataclass(frozen=True)
class Target:
    """Another scheduler."""

    function: str
    """`module:function`."""
    between: str = ""
    """What separates two of its files in one stream."""


TARGETS: dict[str, Target] = {
    "kuberay": Target("gdpo_tune.clusters.render.kuberay_manifests:render", "---\n"),
    "rayjob": Target("gdpo_tune.clusters.render.ray_job:render", "---\n"),
    "slurm": Target("gdpo_tune.clusters.render.slurm_script:render", "\n"),
    "systemd": Target("gdpo_tune.clusters.render.systemd:render", "\n"),
    "crontab": Target("gdpo_tune.clusters.render.crontab:render", "\n"),
}
"""Name -> what writes its files."""
