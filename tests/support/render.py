"""Sweeps for other schedulers, as if the project were in /srv/search."""

from __future__ import annotations

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
