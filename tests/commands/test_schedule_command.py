"""The schedule command: its output and its exit status."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

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
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """A fake backend of every sweep, with its clock."""
    clock = Clock(datetime(2026, 1, 1, 1, tzinfo=UTC))
    fake = FakeBackend(clock, lambda _: Plan(1))
    monkeypatch.setattr(schedule, "read_clock", clock)
    monkeypatch.setattr(SweepScheduler.__init__, "__defaults__", replace_defaults(fake))
    return fake


def replace_defaults(fake: FakeBackend) -> tuple[object, ...]:
    old = SweepScheduler.__init__.__defaults__
    assert old is not None
    changed = {build_backend: lambda _: fake, read_figures: lambda *_: RunFigures()}
    return tuple(changed.get(value, value) if callable(value) else value for value in old)


def run_schedule(directory: Path, *words: str) -> int:
    return schedule.main([str(directory / "sweeps"), *words])


def test_a_run_from_tick_to_tick(tmp_path, backend, capsys):
    load_scheduled_sweep(tmp_path, NIGHTLY)
    assert run_schedule(tmp_path, "tick") == 0
    assert capsys.readouterr().out == ""
    backend.clock.advance(hours=1)
    assert run_schedule(tmp_path, "tick") == 0
    name = "nightly-20260101T020000Z"
    assert capsys.readouterr().out.splitlines() == [
        f"2026-01-01T02:00:00Z  {name} is started.",
        f"2026-01-01T02:00:00Z  {name} runs, attempt 1.",
    ]
    assert run_schedule(tmp_path, "status") == 0
    assert f"last run              {name}, attempt 1: running" in capsys.readouterr().out
    assert run_schedule(tmp_path, "stop", "nightly") == 0
    assert "is asked to stop: stopped with `schedule stop`." in capsys.readouterr().out
    backend.takes_to_stop = timedelta(seconds=30)
    assert run_schedule(tmp_path, "stop", "nightly") == 0
    assert capsys.readouterr().out == f"{name} was asked to stop already, and has not ended yet\n"
    backend.clock.advance(minutes=1)
    assert run_schedule(tmp_path, "tick") == 0
    assert capsys.readouterr().out.endswith(f"{name} stopped: stopped with `schedule stop`.\n")
    assert run_schedule(tmp_path, "run", "nightly", "--at", "2026-01-01T02:00:00Z") == 0
    assert f"{name} runs, attempt 2." in capsys.readouterr().out


def test_what_another_machine_needs_is_noted_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gdpo_tune.spec.checks.importlib.util.find_spec", lambda _: None)
    for name in ("search_spaces", "sweeps"):
        shutil.copytree(ROOT / name, tmp_path / name)
    assert run_schedule(tmp_path, "validate") == 0
    printed = capsys.readouterr()
    assert "error: " not in printed.err
    assert printed.err.count("math_qwen.yaml:10: model.lora_rank = 32: LoRA needs") == 1
    note = "note: slurm-math, weekly-math: needed on the machine that trains, and missing on this"
    assert note in printed.err
    assert run_schedule(tmp_path, "render", "--to", "systemd") == 0
    assert printed.err.count("LoRA needs") == capsys.readouterr().err.count("LoRA needs") == 2
    assert run_schedule(tmp_path, "validate", "--files-only") == 0
    assert "note: " not in capsys.readouterr().err


def test_what_this_machine_needs_is_an_error_of_an_enabled_sweep(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gdpo_tune.spec.checks.importlib.util.find_spec", lambda _: None)
    sweep = load_scheduled_sweep(tmp_path, NIGHTLY)
    space = sweep.root / sweep.settings.space
    space.write_text(space.read_text() + "model: {lora_rank: 8}\n")
    assert run_schedule(tmp_path, "validate") == 2
    assert capsys.readouterr().err.count("LoRA needs the package peft") == 1
    assert run_schedule(tmp_path, "validate", "--files-only") == 0


def test_a_problem_of_a_space_is_printed_once(tmp_path, capsys):
    sweep = load_scheduled_sweep(tmp_path, NIGHTLY)
    space = sweep.root / sweep.settings.space
    space.write_text(space.read_text().replace("length_limit: ", "length_limit: -"))
    (tmp_path / "sweeps" / "second.yaml").write_text(NIGHTLY)
    assert run_schedule(tmp_path, "validate", "--files-only") == 2
    assert capsys.readouterr().err.count("must be at least 1") == 1


def test_wrong_files_do_not_stop_other_sweeps(tmp_path, backend, capsys):
    load_scheduled_sweep(tmp_path, NIGHTLY)
    (tmp_path / "sweeps" / "bad.yaml").write_text("space: nowhere.yaml\n")
    assert run_schedule(tmp_path, "tick") == 2
    backend.clock.advance(hours=1)
    assert run_schedule(tmp_path, "tick") == 2
    printed = capsys.readouterr()
    assert "there is no file nowhere.yaml" in printed.err
    assert "is started" in printed.out
    assert run_schedule(tmp_path, "next") == 2
    assert "2026-01-02T02:00:00Z" in capsys.readouterr().out


def test_a_cluster_that_the_environment_names_is_shown(tmp_path, capsys, monkeypatch):
    """ray.init: RAY_ADDRESS, as a shell or a job of Ray leaves it, decides where trials run."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    load_scheduled_sweep(tmp_path, NIGHTLY)
    assert run_schedule(tmp_path, "validate", "--files-only") == 0
    assert "nightly.yaml: RAY_ADDRESS = head:6379: trials run there" in capsys.readouterr().err


def test_a_state_that_is_unknown_is_shown(tmp_path, backend, capsys, monkeypatch):
    load_scheduled_sweep(tmp_path, NIGHTLY)
    assert run_schedule(tmp_path, "run", "nightly", "--now") == 0
    reason = "its state is unknown; if it has ended, run: true"
    monkeypatch.setattr(backend, "poll", lambda job: JobStatus(True, reason=reason))
    for _ in range(2):
        assert run_schedule(tmp_path, "tick") == 0
    assert capsys.readouterr().out.count(reason) == 1
    assert run_schedule(tmp_path, "status") == 0
    shown = capsys.readouterr().out
    assert "attempt 1: unknown (running)\n" in shown
    assert reason in shown
    assert len(backend.submissions) == 1


def test_exit_statuses(tmp_path, backend, capsys):
    load_scheduled_sweep(tmp_path, NIGHTLY)
    assert run_schedule(tmp_path, "run", "nightly", "--now") == 0
    backend.clock.advance(minutes=5)
    assert run_schedule(tmp_path, "run", "nightly", "--now", "--wait") == 3
    assert "skipped (overlap)" in capsys.readouterr().out
    backend.down = True
    assert run_schedule(tmp_path, "tick") == 6
    assert "the fake backend is down" in capsys.readouterr().err
    backend.down = False
    for _ in range(2):
        backend.clock.advance(hours=1.1)
        assert run_schedule(tmp_path, "tick") == 0
    backend.down = True
    with pytest.raises(BackendUnreachableError) as caught:
        run_schedule(tmp_path, "run", "nightly", "--now")
    assert caught.value.exit_status == 6
    with pytest.raises(SpecError, match="there is no such file"):
        schedule.main([str(tmp_path / "nothing"), "status"])


def test_validate_checks_the_machine_too(tmp_path, capsys, monkeypatch):
    text = NIGHTLY + "backend: {kind: ray-job, address: http://127.0.0.1:9}\n"
    load_scheduled_sweep(tmp_path, text + "notify: {webhook_env: HOOK}\n")
    assert run_schedule(tmp_path, "validate", "--files-only") == 0
    assert run_schedule(tmp_path, "validate") == 6
    printed = capsys.readouterr().err
    assert "nightly.yaml: backend ray-job: http://127.0.0.1:9 does not answer" in printed
    assert "HOOK is not set, so no notification would be sent" in printed
    assert "lies in the job's own directory" in printed
    load_scheduled_sweep(tmp_path, text + "enabled: false\n")
    assert run_schedule(tmp_path, "validate") == 0
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()  # no warning about the webhook
    assert "nightly.yaml: disabled; it could not run here: backend ray-job" in line
    assert "error:" not in line
    assert printed.out.splitlines() == VALID
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9")
    load_scheduled_sweep(tmp_path, NIGHTLY)
    assert run_schedule(tmp_path, "validate") == 0
    assert capsys.readouterr().out.splitlines() == VALID
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs.d").touch()
    load_scheduled_sweep(tmp_path, NIGHTLY + "storage: runs.d/below\n")
    assert run_schedule(tmp_path, "validate") == 2
    assert f"runs.d/below/.schedule/nightly: {tmp_path}/runs.d is a file" in capsys.readouterr().err


def test_storage_that_is_not_writable(tmp_path, backend, capsys):
    (tmp_path / "file").touch()
    load_scheduled_sweep(tmp_path, NIGHTLY + "storage: file/runs\n")
    assert run_schedule(tmp_path, "tick") == 2
    assert capsys.readouterr().err.count("Not a directory") == 1
    with pytest.raises(StoreError):
        run_schedule(tmp_path, "run", "nightly")


def test_a_sweep_whose_disk_fails_does_not_stop_others(tmp_path, backend, capsys, monkeypatch):
    load_scheduled_sweep(tmp_path, NIGHTLY)
    load_scheduled_sweep(tmp_path, NIGHTLY, name="other")
    real = SweepScheduler.tick

    def broken(context: SweepScheduler) -> None:
        if context.sweep.name == "nightly":
            raise PermissionError(13, "Permission denied", "runs/beat")
        real(context)

    monkeypatch.setattr(SweepScheduler, "tick", broken)
    assert run_schedule(tmp_path, "tick") == 1
    backend.clock.advance(hours=1)
    assert run_schedule(tmp_path, "tick") == 1
    printed = capsys.readouterr()
    assert "other-20260101T020000Z is started." in printed.out
    assert f"error: {tmp_path}/sweeps/nightly.yaml: [Errno 13] Permission denied" in printed.err


def test_status_of_a_damaged_history_shows_the_others(tmp_path, backend, capsys):
    load_scheduled_sweep(tmp_path, NIGHTLY)
    load_scheduled_sweep(tmp_path, NIGHTLY, name="other")
    assert run_schedule(tmp_path, "tick") == 0
    (tmp_path / "runs/.schedule/nightly/schedule.json").write_text("{")
    assert run_schedule(tmp_path, "status") == 2
    printed = capsys.readouterr()
    assert "other\n  next" in printed.out
    assert "nightly/schedule.json is damaged" in printed.err


def test_status_reports_a_clock_that_was_ahead(tmp_path, backend, capsys):
    load_scheduled_sweep(tmp_path, NIGHTLY)
    backend.clock.advance(days=30)
    assert run_schedule(tmp_path, "tick") == 0
    assert run_schedule(tmp_path, "status") == 0
    assert "held back" not in capsys.readouterr().out
    backend.clock.advance(days=-28)
    assert run_schedule(tmp_path, "tick") == 0
    assert run_schedule(tmp_path, "status") == 0
    printed = capsys.readouterr().out
    assert "no run by the schedule until 2026-01-31 01:00:00" in printed
    assert "next                  2026-01-31T02:00:00Z" in printed


def test_a_directory_with_a_name_that_is_too_long(capsys):
    with pytest.raises(SpecError, match="there is no such file or directory"):
        schedule.main(["x" * 5000, "next"])


def test_status_and_next_write_nothing(tmp_path, backend):
    load_scheduled_sweep(tmp_path, NIGHTLY)
    assert run_schedule(tmp_path, "status") == 0
    assert run_schedule(tmp_path, "next") == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "nightly", "--at", "2026-01-01T02:00:00"), "has no zone: write"),
        (("run", "nightly", "--at", "tonight"), "is not a time"),
        (("run", "nightly", "--at", "9999-12-31T23:00:00-12:00"), "is not a time"),
        (("run", "nightly", "--at", "0001-01-01T00:00:00Z"), "is not a time"),
        (("run", "nightly", "--at", "2026-01-01T02:00Z", "--now"), "not allowed with"),
        (("serve", "--every", "0"), "write 0.1 to 86400 seconds"),
        (("next", "--count", "0"), "must be between 1 and 1000"),
        (("tik",), "unknown value 'tik': did you mean 'tick'?"),
        ((), "required: COMMAND"),
    ],
)
def test_wrong_arguments(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        run_schedule(tmp_path, *words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_name_is_refused_with_a_close_one(tmp_path):
    load_scheduled_sweep(tmp_path, NIGHTLY)
    with pytest.raises(UsageError, match="fix: did you mean 'nightly'"):
        run_schedule(tmp_path, "run", "nightli")
