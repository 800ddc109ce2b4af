"""Mistakes in files for KubeRay and Slurm: file, line, key, reason, fix."""

from __future__ import annotations

import pytest

from gdpo_tune.clusters import console
from gdpo_tune.clusters.load_schedules import load_sweeps
from tests.support.render import KUBERAY, SLURM
from tests.support.schedule import load_scheduled_sweep

NAME = "a name in Kubernetes"
CASES = {
    "no image": (KUBERAY, "image: search:1, ", "", "backend.image", "missing", "add image:"),
    "an empty image": (KUBERAY, "search:1", '""', "backend.image", "not the name", "write it like"),
    "an unknown key": (
        KUBERAY,
        "claim: sweeps",
        "clam: sweeps",
        "backend.clam",
        "unknown key",
        "'claim'",
    ),
    "memory without a unit": (
        KUBERAY,
        "32Gi",
        "lots",
        "backend.worker.memory",
        "not an amount of memory",
        "32Gi",
    ),
    "no worker at all": (
        KUBERAY,
        "claim: sweeps",
        "claim: sweeps, workers: -1",
        "backend.workers",
        "must be at least 0",
        "at least 0",
    ),
    "a folder of this machine": (
        KUBERAY,
        "/mnt/sweeps",
        "runs",
        "storage",
        "which pods do not see",
        "claim:",
    ),
    "nothing mounted": (
        KUBERAY,
        "claim: sweeps, ",
        "",
        "backend",
        "nothing is mounted at storage",
        "PersistentVolumeClaim",
    ),
    "a working folder of nowhere": (
        KUBERAY,
        "claim: sweeps",
        "claim: sweeps, working_dir: search",
        "backend.working_dir",
        "neither a directory",
        "/srv/search",
    ),
    "a queue for a cluster that is there": (
        KUBERAY,
        "claim: sweeps",
        "cluster: a, queue: b",
        "backend.queue",
        "Kueue admits new clusters",
        "one of the two",
    ),
    "an underscore in the name": (
        KUBERAY,
        "space:",
        "name: night_ly\nspace:",
        "name",
        "RFC 1123",
        "lowercase letters",
    ),
    "a capital letter": (
        KUBERAY,
        "space:",
        "name: Nightly\nspace:",
        "name",
        "RFC 1123",
        "lowercase letters",
    ),
    "a name that begins with a digit": (
        KUBERAY,
        "space:",
        "name: 7-nights\nspace:",
        "name",
        "RFC 1123",
        "a letter first",
    ),
    "a name that is too long": (
        KUBERAY,
        "space:",
        f"name: {'n' * 26}\nspace:",
        "name",
        "26 characters, too long",
        "at most 25",
    ),
    "no node": (SLURM, "nodes: 2", "nodes: 0", "backend.nodes", "must be at least 1", "at least 1"),
    "an option that is none": (
        SLURM,
        "nodes: 2",
        "nodes: 2, options: [a100]",
        "backend.options",
        "not an option of sbatch",
        "--constraint",
    ),
    "a misspelt backend": (
        SLURM,
        "kind: slurm",
        "kind: slrum",
        "backend.kind",
        "unknown backend",
        "'slurm'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_file(tmp_path, case):
    text, old, new, key, reason, fix = CASES[case]
    assert old in text
    folder = tmp_path / "sweeps"
    load_scheduled_sweep(tmp_path, text)
    (folder / "nightly.yaml").write_text(text.replace(old, new, 1))
    error = load_sweeps(folder / "nightly.yaml").error
    assert error is not None
    (problem,) = error.problems
    assert problem.key == key
    assert reason in problem.reason
    assert fix in problem.fix
    line = int(problem.where.rpartition(":")[2])
    named = key.rpartition(".")[2]
    assert named in text.replace(old, new, 1).splitlines()[line - 1] or reason == "missing"


def test_the_longest_name_fits(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY.replace("space:", f"name: {'n' * 25}\nspace:"))
    job = f"{sweep.name}-20260329t010000z-a100"
    assert len(job) == 47


def test_a_tracking_file_in_a_pod_is_warned_of(tmp_path):
    (doubt,) = console.find_warnings(load_scheduled_sweep(tmp_path, KUBERAY))
    assert "lies in the job's own directory" in doubt
    assert not console.find_warnings(load_scheduled_sweep(tmp_path, SLURM))
    assert not console.find_warnings(
        load_scheduled_sweep(tmp_path, KUBERAY + "tracking: http://mlflow:5000\n")
    )
