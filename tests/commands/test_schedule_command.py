"""The schedule command: its output and its exit status."""

import shutil
from datetime import UTC, datetime, timedelta

import pytest

from gdpo_tune import schedule
from gdpo_tune.clusters.backends.base import JobStatus, build_backend
from gdpo_tune.clusters.outcome import RunFigures, read_figures
from gdpo_tune.clusters.scheduler import SweepScheduler
from gdpo_tune.core.errors import BackendUnreachableError, SpecError, StoreError, UsageError
from tests.support.paths import ROOT
from tests.support.schedule import Clock, FakeBackend, Plan, load_scheduled_sweep

VALID = [
    "1 valid; how long a run takes:",
    "  nightly  unknown before a first sweep of this task and policy here",
]
NIGHTLY = 'space: search_spaces/code.yaml\nschedule: {cron: "0 2 * * *"}\n'


@pytest.fixture
def backend(monkeypatch):
    """A fake backend of every sweep, with its clock."""
    clock = Clock(datetime(2026, 1, 1, 1, tzinfo=UTC))
    fake = FakeBackend(clock, lambda _: Plan(1))
    changed = {build_backend: lambda _: fake, read_figures: lambda *_: RunFigures()}
    old = SweepScheduler.__init__.__defaults__
    defaults = tuple(changed.get(value, value) if callable(value) else value for value in old)
    monkeypatch.setattr(schedule, "read_clock", clock)
    monkeypatch.setattr(SweepScheduler.__init__, "__defaults__", defaults)
    return fake


@pytest.fixture
def run(tmp_path, capsys):
    """Run the command on `sweeps/`, check its exit status, and return what it prints."""

    def run(words, status=0):
        capsys.readouterr()
        assert schedule.main([str(tmp_path / "sweeps"), *words.split()]) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def space(tmp_path):
    """The search space of a scheduled sweep, which runs every night."""
    sweep = load_scheduled_sweep(tmp_path, NIGHTLY)
    return sweep.root / sweep.settings.space


def test_a_run_from_tick_to_tick(space, backend, run):
    assert run("tick").out == ""
    backend.clock.advance(hours=1)
    name = "nightly-20260101T020000Z"
    assert run("tick").out.splitlines() == [
        f"2026-01-01T02:00:00Z  {name} is started.",
        f"2026-01-01T02:00:00Z  {name} runs, attempt 1.",
    ]
    assert f"last run              {name}, attempt 1: running" in run("status").out
    assert "is asked to stop: stopped with `schedule stop`." in run("stop nightly").out
    backend.takes_to_stop = timedelta(seconds=30)
    again = f"{name} was asked to stop already, and has not ended yet\n"
    assert run("stop nightly").out == again
    backend.clock.advance(minutes=1)
    assert run("tick").out.endswith(f"{name} stopped: stopped with `schedule stop`.\n")
    assert f"{name} runs, attempt 2." in run("run nightly --at 2026-01-01T02:00:00Z").out


@pytest.fixture
def without_packages(monkeypatch):
    monkeypatch.setattr("gdpo_tune.spec.checks.importlib.util.find_spec", lambda _: None)


@pytest.mark.usefixtures("without_packages")
def test_what_another_machine_needs_is_noted_once(tmp_path, run):
    for name in ("search_spaces", "sweeps"):
        shutil.copytree(ROOT / name, tmp_path / name)
    errors = run("validate").err
    assert "error: " not in errors
    assert errors.count("math_qwen.yaml:10: model.lora_rank = 32: LoRA needs") == 1
    note = "note: slurm-math, weekly-math: needed on the machine that trains, and missing on this"
    assert note in errors
    rendered = run("render --to systemd").err
    assert errors.count("LoRA needs") == rendered.count("LoRA needs") == 2
    assert "note: " not in run("validate --files-only").err


@pytest.mark.usefixtures("without_packages")
def test_what_this_machine_needs_is_an_error_of_an_enabled_sweep(space, run):
    space.write_text(space.read_text() + "model: {lora_rank: 8}\n")
    assert run("validate", 2).err.count("LoRA needs the package peft") == 1
    run("validate --files-only")


def test_a_problem_of_a_space_is_printed_once(space, tmp_path, run):
    space.write_text(space.read_text().replace("length_limit: ", "length_limit: -"))
    (tmp_path / "sweeps" / "second.yaml").write_text(NIGHTLY)
    assert run("validate --files-only", 2).err.count("must be at least 1") == 1


def test_wrong_files_do_not_stop_other_sweeps(space, tmp_path, backend, run):
    (tmp_path / "sweeps" / "bad.yaml").write_text("space: nowhere.yaml\n")
    run("tick", 2)
    backend.clock.advance(hours=1)
    printed = run("tick", 2)
    assert "there is no file nowhere.yaml" in printed.err
    assert "is started" in printed.out
    assert "2026-01-02T02:00:00Z" in run("next", 2).out


def test_a_cluster_that_the_environment_names_is_shown(space, run, monkeypatch):
    """ray.init: RAY_ADDRESS, as a shell or a job of Ray leaves it, decides where trials run."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    shown = "nightly.yaml: RAY_ADDRESS = head:6379: trials run there"
    assert shown in run("validate --files-only").err


def test_a_state_that_is_unknown_is_shown(space, backend, run, monkeypatch):
    run("run nightly --now")
    reason = "its state is unknown; if it has ended, run: true"
    monkeypatch.setattr(backend, "poll", lambda job: JobStatus(True, reason=reason))
    assert sum(run("tick").out.count(reason) for _ in range(2)) == 1
    shown = run("status").out
    assert "attempt 1: unknown (running)\n" in shown
    assert reason in shown
    assert len(backend.submissions) == 1


def test_exit_statuses(space, backend, run):
    run("run nightly --now")
    backend.clock.advance(minutes=5)
    assert "skipped (overlap)" in run("run nightly --now --wait", 3).out
    backend.down = True
    assert "the fake backend is down" in run("tick", 6).err
    backend.down = False
    for _ in range(2):
        backend.clock.advance(hours=1.1)
        run("tick")
    backend.down = True
    with pytest.raises(BackendUnreachableError) as caught:
        run("run nightly --now")
    assert caught.value.exit_status == 6


def test_validate_checks_the_machine_too(tmp_path, run, monkeypatch):
    text = NIGHTLY + "backend: {kind: ray-job, address: http://127.0.0.1:9}\n"
    load_scheduled_sweep(tmp_path, text + "notify: {webhook_env: HOOK}\n")
    run("validate --files-only")
    printed = run("validate", 6).err
    assert "nightly.yaml: backend ray-job: http://127.0.0.1:9 does not answer" in printed
    assert "HOOK is not set, so no notification would be sent" in printed
    assert "lies in the job's own directory" in printed
    load_scheduled_sweep(tmp_path, text + "enabled: false\n")
    printed = run("validate")
    (line,) = printed.err.splitlines()  # no warning about the webhook
    assert "nightly.yaml: disabled; it could not run here: backend ray-job" in line
    assert "error:" not in line
    assert printed.out.splitlines() == VALID
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9")
    load_scheduled_sweep(tmp_path, NIGHTLY)
    assert run("validate").out.splitlines() == VALID
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs.d").touch()
    load_scheduled_sweep(tmp_path, NIGHTLY + "storage: runs.d/below\n")
    place = f"runs.d/below/.schedule/nightly: {tmp_path}/runs.d is a file"
    assert place in run("validate", 2).err


@pytest.mark.usefixtures("backend")
def test_storage_that_is_not_writable(tmp_path, run):
    (tmp_path / "file").touch()
    load_scheduled_sweep(tmp_path, NIGHTLY + "storage: file/runs\n")
    assert run("tick", 2).err.count("Not a directory") == 1
    with pytest.raises(StoreError):
        run("run nightly")


def test_a_sweep_whose_disk_fails_does_not_stop_others(space, tmp_path, backend, run, monkeypatch):
    load_scheduled_sweep(tmp_path, NIGHTLY, name="other")
    real = SweepScheduler.tick

    def broken(context):
        if context.sweep.name == "nightly":
            raise PermissionError(13, "Permission denied", "runs/beat")
        real(context)

    monkeypatch.setattr(SweepScheduler, "tick", broken)
    run("tick", 1)
    backend.clock.advance(hours=1)
    printed = run("tick", 1)
    assert "other-20260101T020000Z is started." in printed.out
    assert f"error: {tmp_path}/sweeps/nightly.yaml: [Errno 13] Permission denied" in printed.err


@pytest.mark.usefixtures("backend", "space")
def test_status_of_a_damaged_history_shows_the_others(tmp_path, run):
    load_scheduled_sweep(tmp_path, NIGHTLY, name="other")
    run("tick")
    (tmp_path / "runs/.schedule/nightly/schedule.json").write_text("{")
    printed = run("status", 2)
    assert "other\n  next" in printed.out
    assert "nightly/schedule.json is damaged" in printed.err


def test_status_reports_a_clock_that_was_ahead(space, backend, run):
    backend.clock.advance(days=30)
    run("tick")
    assert "held back" not in run("status").out
    backend.clock.advance(days=-28)
    run("tick")
    printed = run("status").out
    assert "no run by the schedule until 2026-01-31 01:00:00" in printed
    assert "next                  2026-01-31T02:00:00Z" in printed


@pytest.mark.parametrize("directory", ["nothing", "x" * 5000])
def test_a_directory_that_is_not_there(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="there is no such file or directory"):
        schedule.main([directory, "next"])


@pytest.mark.usefixtures("backend", "space")
def test_status_and_next_write_nothing(tmp_path, run):
    run("status")
    run("next")
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("space")
def test_an_unknown_name_is_refused_with_a_close_one(run):
    with pytest.raises(UsageError, match="fix: did you mean 'nightly'"):
        run("run nightli")
