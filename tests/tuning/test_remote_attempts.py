"""One attempt at a trial on an object store: what `train` sees, what others see and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from gdpo_tune.tuning.ray.lost import StoreAwayError
from gdpo_tune.tuning.ray.setup import Setup, Store

from gdpo_tune.core import outages
from gdpo_tune.core.checkpoint_names import whole_checkpoints
from gdpo_tune.core.errors import NonFiniteError, StoreUnreachableError
from gdpo_tune.core.object_store import CACHE, ObjectFolder
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trials import Cost, Measurement, Outcome, Report, TrialConfig
from gdpo_tune.training.checkpoints import read_checkpoint, write_checkpoint
from gdpo_tune.tuning.ray import reporter, stored, trainable
from gdpo_tune.tuning.ray.reporter import HALT, Reporter
from gdpo_tune.tuning.ray.trainable import run_trial

SWEEP = "memory://bucket/night"
at_step: dict[int, Callable[[], None]] = {}
"""What happens as `train` below has done a step."""


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """A checkpoint at every second step, until the last one."""
    known = read_checkpoint(resume).step if resume else 0
    checkpoint = resume
    for step in range(known + 1, config.training.steps + 1):
        config.directory.mkdir(parents=True, exist_ok=True)
        with (config.directory / "steps.jsonl").open("a") as file:
            file.write(f"{step}\n")
        written = None
        if step % 2 == 0:
            written = write_checkpoint(config.directory, step, Cost(step), fill).path
            checkpoint = written
        at_step.get(step, lambda: None)()
        try:
            report(Measurement(step, {}, Cost(step)), written)
        except SystemExit:
            if written is None:
                write_checkpoint(config.directory, step, Cost(step), fill)
            raise
    (config.directory / "completions.jsonl").write_text("{}\n")
    return Outcome({}, {}, Cost(known), checkpoint)


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 10)


class Glance:
    """The window, without Ray: this test shares a disk with itself."""

    def __init__(self, name: str) -> None:
        assert name == "window"

    def exist(self, *paths: Path) -> bool:
        return any(path.exists() for path in paths)


@pytest.fixture(autouse=True)
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What the driver is told."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(reporter.tune, "report", found.append)
    monkeypatch.setattr(trainable, "_trials_served", 0)
    monkeypatch.setattr(trainable, "memory_limit", lambda cpus: float("inf"))  # which asks Ray
    monkeypatch.setattr(stored, "Window", Glance)
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    yield found
    at_step.clear()


def run(driver: Path, steps: int = 6, begun: str = "this") -> dict[str, Any]:
    setup = Setup(f"{__name__}:train", driver / "stop", 1.0, store=Store(SWEEP, "window"))
    trial = TrialConfig("code", "embedded", 0, {}, TrainingSettings(steps=steps), driver / "3")
    return run_trial({"trial": trial, "setup": setup, "ends_at": (), "begun": begun})


def files() -> ObjectFolder:
    return ObjectFolder(f"{SWEEP}/trials/3")


def newest() -> str:
    return next(whole_checkpoints(files().sizes(), files().read))


def test_a_trial_ends_with_everything_in_the_store_and_nothing_here(tmp_path: Path):
    outcome = run(tmp_path)["outcome"]
    assert outcome.checkpoint == tmp_path / "3" / "checkpoint-6"  # as the driver sees it
    assert newest() == "checkpoint-6"
    assert files().read("steps.jsonl") == b"1\n2\n3\n4\n5\n6\n"
    assert files().read("completions.jsonl") == b"{}\n"
    assert not (tmp_path / "3").exists()
    assert list((tmp_path / "cache" / "attempts").iterdir()) == []


def test_nobody_hears_of_a_checkpoint_that_is_not_in_the_store(
    tmp_path: Path, heard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    def hear(told: dict[str, Any]) -> None:
        step = told["measurement"].step
        if step % 2 == 0:
            assert newest() == f"checkpoint-{step}"
        heard.append(told)

    monkeypatch.setattr(reporter.tune, "report", hear)
    run(tmp_path)
    assert len(heard) == 6


def test_another_attempt_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, heard: list[dict[str, Any]]
):
    def die() -> None:
        raise RuntimeError("broken")

    at_step[5] = die
    with pytest.raises(RuntimeError, match="broken"):
        run(tmp_path)
    assert files().read("steps.jsonl") == b"1\n2\n3\n4\n5\n"  # they tell why
    at_step.clear()
    heard.clear()
    run(tmp_path)
    assert [told["measurement"].step for told in heard] == [5, 6]


def test_a_trial_that_is_asked_to_end_leaves_its_last_step_in_the_store(tmp_path: Path):
    at_step[3] = (tmp_path / "stop").touch
    assert run(tmp_path) == {"interrupted": True}
    assert newest() == "checkpoint-3"
    (tmp_path / "stop").unlink()
    (tmp_path / "3").mkdir()
    at_step[5] = (tmp_path / "3" / HALT).touch
    assert run(tmp_path) == {"interrupted": True}
    assert newest() == "checkpoint-5"


def test_a_failure_of_its_own_is_told_as_ever(tmp_path: Path):
    def fail() -> None:
        raise NonFiniteError("loss is nan at step 3")

    at_step[3] = fail
    assert run(tmp_path) == {"failure": "loss is nan at step 3"}
    assert files().read("steps.jsonl") == b"1\n2\n3\n"


def test_a_short_outage_costs_no_attempt_and_is_told(
    tmp_path: Path, heard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    pauses: list[float] = []
    monkeypatch.setattr(outages.time, "sleep", pauses.append)
    put = MemoryFileSystem.put
    left = [OSError("no route")] * 3

    def flaky(*args: Any, **kwargs: Any) -> Any:
        if at_step.get(0) and left:
            raise left.pop()
        return put(*args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put", flaky)
    at_step[2] = lambda: at_step.update({0: lambda: None})
    assert "outcome" in run(tmp_path)
    assert pauses == [1, 2, 4]
    notes = [told["note"] for told in heard if "note" in told]
    assert [note.partition(":")[0] for note in notes] == ["waits for memory", "goes on"]


def test_a_store_that_stays_away_ends_the_attempt_and_not_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def away(*_: Any) -> None:
        raise StoreUnreachableError(SWEEP, "no route", 600)

    at_step[4] = lambda: monkeypatch.setattr(ObjectFolder, "upload", away)
    with pytest.raises(StoreAwayError) as caught:
        run(tmp_path)
    assert "has not answered for 600 s (no route)" in str(caught.value.error)
    assert newest() == "checkpoint-2"
    assert list((tmp_path / "cache" / "attempts").iterdir()) == []


def test_a_node_without_the_package_ends_the_sweep_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import fsspec

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", refuse)
    assert "Install s3fs" in str(run(tmp_path)["fatal"])


def test_what_is_not_due_is_not_asked_for(tmp_path: Path):
    reporter = Reporter(
        TrialConfig("code", "embedded", 0, {}, TrainingSettings(), tmp_path), tmp_path / "stop"
    )
    assert not reporter.asked()
    (tmp_path / "stop").touch()
    assert reporter.asked()
