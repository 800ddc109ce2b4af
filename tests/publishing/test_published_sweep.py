"""Commands that read `hf://USER/NAME`, and those that refuse it."""

from __future__ import annotations

import pytest

from gdpo_tune import compare, export, load_sweep, report, steer, sweep, watch
from gdpo_tune.core.errors import UsageError
from gdpo_tune.publishing.record import build_record
from gdpo_tune.results.open_sweep import find_sweep
from gdpo_tune.results.retrain import build_request_from_sweep
from tests.support.paths import ROOT
from tests.support.published_sweeps import make_sweep

ADDRESS = "hf://me/front"
TASK = """
from gdpo_tune.tasks.code import CodeTask

class Mine(CodeTask):
    rewards = ("correctness", "format", "length")
    metrics = ("correctness", "format", "length")
"""


@pytest.fixture
def record(swept, hub):
    """Publish the record of a sweep and return its files."""
    files = build_record(find_sweep(str(swept.directory)))
    hub.add("model:me/front", files)
    return files


def test_report_and_compare_read_it(record, tmp_path, capsys, swept):
    assert report.main([f"{ADDRESS}:max_format"]) == 0
    printed = capsys.readouterr().out
    assert f"python -m gdpo_tune.train --from {ADDRESS}:2" in printed
    assert (tmp_path / "cache" / "hf" / "me" / "front" / "report.html").stat().st_size > 0
    assert compare.main([ADDRESS, str(swept.directory)]) == 0


def test_a_training_repeats_a_published_trial_and_stays_out_of_the_cache(record):
    request = build_request_from_sweep(f"{ADDRESS}:2", [])
    assert request.seed == 72
    assert request.params["reward_weights.format"] == pytest.approx(0.3)
    assert str(request.spec.output_directory) == "runs"
    assert request.note == f"trial 2 of {ADDRESS}"


def test_an_export_reads_it(record, tmp_path, capsys):
    assert export.main([f"{ADDRESS}:2", "--to", "trl", "--out", str(tmp_path / "trl")]) == 0
    assert str(tmp_path / "trl") in capsys.readouterr().out


def test_a_task_of_its_authors_own_is_read_where_its_file_is(tmp_path, hub, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text(TASK)
    spec = make_sweep(tmp_path, task=f"{tmp_path}/own/mine.py:Mine")
    hub.add("model:me/own", build_record(find_sweep(str(spec.directory))))
    with pytest.raises(UsageError, match=r"mine\.py:Mine: there is no file"):
        load_sweep("hf://me/own")
    monkeypatch.chdir(tmp_path / "own")
    assert len(load_sweep("hf://me/own").front) == 3


def test_an_update_replaces_the_copy(record, hub):
    load_sweep(ADDRESS)
    steps = "sweep/trials/2/steps.jsonl"
    stored = hub.repositories["model:me/front"]
    del stored.files[steps]
    stored.commits.append([steps])
    copy = load_sweep(ADDRESS).spec.directory
    assert (copy / "trials" / "1").is_dir()
    assert not (copy / "trials" / "2").exists()


def test_an_earlier_copy_is_read_without_a_network(record, hub, monkeypatch):
    before = load_sweep(ADDRESS)
    hub.shutdown()
    hub.server_close()
    assert load_sweep(ADDRESS).analysis.hypervolume == before.analysis.hypervolume
    with pytest.raises(UsageError, match="this machine has no earlier copy"):
        load_sweep("hf://me/never-read")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://me", "not of the form USER/NAME"),
        ("hf://me/front/sweep", "not of the form USER/NAME"),
        ("hf://me/other", "cannot be read.*\n    fix: check the name; if it is private"),
        ("hf://me/weights", "did not write it"),
    ],
)
def test_an_address_without_a_sweep_is_refused(hub, record, address, message):
    hub.add("model:me/weights", {"config.json": b"{}"})
    with pytest.raises(UsageError, match=message):
        load_sweep(address)


def test_a_private_sweep_needs_a_token(record, hub, monkeypatch):
    hub.repositories["model:me/front"].private = True
    assert len(load_sweep(ADDRESS).front) == 3
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("GDPO_TUNE_CACHE", "elsewhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "elsewhere")
    with pytest.raises(UsageError, match="if it is private, log in"):
        load_sweep(ADDRESS)


def test_commands_that_change_a_sweep_refuse_it(record):
    space = str(ROOT / "search_spaces" / "code.yaml")
    for run in (
        lambda: sweep.main([ADDRESS]),
        lambda: sweep.main([space, "--set", "storage=hf://me", "--dry-run"]),
        lambda: steer.main([ADDRESS, "pause"]),
        lambda: load_sweep(ADDRESS).steer,
        lambda: watch.find_spec(ADDRESS),
    ):
        with pytest.raises(UsageError, match="is published, so it is only read"):
            run()
