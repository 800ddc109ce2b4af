"""Every mistake in a file of `sweeps/`: file, line, key, reason, fix; all at once."""

from __future__ import annotations

import os
import re

import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune import schedule
from gdpo_tune.clusters import console
from gdpo_tune.clusters.backends import base
from gdpo_tune.clusters.load_schedules import list_overrides, load_sweeps
from gdpo_tune.clusters.schedule_spec import LocalBackend, RayJobBackend
from gdpo_tune.core.errors import SpecError, UsageError
from tests.support.paths import ROOT
from tests.support.render import KUBERAY, SLURM
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
CASES = yaml.safe_load((ROOT / "tests" / "data" / "bad_schedules.yaml").read_text())
CASES |= {
    "a cron line of too many digits": [
        *("good", "0 2 * * *", f"0 {'2' * 5000} * * *", 3),
        *("schedule.cron", "too many digits", "numbers"),
    ],
    "a space of too long a name": [
        *("good", "gpu.yaml", "g" * 5000, 2),
        *("space", "a name in it has more than 255 bytes", "write another path"),
    ],
}
BASES = {"good": GOOD, "kuberay": KUBERAY, "slurm": SLURM}


@pytest.fixture
def sweeps(tmp_path):
    """Return a directory with one good sweep."""
    return load_scheduled_sweep(tmp_path, GOOD).file.parent


def find_problems(sweeps, text):
    (sweeps / "nightly.yaml").write_text(text)
    loaded = load_sweeps(sweeps)
    assert loaded.error is not None
    assert loaded.sweeps == ()
    return loaded.error.problems


@pytest.mark.parametrize("case", CASES)
def test_bad_file(case, sweeps):
    base, old, new, line, key, reason, fix = CASES[case]
    assert old in BASES[base]
    text = BASES[base].replace(old, new, 1)
    if base == "good" and "kind: kuberay" in new:
        text = text.replace("storage: runs", "storage: /mnt/runs")
    (problem,) = find_problems(sweeps, text)
    assert (problem.where, problem.key) == (f"{sweeps / 'nightly.yaml'}:{line}", key)
    assert reason in problem.reason
    assert fix in problem.fix
    assert "me:secret" not in str(problem)


def test_a_good_file_in_full(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, GOOD)
    assert (sweep.name, sweep.storage, sweep.root) == ("nightly", f"{tmp_path}/runs", tmp_path)
    assert sweep.spec.search.budget.trials == 20
    assert sweep.settings.policy.missed_grace == 90 * 60
    assert isinstance(sweep.settings.backend, LocalBackend)


def test_a_space_that_pods_do_not_see(tmp_path, sweeps):
    space = f"{tmp_path}/search_spaces/gpu.yaml"
    (problem,) = find_problems(sweeps, KUBERAY.replace("search_spaces/gpu.yaml", space))
    assert problem.key == "space"
    assert problem.reason == "a file of this machine, which pods do not see"


def test_every_problem_at_once(sweeps):
    text = GOOD.replace("0 2 * * *", "x").replace("Berlin", "Bonn").replace("20", "0")
    keys = [problem.key for problem in find_problems(sweeps, text)]
    assert keys == ["schedule.cron", "schedule.timezone", "budget.trials"]


def test_a_space_that_does_not_validate_shows_its_own_lines(tmp_path, sweeps):
    space = tmp_path / "search_spaces" / "gpu.yaml"
    space.write_text(space.read_text().replace("task: code", "task: cod"))
    (problem,) = load_sweeps(sweeps / "nightly.yaml").error.problems
    assert re.fullmatch(rf"{space}:\d+", problem.where)
    assert problem.key == "task"
    assert "did you mean" in problem.fix


@pytest.mark.parametrize("key", ["gpu_hours", "gpu_hours_per_30d"])
def test_a_budget_that_no_trial_can_spend_is_reported_at_its_own_line(sweeps, key):
    text = GOOD.replace("gpu.yaml", "code.yaml").replace("gpu_hours: 80", f"{key}: 80")
    (problem,) = find_problems(sweeps, text)
    assert problem.where.endswith("nightly.yaml:5")
    assert problem.key == f"budget.{key}"
    assert "no trial has a GPU" in problem.reason


def test_two_sweeps_of_one_name_are_both_refused(sweeps):
    (sweeps / "other.yaml").write_text("# another\n" + GOOD)
    (sweeps / "third.yaml").write_text(GOOD.replace("name: nightly", "name: third"))
    loaded = load_sweeps(sweeps)
    assert [sweep.name for sweep in loaded.sweeps] == ["third"]
    assert [problem.reason for problem in loaded.error.problems] == [
        f"also the name of {sweeps / 'other.yaml'}:2",
        f"also the name of {sweeps / 'nightly.yaml'}:1",
    ]
    with pytest.raises(SpecError, match="also the name of"):
        loaded.find("nightly")
    assert loaded.find("third").name == "third"


def test_a_stem_is_a_name_too(sweeps):
    (sweeps / "b.yaml").write_text(GOOD.replace("name: nightly\n", ""))
    loaded = load_sweeps(sweeps)
    assert loaded.error is None
    assert [sweep.name for sweep in loaded.sweeps] == ["b", "nightly"]
    with pytest.raises(UsageError, match="did you mean 'nightly'"):
        loaded.find("nightl")


def test_a_job_gets_the_object_store(tmp_path):
    text = GOOD.replace("storage: runs", "storage: s3://bucket/sweeps")
    text = text.replace("kind: local", "kind: ray-job, address: http://head:8265")
    sweep = load_scheduled_sweep(tmp_path, text)
    assert sweep.storage == "s3://bucket/sweeps"
    assert sweep.spec.address == "s3://bucket/sweeps/nightly"
    assert 'storage="s3://bucket/sweeps"' in list_overrides(sweep.settings, sweep.root)
    assert sweep.state_directory == tmp_path / ".schedule" / "nightly"


def test_an_object_store_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    text = GOOD.replace("storage: runs", "storage: memory://bucket")
    sweep = load_scheduled_sweep(tmp_path, text)
    monkeypatch.setattr(console, "find_machine_problems", lambda _: [])
    assert console.find_errors(sweep) == []

    def fail(*_: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    (error,) = console.find_errors(sweep)
    assert "storage memory://bucket: no credentials\n    fix: make it readable" in str(error)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("me:secret@db/sweeps", "me:***@db/sweeps"),
        ("me:s/ecret@db/sweeps", "me:***@db/sweeps"),
        ("me@db/sweeps?password=secret&sslmode=x", "me@db/sweeps?password=***&sslmode=x"),
    ],
)
def test_a_database_of_mlflow_shows_no_password(sweeps, written, shown):
    tracking = f"tracking: postgresql+psycopg2://{written}"
    problems = find_problems(sweeps, GOOD.replace("storage: runs", tracking))
    (found,) = [p for p in problems if "password" in p.reason]
    assert found.value == f"postgresql+psycopg2://{shown}"
    assert "MLFLOW_TRACKING_PASSWORD" in found.fix
    assert not [problem for problem in problems if "ecret" in str(problem)]


@pytest.mark.parametrize(
    ("text", "reason"), [("", "the file is empty"), ("- a", "not a mapping"), ("a: [", "not YAML")]
)
def test_files_that_are_not_mappings(sweeps, text, reason):
    (problem,) = find_problems(sweeps, text)
    assert reason in problem.reason


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_pipe_or_directory_is_not_read_and_keeps_no_other_sweep_from_running(sweeps, make):
    make(sweeps / "x.yaml")
    loaded = load_sweeps(sweeps)
    assert [sweep.name for sweep in loaded.sweeps] == ["nightly"]
    assert loaded.error is not None
    assert "x.yaml: not a file\n    fix: move it out of the directory" in str(loaded.error)


def test_files_of_an_editor_are_not_sweeps(sweeps):
    (sweeps / ".#nightly.yaml").symlink_to("somebody@machine.4711:1")
    (sweeps / ".nightly.yaml").write_text("spa")
    loaded = load_sweeps(sweeps)
    assert (len(loaded.sweeps), loaded.error) == (1, None)


def test_a_broken_link_is_not_suggested_for_itself(sweeps):
    (sweeps / "x.yaml").symlink_to("nowhere")
    message = str(load_sweeps(sweeps).error)
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


def test_the_longest_name_fits(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY.replace("space:", f"name: {'n' * 25}\nspace:"))
    assert len(f"{sweep.name}-20260329t010000z-a100") == 47


def test_a_tracking_file_in_a_pod_is_warned_of(tmp_path):
    (doubt,) = console.find_warnings(load_scheduled_sweep(tmp_path, KUBERAY))
    assert "lies in the job's own directory" in doubt
    for text in (SLURM, KUBERAY + "tracking: http://mlflow:5000\n"):
        assert not console.find_warnings(load_scheduled_sweep(tmp_path, text))


@pytest.mark.parametrize("backend", ["{kind: local}", "{kind: slurm, folder: jobs/deep}"])
@pytest.mark.parametrize("enabled", [True, False])
def test_validation_writes_nothing(tmp_path, monkeypatch, backend, enabled):
    monkeypatch.setattr(base, "call_program", lambda *_: base.ProgramResult(0, "", ""))
    file = f"enabled: {str(enabled).lower()}\nspace: search_spaces/gpu.yaml\n"
    load_scheduled_sweep(tmp_path, f"{file}backend: {backend}\nstorage: runs/deep\n")
    before = sorted(tmp_path.rglob("*"))
    schedule.main([str(tmp_path / "sweeps"), "validate"])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_storage_that_cannot_be_made_is_said_by_validate(tmp_path, capsys):
    load_scheduled_sweep(tmp_path, "space: search_spaces/gpu.yaml\nstorage: taken/runs\n")
    (tmp_path / "taken").touch()
    assert schedule.main([str(tmp_path / "sweeps"), "validate"]) != 0
    assert f"{tmp_path}/taken is a file" in capsys.readouterr().err
