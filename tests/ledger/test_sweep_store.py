"""A sweep on an object store, and its copy on the driver's machine."""

import shutil
import socket
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.errors import IdentityError, LedgerHeldError, StoreUnreachableError, UsageError
from gdpo_tune.core.object_store import CACHE, JOURNAL, SPEC, StoreDirectory
from gdpo_tune.core.trials import Cost, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.sweep_store import SweepStore, fetch_spec
from gdpo_tune.results.picks import load_and_pick
from gdpo_tune.spec import load_spec
from gdpo_tune.training.checkpoints import write_checkpoint
from tests.support.clock import count_pauses_as_time
from tests.support.tuning import load_code_spec

TRACKING = "tracking.uri=postgresql+psycopg2://me:secret@db/mlflow"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return StoreDirectory("memory://bucket/runs/sweep", patience=0.0)


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path, ["storage=memory://bucket/runs", TRACKING])


def put_trial(store, directory, number, *steps):
    """Store the directory of a trial as its process leaves it."""
    own = directory / str(number)
    own.mkdir(exist_ok=True, parents=True)
    for step in steps:
        write_checkpoint(own, step, Cost(step), lambda aside: (aside / "weights").write_text("w"))
    (own / "steps.jsonl").write_text("{}\n" * len(steps))
    files = [path for path in own.rglob("*") if path.is_file()]
    store.upload({f"trials/{path.relative_to(directory).as_posix()}": path for path in files})


def test_fetch_copies_small_files_and_markers(spec, store, tmp_path):
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


def test_checkpoints_that_are_not_kept_are_deleted(spec, store, tmp_path):
    for number in (1, 2, 11):
        put_trial(store, tmp_path / "trials", number, 4, 6)
    SweepStore(spec).prune_checkpoints({1: ()})
    SweepStore(spec).prune_checkpoints({2: ["checkpoint-6"], 3: ()})
    kept = ["2/checkpoint-6", "11/checkpoint-4", "11/checkpoint-6"]
    stored = {name for name in store.list_sizes() if name.endswith("weights")}
    assert stored == {f"trials/{name}/weights" for name in kept}
    assert store.read("trials/1/steps.jsonl") is not None
    here = SweepStore(spec).fetch_checkpoint(2, "checkpoint-6", tmp_path / "here")
    assert here == tmp_path / "here" / "checkpoint-6"
    assert (here / "weights").read_text() == "w"
    with patch.object(StoreDirectory, "download") as download:
        SweepStore(spec).fetch_checkpoint(2, "checkpoint-6", tmp_path / "here")
    download.assert_called_once_with({})


def test_the_whole_earlier_sweep_is_moved_aside(spec, store, tmp_path):
    put_trial(store, tmp_path / "trials", 1, 2)
    before = store.list_sizes()
    SweepStore(spec).archive("sweep.20261122")
    assert store.list_sizes() == {}
    assert StoreDirectory("memory://bucket/runs/sweep.20261122").list_sizes() == before


def test_the_stored_spec_has_no_password_and_loads(spec, tmp_path):
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
    local = replace(record, checkpoint=Path("/cache/trials/3/checkpoint-6"))
    there = replace(local, address="s3://bucket/runs/sweep/trials/3")
    assert record.policy == ""
    assert local.policy == "/cache/trials/3/checkpoint-6"
    assert there.policy == "s3://bucket/runs/sweep/trials/3/checkpoint-6"


def test_new_files_go_beside_a_local_sweep_or_into_runs(spec, tmp_path):
    assert spec.output_directory == Path("runs")
    assert load_code_spec(tmp_path).output_directory == tmp_path
    assert spec.location == "memory://bucket/runs/sweep"
    assert load_code_spec(tmp_path).location == str(tmp_path / "sweep")


def test_the_name_of_a_copied_sweep_is_refused_with_its_address(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SweepStore(spec).write_spec()
    assert fetch_spec(spec.address, spec.directory)
    with pytest.raises(UsageError, match="--from sweep:knee: there is no sweep") as caught:
        load_and_pick("sweep:knee", None, "--from")
    assert str(caught.value).endswith("fix: give its address: memory://bucket/runs/sweep")
    with pytest.raises(UsageError, match=r"it has no spec.yaml\n    fix: name the directory"):
        load_and_pick("trials:knee", None, "--from")


def start_trial(ledger):
    ledger.start(ledger.spec.space.complete_baseline({}), "search", "model", 7)


def move_to(machine, tmp_path, monkeypatch):
    """Let what follows happen on another machine, with a cache of its own."""
    monkeypatch.setenv(CACHE, str(tmp_path / machine))
    monkeypatch.setattr(socket, "gethostname", lambda: machine)


def test_every_record_of_the_ledger_is_in_the_store(spec, store):
    with Ledger.open(spec) as ledger:
        for write in (start_trial, start_trial, lambda ledger: ledger.fail(0, "it broke")):
            write(ledger)
            assert store.read(JOURNAL) == (spec.directory / JOURNAL).read_bytes()
        with pytest.raises(LedgerHeldError, match="is being written by process"):
            Ledger.open(spec)


def test_another_machine_goes_on_from_the_copy_and_the_first_one_ends(
    spec, store, tmp_path, monkeypatch, capsys
):
    move_to("a", tmp_path, monkeypatch)
    with Ledger.open(spec) as first:
        SweepStore(spec).write_spec()
        for _ in range(2):
            first.begin_session(0.0, 1, {})
        assert capsys.readouterr().err == "", "on the same machine"
        start_trial(first)
        own = first.directory / JOURNAL
        move_to("b", tmp_path, monkeypatch)
        with Ledger.open(spec, read_only=True) as reader:
            assert len(reader.get_records()) == 1
        assert not (spec.directory / JOURNAL).exists()
        with Ledger.open(spec) as second:
            first.record_ending("nothing")  # opening alone, as to send it to MLflow, ends nothing
            second.close()
        with Ledger.open(spec) as second:
            second.begin_session(0.0, 1, {})
            assert f"note: {spec.address} was run by" in capsys.readouterr().err
            start_trial(second)
            before = store.read(JOURNAL)
            for _ in range(2):  # what the end of a session writes fails at once too
                with pytest.raises(LedgerHeldError, match="another machine runs this sweep now"):
                    start_trial(first)
            assert store.read(JOURNAL) == before
    move_to("a", tmp_path, monkeypatch)
    with pytest.raises(IdentityError, match=f"fix: remove {own.parent} to go on from there"):
        Ledger.open(spec)
    shutil.rmtree(own.parent)
    with Ledger.open(spec) as ledger:
        assert len(ledger.get_records()) == 2


def test_records_that_the_store_did_not_get_are_kept(spec, store, monkeypatch):
    pauses = count_pauses_as_time(monkeypatch)
    away = patch.object(MemoryFileSystem, "pipe_file", side_effect=OSError("no route"))
    with Ledger.open(spec) as ledger:
        SweepStore(spec).write_spec()
        with away:
            with pytest.raises(StoreUnreachableError, match="run the same command to resume"):
                start_trial(ledger)
            waited = len(pauses)
            with pytest.raises(StoreUnreachableError):
                start_trial(ledger)
            assert len(pauses) == waited
    own, stored = (spec.directory / JOURNAL).read_bytes(), store.read(JOURNAL)
    assert own.startswith(stored)
    assert own != stored
    with Ledger.open(spec) as ledger:
        ledger.fail(0, "later")
        assert store.read(JOURNAL) == (spec.directory / JOURNAL).read_bytes()


def test_a_sweep_without_its_ledger_is_never_begun_again(spec, tmp_path):
    for sweep in (spec, load_code_spec(tmp_path)):
        with Ledger.open(sweep) as ledger:
            start_trial(ledger)
            if sweep.address:
                SweepStore(sweep).write_spec()
                StoreDirectory(sweep.address).delete([JOURNAL])
        (sweep.directory / JOURNAL).unlink()
        with pytest.raises(UsageError, match=r"has lost its ledger(.|\n)*--fresh"):
            Ledger.open(sweep)
        with Ledger.open(sweep, fresh=True) as ledger:
            assert ledger.get_records() == []
            assert (ledger.moved_aside / SPEC).exists()
