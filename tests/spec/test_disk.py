"""Peak of the disk of a sweep: its formula, the dry run, and a disk that is too small."""

import re
import shutil
from collections import namedtuple

import pytest

from gdpo_tune import sweep
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.policy_shapes import PolicyShapes, find_known_size
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.spec import load_spec, machine
from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.machine import check_disk, measure_disk
from tests.support.paths import ROOT
from tests.support.spec_cases import GOOD
from tests.support.tuning import ENDS_ONLY

GB = 10**9
SMALL = PolicyShapes({"model.layers.0.q_proj.weight": (1000, 1000)})
FIFO = "search.scheduler={type: fifo}"
Usage = namedtuple("Usage", "total used free")


def with_adapters(spec, rank=8):
    return spec.model_copy(update={"model": ModelSettings(lora_rank=rank)})  # peft may be missing


def test_every_weight(load):
    trials = "search={trials: 24, replicates: {per_point: 2, max_runs: 8}, scheduler: {type: fifo}}"
    size = find_known_size("Qwen/Qwen2.5-1.5B-Instruct")
    found = measure_disk(load(trials, *ENDS_ONLY), size, slots=4)
    numbers = 1_543_714_304
    assert found.running == 12 * numbers  # a weight and two moments, of 4 bytes
    assert found.last == found.ended == 4 * numbers  # no optimizer
    assert found.trials == 33
    # Two that are kept and one that is being written, of each of four; one of each other.
    assert found.peak == 4 * 3 * 12 * numbers + 29 * 4 * numbers


def test_adapters(load):
    found = measure_disk(
        with_adapters(load(FIFO, "search.replicates.max_runs=0", *ENDS_ONLY)), SMALL, slots=2
    )
    trained = 8 * (1000 + 1000)
    assert found.running == 12 * trained
    assert found.last == 4 * trained  # the policy below the adapter is not written
    assert found.peak == 2 * 3 * 12 * trained + 15 * found.last
    assert found.whole == 4 * 10**6 + 4 * trained  # on a CPU it has 32 bits
    on_gpu = measure_disk(with_adapters(load(FIFO, "resources.gpus=1")), SMALL, slots=1)
    assert (on_gpu.last, on_gpu.whole) == (2 * trained, 2 * 10**6 + 4 * trained)


def test_merges_of_adapters_have_the_ranks_of_their_parts(load):
    search = "search={trials: 5, replicates: {max_runs: 0}, merges: {budget: 3, most_parts: 4}}"
    spec = with_adapters(load(search, FIFO, "search.checkpoints.budget=2"))
    trained = 8 * (1000 + 1000)
    assert measure_disk(spec, SMALL, slots=1).candidates == 3 * 4 * 4 * trained + 2 * 4 * trained


def test_a_shipped_sweep_of_adapters_needs_little():
    spec = load_spec(ROOT / "search_spaces" / "math_qwen.yaml", to_run=False)
    found = measure_disk(spec, find_known_size(spec.policy), slots=1)
    assert found.ended == 2 * 36_929_536
    assert found.peak < 16 * GB


@pytest.mark.parametrize(
    ("overrides", "ended"),
    [
        ([FIFO], 4),
        ([FIFO, "keep=none"], 0),
        (["keep=all"], 12),  # the newest one of a trial that was stopped early
        (["search.scheduler={type: halving}", "search.budget.completions=640000"], 24),
    ],
)
def test_trials_without_a_process(load, overrides, ended):
    spec = load("training.steps=60", *overrides)
    assert measure_disk(spec, SMALL, slots=1).ended == ended * 10**6


def test_more_slots_than_trials_hold_no_more(load):
    spec = load("search={trials: 2, replicates: {max_runs: 0}}", *ENDS_ONLY)
    few, many = measure_disk(spec, SMALL, slots=3), measure_disk(spec, SMALL, slots=50)
    assert few.peak == many.peak == 3 * 36 * 10**6
    assert (
        measure_disk(load("search.budget.trials=2", *ENDS_ONLY), SMALL, slots=50).peak
        == 2 * 36 * 10**6
    )


def test_merges_and_checkpoints(load):
    search = "search={trials: 5, replicates: {max_runs: 0}, merges: {budget: 3}}"
    evaluated = ["training={steps: 60, evaluate_every: 15}", "search.checkpoints.budget=2"]
    ends = measure_disk(load(search, *evaluated, *ENDS_ONLY), SMALL, slots=2)
    found = measure_disk(load(search, *evaluated), SMALL, slots=2)
    weights = 4 * 10**6  # without the optimizer, whether it is the last checkpoint or not
    # Of steps 30 and 45; 15, and the rung at 20, are early. That of 45 is among the two newest.
    assert found.evaluated == weights
    assert found.peak - ends.peak == 2 * weights + 2 * weights + 3 * weights
    assert measure_disk(load(search, *evaluated, "keep=none"), SMALL, 2).candidates == 0


def have_room(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    monkeypatch.setattr(machine, "count_local_cpus", lambda: 2)


def test_a_disk_that_is_too_small(load, monkeypatch, tmp_path):
    trials = "search={trials: 10, replicates: {max_runs: 0}}"
    spec = load(f"storage={tmp_path}", FIFO, trials, *ENDS_ONLY)
    peak = (2 * 36 + 9 * 4) * 10**6
    have_room(monkeypatch, peak)
    check_disk(spec, SMALL, "my.yaml")
    have_room(monkeypatch, peak - 1)
    with pytest.raises(ResourcesError) as caught:
        check_disk(spec, SMALL, "my.yaml")
    message = str(caught.value)
    assert f"my.yaml: storage = {tmp_path}: the checkpoints of this sweep need up to 108" in message
    assert f"{tmp_path} has room for 108" in message
    assert "3 checkpoints of 2 that train: 36.0 MB each; 9 others: 4.0 MB each" in message
    for fix in ("storage=DIRECTORY", "model.lora_rank=16", "keep=none", "search.trials=9"):
        assert f"--set {fix}" in message
    assert caught.value.exit_status == 2
    check_disk(spec, None)  # nothing is known
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_disk(spec, SMALL)  # a single slot at least: 36 + 10 x 4


def test_the_remedies_suffice(load, monkeypatch, tmp_path):
    have_room(monkeypatch, 80 * 10**6)
    trials = "search={trials: 10, replicates: {max_runs: 0}}"
    spec = load(f"storage={tmp_path}", FIFO, trials, *ENDS_ONLY)
    with pytest.raises(ResourcesError, match=r"search\.trials=3"):
        check_disk(spec, SMALL)
    check_disk(
        load(
            f"storage={tmp_path}", FIFO, "search={trials: 3, replicates: {max_runs: 0}}", *ENDS_ONLY
        ),
        SMALL,
    )
    check_disk(load(f"storage={tmp_path}", FIFO, "keep=none"), SMALL)
    have_room(monkeypatch, 112 * 10**6)
    with pytest.raises(ResourcesError, match=r"search\.merges\.budget=0 --set search\.check"):
        check_disk(load(f"storage={tmp_path}", FIFO, trials), SMALL)


def test_what_does_not_suffice_is_not_proposed(load, monkeypatch, tmp_path):
    have_room(monkeypatch, 70 * 10**6)  # less than the two trials that train
    with pytest.raises(ResourcesError) as caught:
        check_disk(load(f"storage={tmp_path}", FIFO), SMALL)
    assert "keep=none" not in str(caught.value)
    assert "search.trials" not in str(caught.value)


def test_a_file_that_vanishes_meanwhile_is_not_counted(tmp_path):
    directory = tmp_path / "trials" / "3"
    directory.mkdir(parents=True)
    (directory / "model").write_bytes(b"1234")
    (directory / "gone").symlink_to(tmp_path / "nothing")  # its size cannot be read
    assert machine.count_present_bytes(tmp_path) == 4


def test_what_an_interrupted_sweep_has_already_counts_as_room(load, monkeypatch, tmp_path):
    trials = "search={trials: 10, replicates: {max_runs: 0}}"
    spec = load(f"storage={tmp_path}", FIFO, trials, *ENDS_ONLY)
    have_room(monkeypatch, 100 * 10**6)
    checkpoint = spec.directory / "trials" / "3" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ResourcesError):
        check_disk(spec, SMALL)
    with (checkpoint / "model").open("wb") as file:
        file.truncate(8 * 10**6)
    check_disk(spec, SMALL)


def test_an_object_store_has_room(load, monkeypatch):
    have_room(monkeypatch, 0)
    check_disk(load("storage=s3://bucket/sweeps"), SMALL)


def test_the_dry_run_states_the_peak(load, monkeypatch):
    monkeypatch.setattr(machine, "count_local_cpus", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    spec = load(FIFO, "search={trials: 10, replicates: {max_runs: 0}}", *ENDS_ONLY)
    line = "# Disk: at most 108 MB of checkpoints (3 checkpoints of 2 that train: 36.0 MB each"
    assert line in render_dry_run(spec, SMALL)
    assert "# Disk: unknown until the policy is on this machine" in render_dry_run(spec)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "each further slot of the cluster adds up to 32.0 MB" in render_dry_run(spec, SMALL)


def test_the_dry_run_states_the_memory_of_a_trial_with_a_gpu(load):
    size = find_known_size("Qwen/Qwen2.5-1.5B-Instruct")
    assert "# GPU memory" not in render_dry_run(load(), size)
    spec = load("resources.gpus=1", "rollout.engine=transformers")
    assert re.search(r"# GPU memory: [\d.]+ GB to train, computed\n", render_dry_run(spec, size))


def test_a_dry_run_notes_a_disk_that_is_too_small(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert sweep.main(["mine.yaml", "--dry-run"]) == 0
    assert "missing on this machine: nothing\n" in capsys.readouterr().out
    have_room(monkeypatch, 10**6)
    assert sweep.main(["mine.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "# Disk: at most" in shown
    assert "this machine\n  - mine.yaml: storage = runs: the checkpoints" in shown
