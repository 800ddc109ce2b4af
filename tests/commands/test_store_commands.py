"""A sweep on a real S3 server, and commands on it."""

import shutil

import pytest

from gdpo_tune import export, load_sweep, report
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.object_store import CACHE, StoreDirectory
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.sweep_store import SweepStore
from gdpo_tune.spec import load_spec
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning.ray.attempt import download_trial, upload_trial
from gdpo_tune.tuning.runner import run_sweep
from tests.support.paths import ROOT
from tests.support.s3_servers import BUCKET, start_s3_server

pytestmark = pytest.mark.integration
SPACE = ROOT / "search_spaces" / "code.yaml"


@pytest.fixture
def store():
    with start_s3_server() as server:
        yield server


@pytest.fixture
def spec(store, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return load_spec(SPACE, [f"storage=s3://{BUCKET}/runs"], "night")


def run_two_trials(spec, node):
    """Write the files and records of two complete trials."""
    with Ledger.open(spec) as ledger:
        SweepStore(spec).write_spec()
        params = spec.space.complete_baseline({})
        for number in range(2):
            ledger.start(params, "search", "model", 7 + number)
            directory = node / str(number)
            files = StoreDirectory(f"{spec.address}/trials/{number}")
            download_trial(files, directory, "this")
            append_step(directory, Measurement(1, {"train/loss": 0.5}, Cost(64, 1.0)))
            write_checkpoint(directory, 4, Cost(256, 2.0), lambda at: (at / "weights").touch())
            upload_trial(files, directory)
            values = {n: Estimate(0.5 + number / 10, 0.01) for n in spec.objectives}
            checkpoint = ledger.get_trial_directory(number) / "checkpoint-4"
            ledger.complete(number, Outcome(values, values, Cost(640, 2.0), checkpoint))


@pytest.mark.system
def test_load_sweep_reads_a_sweep_by_its_store_address(spec, tmp_path, capsys):
    run_two_trials(spec, tmp_path / "node")
    shutil.rmtree(tmp_path / "cache")
    sweep = load_sweep(spec.address)
    assert len(sweep.trials) == 2
    record = sweep.records[1]
    assert record.policy == f"s3://{BUCKET}/runs/night/trials/1/checkpoint-4"
    assert (spec.directory / "trials" / "1" / "steps.jsonl").exists()

    assert report.main([spec.address, "--pick", "knee"]) == 0
    printed = capsys.readouterr().out
    assert sweep.records[0].policy in printed
    assert f"--from {spec.address}:0" in printed
    assert (spec.directory / "report.html").stat().st_size > 10_000

    for source in (f"{spec.address}:1", f"{spec.directory}:1"):  # the address, or its copy here
        assert export.main([source, "--to", "trl", "--out", str(tmp_path / "out")]) == 0
        assert f"# trial 1 of {spec.address}\n" in (tmp_path / "out" / "grpo.yaml").read_text()
    with pytest.raises(UsageError, match=f"there is no sweep in s3://{BUCKET}/runs/other"):
        load_sweep(f"s3://{BUCKET}/runs/other")


def read_refusal(spec):
    """Return the error with which a sweep is refused."""
    with pytest.raises(UsageError) as caught:
        run_sweep(spec, train="none:none")
    assert caught.value.exit_status == 2
    return str(caught.value)


def test_a_bucket_that_does_not_exist_is_refused_before_any_work(spec):
    missing = spec.model_copy(update={"storage": "s3://nobody/runs"})
    assert "storage s3://nobody/runs: The specified bucket does not exist" in read_refusal(missing)
    assert not spec.directory.exists()


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_refused_at_once(spec, store):
    with store.keep_stopped():
        assert "Could not connect to the endpoint" in read_refusal(spec)
    assert store.list_names() == []


def test_an_earlier_sweep_is_never_overwritten(spec, store, tmp_path):
    run_two_trials(spec, tmp_path / "node")
    shutil.rmtree(tmp_path / "cache")
    StoreDirectory(spec.address).delete(["ledger.journal"])
    with pytest.raises(UsageError, match=r"has lost its ledger(.|\n)*fix: restore that file"):
        Ledger.open(spec)
    before = [name for name in store.list_names() if "/trials/" in name]
    with Ledger.open(spec, fresh=True) as ledger:
        assert ledger.get_records() == []
        aside = ledger.moved_aside
    assert aside is not None
    names = store.list_names()
    assert [n.replace(f"/{aside.name}/", "/night/") for n in names if "/trials/" in n] == before
    assert [n for n in names if n.startswith("runs/night/")] == ["runs/night/ledger.journal"]


@pytest.mark.slow
def test_a_sweep_that_was_moved_aside_can_be_read(spec, tmp_path):
    run_two_trials(spec, tmp_path / "node")
    with Ledger.open(spec, fresh=True) as ledger:
        aside = ledger.moved_aside
    assert aside is not None
    sweep = load_sweep(f"s3://{BUCKET}/runs/{aside.name}")
    assert [record.state for record in sweep.records] == ["complete", "complete"]
