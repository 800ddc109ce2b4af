"""`gdpo-tune doctor`: every row, and what turns it into a problem or a warning."""

import json
import os
import re
import sys
from collections import namedtuple
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdpo_tune import doctor, sandbox
from gdpo_tune.core import engines, system
from gdpo_tune.core.errors import SandboxUnavailable
from gdpo_tune.spec import machine
from gdpo_tune.tuning.ray import cluster
from tests.support.paths import ROOT

SPACE = str(ROOT / "search_spaces" / "code.yaml")
OTHERS = ("process 9\n    fix: wait",)
SECRET = "sesame-2718281828"


@contextmanager
def _open_sandbox():
    yield SimpleNamespace(info=SimpleNamespace(tier="full"))


def _refuse_sandbox():
    raise SandboxUnavailable("no-new-privileges: refused")


@pytest.fixture(autouse=True)
def healthy(monkeypatch, tmp_path):
    """A machine without a problem."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(machine, "list_other_sweeps", lambda: iter(()))
    monkeypatch.setattr(machine, "count_visible_gpus", lambda *_: 0)
    monkeypatch.setattr(sandbox, "CodeSandbox", _open_sandbox)
    monkeypatch.setattr(system, "read_machine_memory", lambda: 8 << 30)
    _free(monkeypatch, {})


def _free(monkeypatch, bytes_free):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda p: usage(bytes_free.get(p, 1 << 40)))


def read_page(text):
    """Return name -> state, text and fix of each row of a page."""
    rows = []
    for line in text.splitlines():
        if line.startswith(doctor.FIX):
            rows[-1][1][2] = line.removeprefix(doctor.FIX)
        elif found := re.match(r"(\S.*?) +(ok|warning|problem)  +(.*)", line):
            rows.append((found[1], [found[2], found[3], ""]))
    return rows


def run(capsys, *arguments):
    """Return the exit status, and state, text and fix of each row."""
    status = doctor.main(arguments)
    return status, dict(read_page(capsys.readouterr().out))


def test_json_may_be_passed_on(monkeypatch, capsys, tmp_path):
    """People post it in public issues: numbers and versions stay, what names or quotes goes."""
    place = tmp_path / "kanarie"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("https_proxy", "http://kanarie:9")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}")
    monkeypatch.setattr(machine, "list_other_sweeps", lambda: iter(("sweep in /kanarie",)))
    fake_versions(monkeypatch, trl="1.16.0", torch="2.13.0+kanarie")
    assert doctor.main([SPACE, "--set", "task=kanarie", "--json"]) == 1
    page = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(page)}
    assert "kanarie" not in page
    assert rows["trl"]["text"] == "1.16.0; tested <1.17,>=1.16"
    assert (rows["torch"]["state"], rows["torch"]["text"]) == ("ok", "")
    assert rows["TMPDIR"]["text"].endswith("GiB to write")
    assert rows["CPUs"]["text"].endswith("by affinity and quotas")
    assert rows["sandbox"]["text"] == "full"
    assert (rows["MLflow"]["state"], rows["MLflow"]["text"]) == ("problem", "")
    assert rows["MLflow"]["fix"].startswith("mend that")
    assert rows["Ray"]["text"] == "starts on this machine, with a token"
    assert (rows["file"]["state"], rows["file"]["text"], rows["file"]["fix"]) == ("problem", "", "")


def test_a_healthy_machine_has_no_problem(capsys):
    status, rows = run(capsys)
    wrong = {name: row for name, row in rows.items() if row[0] == "problem"}
    assert (status, wrong) == (0, {})
    assert {"python", "trl", "vllm", "CPUs", "memory", "shared memory", "TMPDIR"} <= rows.keys()
    assert {"disk", "sandbox", "GPUs", "proxies", "MLflow", "Ray"} <= rows.keys()
    assert rows["trl"][1].endswith("tested <1.17,>=1.16")
    assert "pytest" not in rows  # of an extra that no sweep needs
    assert doctor.main([]) == 0
    page = capsys.readouterr().out
    assert "sandbox          ok       full\n" in page
    assert "fix:" not in page or "warning" in page


def fake_versions(monkeypatch, **versions):
    def list_distributions(name):
        return [SimpleNamespace(version=versions[name])] if name in versions else []

    monkeypatch.setattr(metadata, "distributions", list_distributions)


def test_versions_outside_of_the_tested_ranges(monkeypatch, capsys):
    """The ranges are those of the package's metadata (PEP 345, `Requires-Dist`; PEP 440)."""
    fake_versions(monkeypatch, trl="1.17.0", torch="2.13.0+cu130", vllm="0.40.0")
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.4")
    status, rows = run(capsys)
    assert status == 1
    assert rows["python"][:2] == ["problem", "3.10.4; tested >=3.11"]
    fix = "pip install 'trl<1.17,>=1.16'"
    assert rows["trl"] == ["problem", "1.17.0; tested <1.17,>=1.16", fix]
    assert rows["ray"][:2] == ["problem", "not installed; tested <2.61,>=2.60"]
    # A local version is a build of the same release; of an extra only some sweeps need it.
    states = {"torch": "ok", "vllm": "warning", "peft": "ok"}
    assert {name: rows[name][0] for name in states} == states


@pytest.mark.parametrize(
    ("row", "change", "state", "text"),
    [
        ("memory", lambda m: m.setattr(system, "read_machine_memory", lambda: 1 << 30), "problem",
         "1.0 GiB"),
        ("CPUs", lambda m: m.setattr(machine, "list_other_sweeps", lambda: iter(OTHERS)),
         "warning", "by affinity and quotas; process 9"),
        ("shared memory", lambda m: _free(m, {"/dev/shm": 64 << 20}), "warning", "/dev/shm: 0.1"),
        ("TMPDIR", lambda m: m.setenv("TMPDIR", "/nowhere"), "problem", "/nowhere: 0.0 GiB"),
        ("disk", lambda m: _free(m, {os.getcwd(): 1 << 20}), "problem", "0.0 GiB to write"),
        ("sandbox", lambda m: m.setattr(sandbox, "CodeSandbox", _refuse_sandbox), "problem",
         "no-new-privileges: refused"),
        ("MLflow", lambda m: m.setenv("MLFLOW_TRACKING_URI", f"http://me:{SECRET}@127.0.0.1:9"),
         "problem", "http://me:***@127.0.0.1:9 MlflowException: NewConnectionError"),
        ("Ray", lambda m: m.setenv("RAY_ADDRESS", "127.0.0.1:9"), "problem",
         "RAY_ADDRESS = 127.0.0.1:9"),
        ("Ray", lambda m: m.setenv("RAY_ADDRESS", "head"), "problem", "RAY_ADDRESS = head"),
        ("Ray", lambda m: m.setenv("RAY_ADDRESS", "127.0.0.1:x"), "problem", ":x"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)  # fmt: skip
def test_what_is_wrong_with_a_machine(row, change, state, text, monkeypatch, capsys):
    change(monkeypatch)
    status, rows = run(capsys)
    assert status == (state == "problem")
    assert rows[row][0] == state
    assert text in rows[row][1]
    assert rows[row][2]
    assert SECRET not in str(rows)


def test_a_limit_of_threads_is_what_the_sweep_refuses(monkeypatch, capsys):
    monkeypatch.setattr(cluster, "count_free_threads", lambda: 100)
    status, rows = run(capsys)
    reason = cluster.find_thread_problem().split("\n")[0]
    assert (status, *rows["Ray"][:2]) == (1, "problem", reason)


@pytest.mark.parametrize("access", ["asks for a token", "is open: everyone may join"])
def test_whom_a_cluster_lets_in_is_said(access, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(cluster, "find_cluster", lambda: ("auto", "head:6379"))
    monkeypatch.setattr(cluster, "describe_access", lambda _: access)
    assert run(capsys)[1]["Ray"][:2] == ["ok", f"RAY_ADDRESS = auto {access}"]


def test_gpus_are_tried_not_only_listed(monkeypatch, capsys, tmp_path):
    """A driver may list a GPU on which nothing computes: wrong build, wrong driver, fallen off."""
    monkeypatch.setattr(machine, "count_visible_gpus", lambda *_: 1)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(engines, "find_compiler_problem", lambda *_: "there is no C compiler")
    doctor.DRIVER.write_text("NVRM version: 570.1\nGCC version: 12\n")
    monkeypatch.setattr(doctor, "COMPUTE", "print('H100 79 GiB')")
    status, rows = run(capsys)
    assert rows["GPUs"] == ["ok", "NVRM version: 570.1; H100 79 GiB", ""]
    assert (status, rows["compiler"][0]) == (1, "problem")
    monkeypatch.setattr(doctor, "COMPUTE", "raise RuntimeError('no kernel image is available')")
    monkeypatch.setattr(engines, "find_compiler_problem", lambda *_: "")
    status, rows = run(capsys)
    assert (status, rows["GPUs"][0], rows["compiler"][0]) == (1, "problem", "ok")
    assert rows["GPUs"][1].endswith("RuntimeError: no kernel image is available")


def test_the_compute_test_refuses_a_machine_without_a_gpu(monkeypatch, tmp_path):
    """The program itself runs: without a device of CUDA it says so."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch import cuda\n")
    (tmp_path / "torch" / "cuda.py").write_text("def device_count(): return 0")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(doctor.sys, "executable", sys.executable)
    rows = list(doctor.check_gpus())
    assert rows[0]["text"].endswith("AssertionError: PyTorch sees no GPU")


def test_a_file_is_checked_with_all_that_it_lacks(capsys):
    arguments = [SPACE, "--set", "resources.gpus=1", "--set", "resources.env=[UNSET_VARIABLE]"]
    assert doctor.main(arguments) == 1
    rows = [row for name, row in read_page(capsys.readouterr().out) if name == "file"]
    heads = [row[1].partition(":")[0] for row in rows]
    assert heads == ["resources.env = [UNSET_VARIABLE]", "resources.gpus = 1"]
    assert rows[0][2].startswith("export UNSET_VARIABLE=")
    status, found = run(capsys, SPACE, "--set", "search.trails=3")
    assert status == 1
    assert "unknown key" in found["file"][1]
    assert "did you mean 'trials'" in found["file"][2]


def test_a_file_needs_a_directory_that_may_be_written(monkeypatch, capsys, tmp_path):
    """access(2), which root passes everywhere."""
    storage, may = tmp_path / "scratch", os.access
    storage.mkdir()
    monkeypatch.setattr(doctor.os, "access", lambda p, mode: Path(p) != storage and may(p, mode))
    status, rows = run(capsys, SPACE, "--set", f"storage={storage}/runs")
    fix = "name another one with storage:"
    assert (status, rows["file"]) == (1, ["problem", f"{storage} is not writable", fix])
