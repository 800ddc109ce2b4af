"""Rendered files, checked by schemas of Kubernetes and KubeRay, and by systemd."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from ruamel.yaml import YAML

from gdpo_tune.clusters.backends.base import ProgramResult, ScheduledJob
from gdpo_tune.clusters.backends.kuberay import KubeRay
from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.schedule_spec import CronSchedule
from tests.support.paths import ROOT
from tests.support.render import HEAD, KUBERAY, LOCAL, SLURM, render, render_nightly
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
    "everything": KUBERAY.replace("claim: sweeps", "claim: sweeps, secret: s, service_account: a")
    .replace("missed_grace: 3h", "missed: skip, overlap: replace")
    .replace("image: search:1", "image: search:1, head: {gpus: 2}, namespace: night")
    + "enabled: false\n",
    "no limit": KUBERAY.replace("max_runtime: 10h, ", ""),
    "a queue": KUBERAY.replace("claim: sweeps", "claim: sweeps, queue: night"),
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
    spec = dict(document["spec"])
    if document["kind"] == "RayCronJob":
        check_keys(schemas, known, "RayJob", spec.pop("jobTemplate"))
    check_keys(schemas, known, document["kind"], spec)
    check_whole(document)


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


def check_whole(document: dict[str, Any]) -> None:
    """Against the definition as KubeRay ships it, where KUBERAY_CRDS names their directory."""
    if "KUBERAY_CRDS" in os.environ:
        schema = definition(f"ray.io_{document['kind'].lower()}s.yaml")
        jsonschema.Draft202012Validator(schema).validate(document)


@functools.cache
def definition(file: str) -> Any:
    versions = YAML(typ="safe").load(Path(os.environ["KUBERAY_CRDS"], file))["spec"]["versions"]
    (schema,) = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1"]
    return closed(schema)


def closed(schema: Any) -> Any:
    """The schema with every object closed to keys that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(child) for key, child in schema.items()}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_cron_jobs(schemas, tmp_path, variant):
    for text in render_nightly(tmp_path, VARIANTS[variant], "kuberay").values():
        found = documents(text)
        assert found[-1]["kind"] == "CronJob"
        for document in found:
            check_kubernetes(schemas, document)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_jobs(schemas, tmp_path, variant):
    (document,) = documents(*render_nightly(tmp_path, VARIANTS[variant], "rayjob").values())
    check_kuberay(schemas, document)
    assert (
        not {"backoffLimit", "suspend"} & set(document["spec"])
        or "rayClusterSpec" in document["spec"]
    )


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "a queue"])
def test_ray_cron_jobs(schemas, tmp_path, variant):
    (text,) = render_nightly(tmp_path, VARIANTS[variant], "kuberay", ray_cron_job=True).values()
    check_kuberay(schemas, *documents(text))


@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_jobs_that_the_backend_submits(schemas, tmp_path, variant):
    texts: list[str] = []

    def call(backend: str, words: object, text: str) -> ProgramResult:
        texts.append(text)
        return ProgramResult(0, "", "")

    sweep = load_scheduled_sweep(tmp_path, VARIANTS[variant])
    job = ScheduledJob(
        "nightly-20260329T010000Z-a1", "nightly-20260329T010000Z", ("s.yaml",), tmp_path
    )
    KubeRay(sweep, sweep.settings.backend, call).submit(job)
    (document,) = documents(*texts)
    check_kuberay(schemas, document)
    assert len(document["metadata"]["name"]) <= 47


def test_the_checks_refuse_wrong_manifests(schemas, tmp_path):
    (text,) = render_nightly(tmp_path, KUBERAY, "rayjob").values()
    for old, new in (
        ("backoffLimit: 2", "backOffLimit: 2"),
        ("backoffLimit: 2", 'backoffLimit: "2"'),
        ("claimName:", "claimname:"),
    ):
        (document,) = documents(text.replace(old, new))
        with pytest.raises((AssertionError, jsonschema.ValidationError)):
            check_kuberay(schemas, document)
    (text,) = render_nightly(tmp_path, KUBERAY, "kuberay").values()
    document = documents(text.replace("timeZone", "timezone"))[-1]
    with pytest.raises(jsonschema.ValidationError):
        check_kubernetes(schemas, document)


def test_shipped_sweeps(schemas):
    (sweep,) = load_sweeps(ROOT / "sweeps" / "kuberay_code.yaml").sweeps
    for document in documents(*render(sweep, "kuberay").values()):
        check_kubernetes(schemas, document)
    check_kuberay(schemas, *documents(*render(sweep, "rayjob").values()))


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze here"
)


@needs_systemd
@pytest.mark.parametrize("text", [LOCAL, SLURM], ids=["local", "slurm"])
def test_units(tmp_path, text):
    folder = tmp_path / "100% mine"
    folder.mkdir()
    for name, unit in render(load_scheduled_sweep(folder, text), "systemd").items():
        (tmp_path / name).write_text(unit.replace("/srv/search/.venv/bin/python", sys.executable))
    units = [str(tmp_path / f"gdpo-nightly.{kind}") for kind in ("service", "timer")]
    words = ["systemd-analyze", "verify", "--user", "--man=no", *units]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "gdpo-nightly" not in done.stderr


def events_of(timer: str) -> list[str]:
    return [line.partition("=")[2] for line in timer.splitlines() if line.startswith("OnCalendar=")]


def elapses(event: str, count: int) -> Iterator[datetime]:
    words = ["systemd-analyze", "calendar", f"--iterations={count}", event]
    base = "--base-time=2026-01-01 00:00:00 UTC"
    environment = {**os.environ, "TZ": "UTC", "LC_ALL": "C"}
    done = subprocess.run(
        [*words, base], capture_output=True, text=True, check=True, env=environment
    )
    for found in re.findall(r"(?:elapse|#\d+): \w{3} ([-0-9]+ [0-9:]+) UTC", done.stdout):
        yield datetime.fromisoformat(f"{found}+00:00")


LINES = [
    "30 2 * * *",
    "*/20 1-3 * * *",
    "0 4 * * MON-FRI",
    "0 4 1,15 * 1",
    "0 4 */10 * 1",
    "15 4 1-7 */3 *",
    "0 4 L * *",
    "0 4 15,L * *",
    "0 4 * * 1#2",
    "0 4 * * 5L",
    "0 4 * 2 7",
    "5/20 4 * * sun",
    "0 4 13 * 5",
    "0 4 L * 1#1",
]


@needs_systemd
@pytest.mark.parametrize("line", LINES)
def test_timers_elapse_when_the_line_is_due(tmp_path, line):
    zone = "Asia/Kolkata"  # without changes of the clock, which systemd sees otherwise
    text = LOCAL.replace("30 2 * * 1-5", line).replace("Europe/Berlin", zone)
    timer = render(load_scheduled_sweep(tmp_path, text), "systemd")["gdpo-nightly.timer"]
    count, start = 60, datetime(2026, 1, 1, tzinfo=UTC)
    due = CronSchedule(cron=line, timezone=zone).iterate_times(start)
    found = sorted({each for event in events_of(timer) for each in elapses(event, count)})
    assert found[:count] == list(itertools.islice(due, count))


@needs_systemd
def test_systemd_skips_the_hour_that_spring_skips():
    """The note in the unit is true: measured, not read."""
    found = list(elapses("*-*-* 02:30:00 Europe/Berlin", 120))
    days = {each.date().isoformat() for each in found}
    assert "2026-03-28" in days
    assert "2026-03-29" not in days
    assert "2026-03-30" in days


def test_batch_scripts_by_a_shell(tmp_path):
    text = render_nightly(tmp_path, SLURM, "slurm")["nightly.sbatch"]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
