"""Sweeps for other schedulers, as if the project were in /srv/search."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render.base import render_all
from tests.support.paths import ROOT
from tests.support.schedule import load_scheduled_sweep

PROJECT = "/srv/search"
PYTHON = f"{PROJECT}/.venv/bin/python"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
GOLDEN = ROOT / "tests" / "data" / "rendered"
HEAD = """space: search_spaces/gpu.yaml
schedule: {cron: "30 2 * * 1-5", timezone: Europe/Berlin}
policy: {max_runtime: 10h, missed_grace: 3h}
budget: {trials: 60, gpu_hours: 80}
"""
LOCAL = HEAD + "storage: runs\n"
SLURM = HEAD + "backend: {kind: slurm, nodes: 2, gpus_per_node: 4, partition: gpu}\nstorage: runs\n"
POD = "{cpus: 8, gpus: 1, memory: 32Gi}"
BACKEND = f"{{kind: kuberay, image: search:1, claim: sweeps, worker: {POD}}}"
KUBERAY = f"{HEAD}backend: {BACKEND}\nstorage: /mnt/sweeps\n"


def render(
    sweep: ScheduledSweep,
    target: str,
    *,
    kuberay: tuple[int, int] | None = None,
    ray_cron_job: bool = False,
) -> dict[str, str]:
    rendered, _ = render_all(
        [sweep],
        target,
        python=PYTHON,
        directory=sweep.root,
        now=NOW,
        kuberay=kuberay,
        ray_cron_job=ray_cron_job,
    )
    (files,) = rendered.values()
    return files


def render_nightly(directory: Path, text: str, target: str, **options: bool) -> dict[str, str]:
    """Render the files of a sweep `nightly`, as they would be in /srv/search."""
    files = render(load_scheduled_sweep(directory, text), target, **options)
    return {name: each.replace(str(directory), PROJECT) for name, each in files.items()}
