"""Sweeps for other schedulers, as if the project were in /srv/search."""

from __future__ import annotations

from ruamel.yaml import YAML

from gdpo_tune.clusters.render import render_ticker

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
RAY = """space: search_spaces/code.yaml
backend: {kind: ray-job, address_env: RAY_HEAD, token_env: RAY_TOKEN}
storage: shared
"""


def read_manifests(text):
    """Return documents as Kubernetes reads them: by version 1.1 of YAML."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    return list(yaml.load_all(text))


def render(sweep, target):
    """Render the files of a target for a sweep alone."""
    return render_ticker([sweep], str(sweep.file), target)
