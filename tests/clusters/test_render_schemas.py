"""Rendered files, checked by schemas of Kubernetes and keys of KubeRay, and by systemd."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from ruamel.yaml import YAML

from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.render import build_job_script, build_ray_job, render_ticker
from tests.support.paths import ROOT
from tests.support.render import HEAD, KUBERAY, LOCAL, SLURM
from tests.support.schedule import load_scheduled_sweep

pytestmark = pytest.mark.slow

SCHEMAS = "kubernetes-validate==1.37.0"
KUBERNETES = ("v1.30.0", "v1.37.0")
"""The oldest version whose CronJobs have all that is used here, and the newest one known."""
PLACE = "/api/_definitions.json"
"""Address under which the schemas refer to each other."""
KUBERAY_KEYS = ROOT / "tests" / "data" / "kuberay_keys.txt"
TYPES = {"integer": int, "number": (int, float), "string": str, "boolean": bool}
VARIANTS = {
    "plain": KUBERAY,
    "nothing but the image": HEAD + "backend: {kind: kuberay, image: i, cluster: c}\nstorage: /s\n",
    "everything": KUBERAY.replace(
        "claim: sweeps", "claim: sweeps, secret: s, service_account: a"
    ).replace("image: search:1", "image: search:1, head: {gpus: 2}, namespace: night"),
    "no limit": KUBERAY.replace("max_runtime: 10h, ", ""),
    "a queue": KUBERAY.replace("claim: sweeps", "claim: sweeps, queue: night"),
    "places": KUBERAY.replace(
        "claim: sweeps",
        "claim: sweeps, node_selector: {gpu: h100, zone: on}, tolerations: [{key: nvidia.com/gpu, "
        "operator: Exists, effect: NoSchedule}, {key: team, value: search}], "
        "image_pull_secrets: [registry], shared_memory: 8Gi",
    ).replace("zone: on", 'zone: "on"'),
    "shared memory alone": HEAD
    + "backend: {kind: kuberay, image: i, shared_memory: 1Gi}\nstorage: s3://bucket/runs\n",
    "no worker": KUBERAY.replace("claim: sweeps", "claim: sweeps, workers: 0"),
}


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict JSON schemas of Kubernetes: unknown keys are refused."""
    folder = tmp_path_factory.mktemp("schemas")
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), SCHEMAS]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip download {SCHEMAS}: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = re.compile(rf".*/({'|'.join(map(re.escape, KUBERNETES))})-local-strict/.*")
        archive.extractall(folder, [name for name in archive.namelist() if wanted.match(name)])
    return folder / "kubernetes_validate" / "kubernetes-json-schema"


def documents(text: str) -> list[Any]:
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    return list(yaml.load_all(text))


def check_kubernetes(schemas: Path, document: dict[str, Any]) -> None:
    group, _, version = document["apiVersion"].rpartition("/")
    middle = f"-{group.partition('.')[0]}" if group else ""
    for each in KUBERNETES:
        folder = schemas / f"{each}-local-strict"
        schema = json.loads(
            (folder / f"{document['kind'].lower()}{middle}-{version}.json").read_text()
        )
        definitions = json.loads((folder / "_definitions.json").read_text())
        registry = Registry().with_resource(PLACE, DRAFT202012.create_resource(definitions))
        jsonschema.Draft202012Validator(schema, registry=registry).validate(document)


def check_kuberay(schemas: Path, document: dict[str, Any]) -> None:
    """Every key is one that KubeRay has, of its type; every pod one of Kubernetes."""
    known = dict(
        line.split(" ", 1)
        for line in KUBERAY_KEYS.read_text().splitlines()
        if not line.startswith("#")
    )
    assert document["apiVersion"] == "ray.io/v1"
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    check_keys(schemas, known, document["kind"], document["spec"])


def check_keys(schemas: Path, known: dict[str, str], path: str, value: Any) -> None:
    if known.get(path) == "pod":
        assert set(value) == {"spec"}
        pod = {"apiVersion": "v1", "kind": "Pod", "spec": value["spec"]}
        check_kubernetes(schemas, pod)
    elif isinstance(value, dict):
        for key, child in value.items():
            free = f"{path}.*" in known
            check_keys(schemas, known, f"{path}.*" if free else f"{path}.{key}", child)
    elif isinstance(value, list):
        for child in value:
            check_keys(schemas, known, f"{path}[]", child)
    else:
        assert path in known, f"{path} is no key of KubeRay"
        assert isinstance(value, TYPES[known[path]]), path
        assert not (isinstance(value, bool) and known[path] == "integer"), path


def write_cron_job(directory: Path, text: str) -> str:
    sweep = load_scheduled_sweep(directory, text)
    (manifest,) = render_ticker([sweep], str(sweep.file), "kuberay").values()
    return manifest


def write_ray_job(directory: Path, text: str) -> str:
    sweep = load_scheduled_sweep(directory, text)
    name = "nightly-20260329t010000z-a100"
    return build_ray_job(sweep, sweep.settings.backend, name, ["python", "-m", "x"])


@pytest.mark.parametrize("variant", [each for each in VARIANTS if "claim" in VARIANTS[each]])
def test_cron_jobs(schemas, tmp_path, variant):
    found = documents(write_cron_job(tmp_path, VARIANTS[variant]))
    assert found[-1]["kind"] == "CronJob"
    for document in found:
        check_kubernetes(schemas, document)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_jobs(schemas, tmp_path, variant):
    (document,) = documents(write_ray_job(tmp_path, VARIANTS[variant]))
    check_kuberay(schemas, document)
    assert len(document["metadata"]["name"]) <= 47
    assert (
        not {"backoffLimit", "suspend"} & set(document["spec"])
        or "rayClusterSpec" in document["spec"]
    )


def test_pods_are_placed_as_the_file_says(tmp_path):
    (document,) = documents(write_ray_job(tmp_path, VARIANTS["places"]))
    cluster = document["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["nodeSelector"] == {"gpu": "h100", "zone": "on"}
        assert pod["tolerations"] == [
            {"operator": "Exists", "key": "nvidia.com/gpu", "effect": "NoSchedule"},
            {"operator": "Equal", "key": "team", "value": "search"},
        ]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        (container,) = pod["containers"]
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert places == {"storage": "/mnt/sweeps", "shared-memory": "/dev/shm"}
        memory = {each["name"]: each.get("emptyDir") for each in pod["volumes"]}["shared-memory"]
        assert memory == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_the_checks_refuse_wrong_manifests(schemas, tmp_path):
    text = write_ray_job(tmp_path, KUBERAY)
    for old, new in (
        ("backoffLimit: 0", "backOffLimit: 0"),
        ("backoffLimit: 0", 'backoffLimit: "0"'),
        ("claimName:", "claimname:"),
    ):
        (document,) = documents(text.replace(old, new))
        with pytest.raises((AssertionError, jsonschema.ValidationError)):
            check_kuberay(schemas, document)
    text = write_cron_job(tmp_path, KUBERAY)
    document = documents(text.replace("concurrencyPolicy", "concurrencypolicy"))[-1]
    with pytest.raises(jsonschema.ValidationError):
        check_kubernetes(schemas, document)


def test_the_shipped_sweep(schemas):
    (sweep,) = load_sweeps(ROOT / "sweeps" / "kuberay_code.yaml").sweeps
    (text,) = render_ticker([sweep], str(sweep.file), "kuberay").values()
    for document in documents(text):
        check_kubernetes(schemas, document)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_units(tmp_path):
    directory = tmp_path / "100% mine"
    directory.mkdir()
    sweep = load_scheduled_sweep(directory, LOCAL)
    files = render_ticker([sweep], str(sweep.file), "systemd")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = ["systemd-analyze", "verify", "--user", "--man=no", *(str(tmp_path / n) for n in files)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "gdpo-tune" not in done.stderr


def test_batch_scripts_by_a_shell(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, SLURM)
    text = build_job_script(sweep, sweep.settings.backend, "nightly-a1", ["python"], tmp_path)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
