"""The published record: the same front for others, and nothing about the author's machine."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest

from gdpo_tune import load_sweep
from gdpo_tune.publishing.record import build_record
from gdpo_tune.results.open_sweep import find_sweep
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT
from tests.support.published_sweeps import MACHINE, PRIVATE, copy_stored_sweep, make_sweep


def publish_record(directory, hub, name="model:me/front"):
    """Put the record of a sweep on the Hub, as the command does."""
    hub.add(name, build_record(find_sweep(str(directory))))


def assert_same(one, other):
    """Compare two loaded sweeps bit for bit."""
    pd.testing.assert_frame_equal(one.front, other.front, check_exact=True)
    pd.testing.assert_frame_equal(
        one.trials.drop(columns="reason"), other.trials.drop(columns="reason"), check_exact=True
    )
    assert one.analysis.hypervolume == other.analysis.hypervolume
    assert one.analysis.hypervolume_interval == other.analysis.hypervolume_interval
    assert one.analysis.knee.name == other.analysis.knee.name
    assert {n: c.name for n, c in one.analysis.extremes.items()} == {
        n: c.name for n, c in other.analysis.extremes.items()
    }
    assert one.analysis.hypervolume_over_trials == other.analysis.hypervolume_over_trials


@pytest.mark.parametrize("place", ["me/front", "datasets/me/front"])
def test_a_published_front_is_read_back_bit_for_bit(tmp_path, hub, place):
    directory = copy_stored_sweep(tmp_path / "runs")
    kind = "dataset" if "datasets" in place else "model"
    publish_record(directory, hub, f"{kind}:me/front")
    read = load_sweep(f"hf://{place}")
    assert_same(read, load_sweep(str(directory)))
    assert read.trials["reason"].equals(load_sweep(str(directory)).trials["reason"])
    assert len(read.front) == 30
    assert read.spec.name == "front"
    assert set(read.figures) == set(load_sweep(str(directory)).figures)


def test_no_word_about_the_authors_machine_is_published(swept):
    files = build_record(find_sweep(str(swept.directory)))
    private = [*PRIVATE, str(swept.directory), swept.storage]
    journal = (swept.directory / "ledger.journal").read_text()
    assert all(word in journal for word in ("gpu-box-17", MACHINE, "anna.b", "10.1.2.3"))
    for name, content in files.items():
        found = [word for word in private if word.encode() in content]
        assert not found, f"{name} has {found}"
    assert '"reason":"FileNotFoundError"' in files["sweep/ledger.journal"].decode()


def test_completions_and_prompts_stay_behind(swept):
    files = build_record(find_sweep(str(swept.directory)))
    assert {name.rpartition("/")[2] for name in files} == {
        "spec.yaml",
        "ledger.journal",
        "steps.jsonl",
    }
    assert b"private prompt" not in b"".join(files.values())


def test_the_record_of_a_sweep_with_directories_has_an_identity_of_its_own(tmp_path, hub):
    data = tmp_path / "anna.b" / "prompts.jsonl"
    data.parent.mkdir()
    shutil.copyfile(ROOT / "tests" / "data" / "mbpp.jsonl", data)
    spec = make_sweep(tmp_path, **{"data.source": str(data), "data.layout": "mbpp"})
    publish_record(spec.directory, hub)
    read = load_sweep("hf://me/front")
    assert read.spec.data.source == "data.jsonl"
    assert_same(read, load_sweep(str(spec.directory)))


def test_the_published_file_can_be_searched_again(swept, tmp_path):
    content = build_record(find_sweep(str(swept.directory)))["sweep/spec.yaml"]
    (tmp_path / "again.yaml").write_bytes(content)
    again = load_spec(tmp_path / "again.yaml")
    assert again.compute_identity() == swept.compute_identity()
    assert (again.notify, again.resources.env, again.storage) == (None, (), "runs")
    assert again.tracking.uri == "sqlite:///mlflow.db"


@pytest.mark.parametrize("user", ["search", "model", "gdpo", "sweep"])
def test_a_user_whose_name_has_a_meaning_in_the_ledger(swept, hub, monkeypatch, user):
    monkeypatch.setattr("getpass.getuser", lambda: user)
    publish_record(swept.directory, hub)
    assert_same(load_sweep("hf://me/front"), load_sweep(str(swept.directory)))


def test_numbers_and_distributions_are_never_changed(swept):
    before = (swept.directory / "ledger.journal").read_text().splitlines()
    after = build_record(find_sweep(str(swept.directory)))["sweep/ledger.journal"].decode()
    ours = [json.loads(line) for line in before if '"op_code":4' in line]
    theirs = [json.loads(line) for line in after.splitlines() if '"op_code":4' in line]
    assert [r["distributions"] for r in ours] == [r["distributions"] for r in theirs]
    assert [r["params"] for r in ours] == [r["params"] for r in theirs]
