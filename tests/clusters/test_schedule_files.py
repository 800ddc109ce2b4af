"""Every mistake in a file of `sweeps/`: file, line, key, reason, fix; all at once."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gdpo_tune.clusters.load_schedules import list_overrides, load_sweeps
from gdpo_tune.clusters.schedule_spec import LocalBackend, RayJobBackend
from gdpo_tune.core.errors import SpecError, UsageError
from tests.support.paths import ROOT
from tests.support.schedule import load_scheduled_sweep

GOOD = """name: nightly
space: search_spaces/gpu.yaml
schedule: {cron: "0 2 * * *", timezone: Europe/Berlin}
policy: {overlap: skip, missed_grace: 90m}
budget: {trials: 20, gpu_hours: 80}
backend: {kind: local}
storage: runs
notify: {webhook_env: GDPO_WEBHOOK, on: [failed]}
"""
CASES = {
    "an unknown key": ("storage: runs", "storag: runs", 7, "storag", "unknown key", "'storage'"),
    "a space that does not exist": (
        "gpu.yaml",
        "gpuu.yaml",
        2,
        "space",
        "there is no file search_spaces/gpuu.yaml",
        "gpu.yaml",
    ),
    "no space": ("space: search_spaces/gpu.yaml\n", "", 1, "space", "missing", "add space:"),
    "a bad cron line": ("0 2 * * *", "0 25 * * *", 3, "schedule.cron", "bad hour", "numbers"),
    "too few fields": ("0 2 * * *", "0 2 * *", 3, "schedule.cron", "4 fields", "minute, hour"),
    "an unknown zone": (
        "Europe/Berlin",
        "Europe/Berln",
        3,
        "schedule.timezone",
        "unknown time zone",
        "'Europe/Berlin'",
    ),
    "a schedule without a line": (
        'cron: "0 2 * * *", ',
        "",
        3,
        "schedule.cron",
        "missing",
        "add cron:",
    ),
    "an unknown policy": (
        "overlap: skip",
        "overlap: skp",
        4,
        "policy.overlap",
        "unknown value",
        "'skip'",
    ),
    "a number as a length of time": (
        "90m",
        "90",
        4,
        "policy.missed_grace",
        "not a length of time",
        "90m, 6h",
    ),
    "no attempt": (
        "overlap: skip",
        "max_attempts: 0",
        4,
        "policy.max_attempts",
        "must be at least 1",
        "at least 1",
    ),
    "no run time": (
        "overlap: skip",
        "max_runtime: 0h",
        4,
        "policy.max_runtime",
        "must be 1m to 366d",
        "of 1m to 366d",
    ),
    "no grace, with which no run would ever start": (
        "90m",
        "0s",
        4,
        "policy.missed_grace",
        "must be 1m to 366d",
        "of 1m to 366d",
    ),
    "a budget of no trials": (
        "trials: 20",
        "trials: 0",
        5,
        "budget.trials",
        "must be above 0",
        "above 0",
    ),
    "a budget of no hours": (
        "gpu_hours: 80",
        "gpu_hours: 0",
        5,
        "budget.gpu_hours",
        "must be above 0",
        "above 0",
    ),
    "a month of no hours": (
        "gpu_hours: 80",
        "gpu_hours_per_30d: 0.0",
        5,
        "budget.gpu_hours_per_30d",
        "must be above 0",
        "above 0",
    ),
    "an unknown backend": (
        "kind: local",
        "kind: ray_job",
        6,
        "backend.kind",
        "unknown backend",
        "'ray-job'",
    ),
    "a backend without a kind": (
        "kind: local",
        "folder: x",
        6,
        "backend",
        "without a kind",
        "add kind:",
    ),
    "a key of another backend": (
        "kind: local",
        "kind: local, address: http://a",
        6,
        "backend.address",
        "unknown key",
        "folder",
    ),
    "a cluster without an address": (
        "kind: local",
        "kind: ray-job",
        6,
        "backend",
        "no address",
        "address_env",
    ),
    "a backend that is a word": (
        "{kind: local}",
        "local",
        6,
        "backend",
        "not a mapping",
        "{kind: local}",
    ),
    "an address without a scheme": (
        "kind: local",
        "kind: ray-job, address: 'head:8265'",
        6,
        "backend.address",
        "http[s]://HOST",
        "http://HOST:8265",
    ),
    "an address with a password": (
        "kind: local",
        "kind: ray-job, address: 'http://me:secret@head:8265'",
        6,
        "backend.address",
        "a user or a password",
        "http://HOST:8265",
    ),
    "a directory of an unknown user": (
        "kind: local",
        "kind: slurm, folder: ~no-such-user/jobs",
        6,
        "backend.folder",
        "no user of that name",
        "begins with /",
    ),
    "an address as a directory": (
        "kind: local",
        "kind: local, folder: s3://bucket/jobs",
        6,
        "backend.folder",
        "an address",
        "a directory",
    ),
    "a name that Kubernetes does not take": (
        "kind: local",
        "kind: kuberay, image: a, cluster: --all",
        6,
        "backend.cluster",
        "RFC 1123",
        "lowercase letters",
    ),
    "an image with a blank": (
        "kind: local",
        "kind: kuberay, image: a b, cluster: c",
        6,
        "backend.image",
        "not the name of an image",
        "registry.example.org",
    ),
    "more nodes than there are": (
        "kind: local",
        "kind: slurm, nodes: 99999999999",
        6,
        "backend.nodes",
        "at most 100000",
        "at most",
    ),
    "a partition of two lines": (
        "kind: local",
        'kind: slurm, partition: "gpu\\nrm x"',
        6,
        "backend.partition",
        "not one word",
        "without blanks",
    ),
    "a cron line of too many digits": (
        "0 2 * * *",
        f"0 {'2' * 5000} * * *",
        3,
        "schedule.cron",
        "too many digits",
        "numbers",
    ),
    "a space of too long a name": (
        "gpu.yaml",
        "g" * 5000,
        2,
        "space",
        "a name in it has more than 255 bytes",
        "write another path",
    ),
    "a space that cannot be read": (
        "search_spaces/gpu.yaml",
        "/proc/1/mem",
        2,
        "space",
        "/proc/1/mem: ",
        "readable YAML file",
    ),
    "a space without a name": ("search_spaces/gpu.yaml", '""', 2, "space", "empty", "write a word"),
    "a storage without a name": ("storage: runs", 'storage: ""', 7, "storage", "empty", "a word"),
    "a storage of an unknown user": (
        "storage: runs",
        "storage: ~no-such-user/runs",
        7,
        "storage",
        "no user of that name",
        "begins with /",
    ),
    "a number as a name": ("name: nightly", "name: 5", 1, "name", "not a piece of text", "quoted"),
    "a cluster with two addresses": (
        "kind: local",
        "kind: ray-job, address: http://a, address_env: A",
        6,
        "backend",
        "both",
        "address_env",
    ),
    "a space outside of what is sent": (
        "kind: local",
        "kind: ray-job, address: http://a, working_dir: sweeps",
        6,
        "backend.working_dir",
        "is not in it",
        "search_spaces/",
    ),
    "an object store without a ledger": (
        "storage: runs",
        "storage: s3://bucket/sweeps",
        7,
        "storage",
        "cannot hold a journal",
        "ledger: postgresql",
    ),
    "the Hub as an object store": (
        "storage: runs",
        "storage: hf://me",
        7,
        "storage",
        "sweeps are published and cannot run",
        "object store such as s3://",
    ),
    "a storage that is a file": (
        "storage: runs",
        "storage: sweeps/nightly.yaml",
        7,
        "storage",
        "is a file",
        "name another",
    ),
    "an address instead of a variable": (
        "GDPO_WEBHOOK",
        "https://hooks.example/x",
        8,
        "notify.webhook_env",
        "not the name of an environment variable",
        "the name alone",
    ),
    "an unknown occasion": ("[failed]", "[fail]", 8, "notify.on[0]", "unknown value", "'failed'"),
    "nothing to tell": ("[failed]", "[]", 8, "notify.on", "empty", "one value or more"),
    "a name with a slash": ("name: nightly", "name: a/b", 1, "name", "not a name", "write name:"),
    "a key without a value": ("storage: runs", "storage:", 7, "storage", "no value", "remove"),
    "a password in an address": (
        "storage: runs",
        "tracking: http://me:secret@mlflow:5000",
        7,
        "tracking",
        "list of processes",
        "MLFLOW_TRACKING_PASSWORD",
    ),
    "an address that is none": (
        "storage: runs",
        "tracking: mlflow",
        7,
        "tracking",
        "not the address of a tracking server",
        "http://HOST:PORT",
    ),
}


def problems_of(folder: Path, text: str):
    good = folder / "sweeps"
    load_scheduled_sweep(folder, GOOD)
    (good / "nightly.yaml").write_text(text)
    loaded = load_sweeps(good)
    assert loaded.error is not None
    assert loaded.sweeps == ()
    return loaded.error.problems


@pytest.mark.parametrize("case", CASES)
def test_bad_file(case, tmp_path):
    old, new, line, key, reason, fix = CASES[case]
    assert old in GOOD
    text = GOOD.replace(old, new)
    if "kind: kuberay" in new:
        text = text.replace("storage: runs", "storage: /mnt/runs")
    if "object store" in case:
        text = text.replace("{kind: local}", "{kind: local, folder: jobs}")
    (problem,) = problems_of(tmp_path, text)
    assert (problem.where, problem.key) == (f"{tmp_path / 'sweeps' / 'nightly.yaml'}:{line}", key)
    assert reason in problem.reason
    assert fix in problem.fix
    assert "secret" not in str(problem)


def test_a_good_file_in_full(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, GOOD)
    assert sweep.name == "nightly"
    assert sweep.storage == str(tmp_path / "runs")
    assert sweep.root == tmp_path
    assert sweep.spec.search.budget.trials == 20
    assert sweep.settings.policy.missed_grace == 90 * 60
    assert isinstance(sweep.settings.backend, LocalBackend)


def test_every_problem_at_once(tmp_path):
    text = GOOD.replace("0 2 * * *", "x").replace("Berlin", "Bonn").replace("20", "0")
    keys = [problem.key for problem in problems_of(tmp_path, text)]
    assert keys == ["schedule.cron", "schedule.timezone", "budget.trials"]


def test_a_space_that_does_not_validate_shows_its_own_lines(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, GOOD)
    space = tmp_path / "search_spaces" / "gpu.yaml"
    space.write_text(space.read_text().replace("task: code", "task: cod"))
    loaded = load_sweeps(sweep.file)
    assert loaded.error is not None
    (problem,) = loaded.error.problems
    assert re.fullmatch(rf"{space}:\d+", problem.where)
    assert problem.key == "task"
    assert "did you mean" in problem.fix


def test_a_budget_that_no_trial_can_spend_is_reported_at_its_own_line(tmp_path):
    for key in ("gpu_hours", "gpu_hours_per_30d"):
        text = GOOD.replace("gpu.yaml", "code.yaml").replace("gpu_hours: 80", f"{key}: 80")
        (problem,) = problems_of(tmp_path, text)
        assert problem.where.endswith("nightly.yaml:5")
        assert problem.key == f"budget.{key}"
        assert "no trial has a GPU" in problem.reason


def test_two_sweeps_of_one_name_are_both_refused(tmp_path):
    load_scheduled_sweep(tmp_path, GOOD)
    other = tmp_path / "sweeps" / "other.yaml"
    other.write_text("# another\n" + GOOD)
    third = tmp_path / "sweeps" / "third.yaml"
    third.write_text(GOOD.replace("name: nightly", "name: third"))
    loaded = load_sweeps(tmp_path / "sweeps")
    assert [sweep.name for sweep in loaded.sweeps] == ["third"]
    assert loaded.error is not None
    first, second = loaded.error.problems
    assert first.reason == f"also the name of {other}:2"
    assert second.reason == f"also the name of {tmp_path / 'sweeps' / 'nightly.yaml'}:1"
    with pytest.raises(SpecError, match="also the name of"):
        loaded.find("nightly")
    assert loaded.find("third").name == "third"


def test_a_stem_is_a_name_too(tmp_path):
    load_scheduled_sweep(tmp_path, GOOD)
    (tmp_path / "sweeps" / "b.yaml").write_text(GOOD.replace("name: nightly\n", ""))
    loaded = load_sweeps(tmp_path / "sweeps")
    assert loaded.error is None
    assert [sweep.name for sweep in loaded.sweeps] == ["b", "nightly"]
    with pytest.raises(UsageError, match="did you mean 'nightly'"):
        loaded.find("nightl")


def test_an_object_store_with_a_local_backend_needs_a_directory(tmp_path):
    text = GOOD.replace("storage: runs", "storage: s3://bucket/sweeps")
    keys = [problem.key for problem in problems_of(tmp_path, text)]
    assert keys == ["backend", "storage"]


def test_a_job_gets_the_object_store_and_the_database(tmp_path):
    text = GOOD.replace(
        "storage: runs", "storage: s3://bucket/sweeps\nledger: postgresql://me@db/s"
    )
    load_scheduled_sweep(
        tmp_path, text.replace("kind: local", "kind: ray-job, address: http://head:8265")
    )
    loaded = load_sweeps(tmp_path / "sweeps")
    assert loaded.error is None
    (sweep,) = loaded.sweeps
    assert sweep.storage == "s3://bucket/sweeps"
    assert sweep.spec.address == "s3://bucket/sweeps/nightly"
    assert 'storage="s3://bucket/sweeps"' in list_overrides(sweep.settings, sweep.root)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("me:secret@db/sweeps", "me:***@db/sweeps"),
        ("me:s/ecret@db/sweeps", "me:***@db/sweeps"),
        (
            "me@db/sweeps?password=secret&sslmode=require",
            "me@db/sweeps?password=***&sslmode=require",
        ),
    ],
)
def test_a_ledger_shows_no_password(tmp_path, written, shown):
    ledger = f"ledger: postgresql+psycopg2://{written}"
    problems = problems_of(tmp_path, GOOD.replace("storage: runs", ledger))
    (found,) = [p for p in problems if "password" in p.reason]
    assert found.value == f"postgresql+psycopg2://{shown}"
    assert "~/.pgpass" in found.fix
    assert not [problem for problem in problems if "ecret" in str(problem)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "the file is empty"), ("- a", "not a mapping"), ("a: [", "not YAML")],
)
def test_files_that_are_not_mappings(tmp_path, text, reason):
    (problem,) = problems_of(tmp_path, text)
    assert reason in problem.reason


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_pipe_or_directory_is_not_read_and_keeps_no_other_sweep_from_running(tmp_path, make):
    load_scheduled_sweep(tmp_path, GOOD)
    make(tmp_path / "sweeps" / "x.yaml")
    loaded = load_sweeps(tmp_path / "sweeps")
    assert [sweep.name for sweep in loaded.sweeps] == ["nightly"]
    assert loaded.error is not None
    assert "x.yaml: not a file\n    fix: move it out of the directory" in str(loaded.error)


def test_files_of_an_editor_are_not_sweeps(tmp_path):
    load_scheduled_sweep(tmp_path, GOOD)
    (tmp_path / "sweeps" / ".#nightly.yaml").symlink_to("somebody@machine.4711:1")
    (tmp_path / "sweeps" / ".nightly.yaml").write_text("spa")
    loaded = load_sweeps(tmp_path / "sweeps")
    assert (len(loaded.sweeps), loaded.error) == (1, None)


def test_a_broken_link_is_not_suggested_for_itself(tmp_path):
    load_scheduled_sweep(tmp_path, GOOD)
    (tmp_path / "sweeps" / "x.yaml").symlink_to("nowhere")
    message = str(load_sweeps(tmp_path / "sweeps").error)
    assert "x.yaml: there is no such file" in message
    assert "did you mean" not in message


def test_no_file_at_all(tmp_path):
    with pytest.raises(SpecError, match="there is no such file or directory"):
        load_sweeps(tmp_path / "sweeps")
    with pytest.raises(SpecError, match=r"no file \*\.yaml in it"):
        load_sweeps(tmp_path)


def test_shipped_sweeps_are_valid():
    loaded = load_sweeps(ROOT / "sweeps")
    assert loaded.error is None
    kinds = {sweep.name: type(sweep.settings.backend) for sweep in loaded.sweeps}
    assert kinds["nightly-code"] is LocalBackend
    assert kinds["weekly-math"] is RayJobBackend
