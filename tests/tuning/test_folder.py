"""The sweep's folder: what trials fail of while it is away is not theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core import outages
from gdpo_tune.core.errors import FolderLostError
from gdpo_tune.core.trials import Cost, Measurement
from gdpo_tune.spec import load_spec
from gdpo_tune.tuning.ray import folder, trainable
from gdpo_tune.tuning.ray.folder import Folder, FolderAwayError
from gdpo_tune.tuning.ray.reporter import Reporter
from gdpo_tune.tuning.ray.setup import Setup

SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "code.yaml"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").touch()
    return tmp_path / "spec.yaml"


def config_of(mark: Path) -> dict[str, Any]:
    spec = load_spec(SPACE)
    trial = spec.trial_config(spec.space.baseline({}), 1, mark.parent / "trials" / "1")
    return {"trial": trial, "setup": Setup("x:y", mark.parent / "stop", 1.0, folder=Folder(mark))}


def test_an_empty_folder_in_its_place_is_not_the_folder(mark: Path):
    assert Folder(mark).is_there()
    mark.unlink()
    assert not Folder(mark).is_there()
    with pytest.raises(FolderAwayError, match="is away"):
        Folder(mark).check()


def test_it_is_waited_for(mark: Path, monkeypatch: pytest.MonkeyPatch):
    mark.unlink()
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            mark.touch()

    monkeypatch.setattr(outages.time, "sleep", sleep)
    assert Folder(mark).wait().startswith("the sweep's folder was away; waited")
    assert waits == [1, 1, 1]


def test_it_is_not_waited_for_for_ever(mark: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "PATIENCE", -1.0)
    mark.unlink()
    with pytest.raises(FolderLostError, match=r"is gone.*\n.*fix: mount it again"):
        Folder(mark).wait()


@pytest.mark.parametrize("ends", ["failure", "error"])
def test_what_comes_about_meanwhile_does_not_count(
    mark: Path, monkeypatch: pytest.MonkeyPatch, ends: str
):
    def serve(config: dict[str, Any]) -> dict[str, Any]:
        mark.unlink()
        if ends == "error":
            raise FileNotFoundError("checkpoint-1")
        return {"failure": "no task file"}

    monkeypatch.setattr(trainable, "serve", serve)
    monkeypatch.setattr(Folder, "wait", lambda _: "waited")
    with pytest.raises(FolderAwayError, match="waited"):
        trainable.run_trial(config_of(mark))


def test_a_folder_that_stays_away_ends_the_sweep(mark: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "PATIENCE", -1.0)
    monkeypatch.setattr(trainable, "serve", lambda config: mark.unlink() or {})
    assert isinstance(trainable.run_trial(config_of(mark))["fatal"], FolderLostError)


def test_otherwise_all_is_as_the_attempt_ends(mark: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(config: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("its own")

    monkeypatch.setattr(trainable, "serve", lambda config: {"failure": "its own"})
    assert trainable.run_trial(config_of(mark)) == {"failure": "its own"}
    monkeypatch.setattr(trainable, "serve", fail)
    with pytest.raises(RuntimeError, match="its own"):
        trainable.run_trial(config_of(mark))


def test_a_report_beside_the_folder_counts_for_nothing(mark: Path):
    config = config_of(mark)
    report = Reporter(config["trial"], config["setup"].stop, folder=Folder(mark))
    mark.unlink()
    with pytest.raises(FolderAwayError):
        report(Measurement(1, {}, Cost(64, 1.0)), None)
