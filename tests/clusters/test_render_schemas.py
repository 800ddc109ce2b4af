"""Files for other schedulers: what they hold, what is refused, and checks by their readers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from gdpo_tune import schedule
from gdpo_tune.clusters import TARGETS
from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.render import build_job_script, build_ray_job, render_ticker
from gdpo_tune.core.errors import SpecError, UsageError
from tests.support.paths import ROOT
from tests.support.render import HEAD, KUBERAY, LOCAL, SLURM, read_manifests, render
from tests.support.schedule import load_scheduled_sweep

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
def schemas(tmp_path_factory):
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


def check_kubernetes(schemas, document):
    group, _, version = document["apiVersion"].rpartition("/")
    middle = f"-{group.partition('.')[0]}" if group else ""
    for each in KUBERNETES:
        folder = schemas / f"{each}-local-strict"
        file = folder / f"{document['kind'].lower()}{middle}-{version}.json"
        schema = json.loads(file.read_text())
        definitions = json.loads((folder / "_definitions.json").read_text())
        registry = Registry().with_resource(PLACE, DRAFT202012.create_resource(definitions))
        jsonschema.Draft202012Validator(schema, registry=registry).validate(document)


def check_kuberay(schemas, document):
    """Every key is one that KubeRay has, of its type; every pod one of Kubernetes."""
    lines = KUBERAY_KEYS.read_text().splitlines()
    known = dict(line.split(" ", 1) for line in lines if not line.startswith("#"))
    assert document["apiVersion"] == "ray.io/v1"
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    check_keys(schemas, known, document["kind"], document["spec"])


def check_keys(schemas, known, path, value):
    if known.get(path) == "pod":
        assert set(value) == {"spec"}
        check_kubernetes(schemas, {"apiVersion": "v1", "kind": "Pod", "spec": value["spec"]})
    elif isinstance(value, dict):
        for key, child in value.items():
            name = "*" if f"{path}.*" in known else key
            check_keys(schemas, known, f"{path}.{name}", child)
    elif isinstance(value, list):
        for child in value:
            check_keys(schemas, known, f"{path}[]", child)
    else:
        assert path in known, f"{path} is no key of KubeRay"
        assert isinstance(value, TYPES[known[path]]), path
        assert not (isinstance(value, bool) and known[path] == "integer"), path


def write_cron_job(directory, text):
    (manifest,) = render(load_scheduled_sweep(directory, text), "kuberay").values()
    return manifest


def write_ray_job(directory, text):
    sweep = load_scheduled_sweep(directory, text)
    name = "nightly-20260329t010000z-a100"
    return build_ray_job(sweep, sweep.settings.backend, name, ["python", "-m", "x"])


@pytest.mark.slow
@pytest.mark.parametrize("variant", [each for each in VARIANTS if "claim" in VARIANTS[each]])
def test_cron_jobs(schemas, tmp_path, variant):
    found = read_manifests(write_cron_job(tmp_path, VARIANTS[variant]))
    assert found[-1]["kind"] == "CronJob"
    for document in found:
        check_kubernetes(schemas, document)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_jobs(schemas, tmp_path, variant):
    (document,) = read_manifests(write_ray_job(tmp_path, VARIANTS[variant]))
    check_kuberay(schemas, document)
    assert len(document["metadata"]["name"]) <= 47
    once = {"backoffLimit", "suspend"} & set(document["spec"])
    assert not once or "rayClusterSpec" in document["spec"]


def test_pods_are_placed_as_the_file_says(tmp_path):
    (document,) = read_manifests(write_ray_job(tmp_path, VARIANTS["places"]))
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
    (alone,) = read_manifests(write_ray_job(tmp_path, VARIANTS["shared memory alone"]))
    (workers,) = alone["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == 1


@pytest.mark.slow
def test_the_checks_refuse_wrong_manifests(schemas, tmp_path):
    text = write_ray_job(tmp_path, KUBERAY)
    for old, new in (
        ("backoffLimit: 0", "backOffLimit: 0"),
        ("backoffLimit: 0", 'backoffLimit: "0"'),
        ("claimName:", "claimname:"),
    ):
        (document,) = read_manifests(text.replace(old, new))
        with pytest.raises((AssertionError, jsonschema.ValidationError)):
            check_kuberay(schemas, document)
    text = write_cron_job(tmp_path, KUBERAY)
    document = read_manifests(text.replace("concurrencyPolicy", "concurrencypolicy"))[-1]
    with pytest.raises(jsonschema.ValidationError):
        check_kubernetes(schemas, document)


@pytest.mark.slow
def test_the_shipped_sweep(schemas):
    (sweep,) = load_sweeps(ROOT / "sweeps" / "kuberay_code.yaml").sweeps
    (text,) = render(sweep, "kuberay").values()
    for document in read_manifests(text):
        check_kubernetes(schemas, document)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_units(tmp_path):
    directory = tmp_path / "100% mine"
    directory.mkdir()
    files = render(load_scheduled_sweep(directory, LOCAL), "systemd")
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


# What they hold, and what is refused

SWEEPS = {"systemd": LOCAL, "crontab": LOCAL, "slurm": SLURM, "kuberay": KUBERAY}


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_ticks_the_directory_every_five_minutes(tmp_path, target):
    project = tmp_path / "My search"
    sweep = load_scheduled_sweep(project, SWEEPS[target])
    files = render_ticker([sweep], str(sweep.file.parent), target)
    assert tuple(files) == tuple(f"gdpo-tune-my-search.{each}" for each in TARGETS[target])
    text = "".join(files.values()).replace(", ", " ")
    assert "-m gdpo_tune.schedule sweeps tick" in text
    assert "/5" in text
    assert f"gdpo-tune-nightly.{TARGETS[target][0]}" in render(sweep, target)


def test_the_pod_of_kubernetes_may_do_what_a_tick_needs(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY)
    (text,) = render_ticker([sweep], str(sweep.file.parent), "kuberay").values()
    documents = {each["kind"]: each for each in read_manifests(text)}
    assert documents["Role"]["rules"][0]["verbs"] == ["create", "get", "delete"]
    pod = documents["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == documents["ServiceAccount"]["metadata"]["name"]
    assert pod["containers"][0]["image"] == "search:1"
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == sweep.storage
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "sweeps"}


@pytest.mark.parametrize(
    ("target", "old", "new", "message"),
    [
        ("kuberay", KUBERAY, LOCAL, "backend.kind.*a pod ticks only sweeps of kuberay"),
        ("kuberay", "claim: sweeps", "cluster: c", "backend.claim.*would lose the state"),
        ("kuberay", "claim", "working_dir: s3://b/a.zip, claim", "working_dir.*from an archive"),
        ("slurm", KUBERAY, LOCAL, "backend.kind.*would end with the job of Slurm that ticks"),
    ],
)
def test_what_targets_refuse(tmp_path, target, old, new, message):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY.replace(old, new))
    with pytest.raises(SpecError, match=message):
        render(sweep, target)


def test_sweeps_of_different_pods_are_all_named(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY)
    backend = sweep.settings.backend.model_copy(update={"image": "other:2", "secret": "s"})
    second = replace(sweep, settings=sweep.settings.model_copy(update={"backend": backend}))
    with pytest.raises(SpecError, match="one pod ticks all files") as found:
        render_ticker([sweep, second], str(sweep.file.parent), "kuberay")
    assert [each.key for each in found.value.problems] == ["backend.image", "backend.secret"]


def test_the_command_prints_or_writes(tmp_path, capsys, monkeypatch):
    sweep = load_scheduled_sweep(tmp_path, LOCAL)
    monkeypatch.chdir(tmp_path)
    assert schedule.main(["sweeps", "render", "--to", "crontab"]) == 0
    printed = capsys.readouterr().out
    assert schedule.main([str(sweep.file), "render", "--to", "systemd", "--out", "units"]) == 0
    names = [Path("units", f"gdpo-tune-nightly.{each}") for each in ("service", "timer")]
    assert capsys.readouterr().out.split() == [str(name) for name in names]
    assert "-m gdpo_tune.schedule sweeps/nightly.yaml tick" in names[0].read_text()
    assert "-m gdpo_tune.schedule sweeps tick" in printed
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/x cannot be written"):
        schedule.main(["sweeps", "render", "--to", "crontab", "--out", "file/x"])


@pytest.mark.parametrize("named", [True, False])
def test_the_job_that_ticks_is_in_the_partition_and_account_of_the_file(tmp_path, named):
    """scrontab(1): options as of sbatch, in lines of #SCRON."""
    text = SLURM.replace("partition: gpu", "partition: gpu, account: rl" if named else "setup: x")
    sweep = load_scheduled_sweep(tmp_path, text)
    (lines,) = render(sweep, "slurm").values()
    options = [line for line in lines.splitlines() if line.startswith("#SCRON")]
    assert ("#SCRON --partition=gpu" in options) == named
    assert ("#SCRON --account=rl" in options) == named


def test_a_target_that_is_gone_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        schedule.main(["sweeps", "render", "--to", "rayjob"])
    assert "choose from systemd, crontab, slurm, kuberay" in capsys.readouterr().err


@pytest.mark.parametrize("name", [each.name for each in (ROOT / "sweeps").glob("*.yaml")])
def test_shipped_sweeps_are_rendered(name):
    file = ROOT / "sweeps" / name
    loaded = load_sweeps(file)
    kind = loaded.sweeps[0].settings.backend.kind
    target = kind if kind in TARGETS else "systemd"
    assert render_ticker(loaded.sweeps, str(file), target)
