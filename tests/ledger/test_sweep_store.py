"""A sweep on an object store, and its copy on the driver's machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.object_store import CACHE, StoreDirectory
from gdpo_tune.core.trials import Cost, TrialRecord
from gdpo_tune.ledger.sweep_store import SweepStore, fetch_spec
from gdpo_tune.results.picks import load_and_pick
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.training.checkpoints import write_checkpoint
from tests.support.tuning import load_code_spec

LEDGER = "ledger=postgresql+psycopg2://me:secret@db/sweeps"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreDirectory:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return StoreDirectory("memory://bucket/runs/sweep", patience=0.0)


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return load_code_spec(tmp_path, ["storage=memory://bucket/runs", LEDGER])


def put_trial(store: StoreDirectory, directory: Path, number: int, *steps: int) -> None:
    """Store the directory of a trial as its process leaves it."""
    for step in steps:
        write_checkpoint(
            directory / str(number),
            step,
            Cost(step),
            lambda aside: (aside / "weights").write_text(f"trial {number}"),
        )
    (directory / str(number)).mkdir(exist_ok=True, parents=True)
    (directory / str(number) / "steps.jsonl").write_text("{}\n" * len(steps))
    files = [path for path in (directory / str(number)).rglob("*") if path.is_file()]
    store.upload({f"trials/{path.relative_to(directory).as_posix()}": path for path in files})


def test_fetch_copies_small_files_and_markers(
    spec: SweepSpec, store: StoreDirectory, tmp_path: Path
):
    put_trial(store, tmp_path / "trials", 1, 4, 6)
    put_trial(store, tmp_path / "trials", 2)
    SweepStore(spec).fetch()
    copies = spec.directory / "trials"
    assert (copies / "1" / "steps.jsonl").read_text() == "{}\n{}\n"
    assert (copies / "2" / "steps.jsonl").exists()
    assert [path.name for path in (copies / "1" / "checkpoint-6").iterdir()] == ["complete.json"]

    (copies / "1" / "checkpoint-2").mkdir()  # stands for one that is no longer there
    store.delete(["trials/1/checkpoint-4/complete.json"])
    put_trial(store, tmp_path / "trials", 2, 1, 2)
    SweepStore(spec).fetch()
    assert sorted(path.name for path in (copies / "1").iterdir()) == ["checkpoint-6", "steps.jsonl"]
    assert (copies / "2" / "steps.jsonl").read_text() == "{}\n{}\n"


def test_checkpoints_that_are_not_kept_are_deleted(
    spec: SweepSpec, store: StoreDirectory, tmp_path: Path
):
    for number in (1, 2, 11):
        put_trial(store, tmp_path / "trials", number, 4, 6)
    SweepStore(spec).prune_checkpoints({1: ()})
    SweepStore(spec).prune_checkpoints({2: ["checkpoint-6"], 3: ()})
    stored = {name for name in store.list_sizes() if name.endswith("weights")}
    assert stored == {
        "trials/2/checkpoint-6/weights",
        "trials/11/checkpoint-4/weights",
        "trials/11/checkpoint-6/weights",
    }
    assert store.read("trials/1/steps.jsonl") is not None


def test_the_whole_earlier_sweep_is_moved_aside(
    spec: SweepSpec, store: StoreDirectory, tmp_path: Path
):
    put_trial(store, tmp_path / "trials", 1, 2)
    before = store.list_sizes()
    SweepStore(spec).archive("sweep.20261122")
    assert store.list_sizes() == {}
    assert StoreDirectory("memory://bucket/runs/sweep.20261122").list_sizes() == before


def test_the_stored_spec_has_no_password_and_loads(spec: SweepSpec, tmp_path: Path):
    assert not fetch_spec(spec.address, tmp_path / "copy")
    SweepStore(spec).write_spec()
    assert fetch_spec(spec.address, tmp_path / "copy")
    text = (tmp_path / "copy" / "spec.yaml").read_text()
    assert "secret" not in text
    again = load_spec(tmp_path / "copy" / "spec.yaml", name="sweep", to_run=False)
    assert (again.storage, again.address) == (spec.storage, "memory://bucket/runs/sweep")
    assert again.compute_identity() == spec.compute_identity()


def test_a_record_names_the_path_or_address_of_its_policy():
    record = TrialRecord(3, "search", "complete", {}, 0, "model")
    assert record.policy == ""
    local = replace(record, checkpoint=Path("/cache/trials/3/checkpoint-6"))
    assert local.policy == "/cache/trials/3/checkpoint-6"
    there = replace(local, address="s3://bucket/runs/sweep/trials/3")
    assert there.policy == "s3://bucket/runs/sweep/trials/3/checkpoint-6"


def test_new_files_go_beside_a_local_sweep_or_into_runs(spec: SweepSpec, tmp_path: Path):
    assert spec.output_directory == Path("runs")
    assert load_code_spec(tmp_path).output_directory == tmp_path
    assert spec.location == "memory://bucket/runs/sweep"
    assert load_code_spec(tmp_path).location == str(tmp_path / "sweep")


def test_the_name_of_a_copied_sweep_is_refused_with_its_address(
    spec: SweepSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    SweepStore(spec).write_spec()
    assert fetch_spec(spec.address, spec.directory)
    with pytest.raises(UsageError, match="--from sweep:knee: there is no sweep") as caught:
        load_and_pick("sweep:knee", None, "--from")
    assert str(caught.value).endswith("fix: give its address: memory://bucket/runs/sweep")
    with pytest.raises(UsageError, match=r"it has no spec.yaml$"):
        load_and_pick("trials:knee", None, "--from")
