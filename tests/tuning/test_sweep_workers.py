"""Sweeps with two processes per trial, on a real Ray."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from gdpo_tune.core.system import count_local_cpus
from gdpo_tune.core.trial_files import STEPS_FILE, read_steps
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.tuning.runner import TRAIN, run_sweep
from tests.support.ray_sweeps import MARKS, SPACE, start_sweep, wait_until
from tests.support.tuning import ENDS_ONLY

pytestmark = [
    *MARKS,
    pytest.mark.skipif(count_local_cpus() < 2, reason="two workers need two cores"),
]

SMALL = [
    "resources.workers=2",
    "search.sampler=random",
    "search.trials=1",
    "search.replicates.max_runs=0",
    "training.steps=4",
    "training.completions_per_step=16",
    "training.validation_prompts=5",
    "training.test_prompts=5",
    "training.checkpoint_every=1",
    *ENDS_ONLY,
]


def load_small_spec(directory: Path, *overrides: str) -> SweepSpec:
    return load_spec(SPACE, [f"storage={directory}", *SMALL, *overrides], "sweep")


def get_trial_directory(spec: SweepSpec, number: int) -> Path:
    return spec.directory / "trials" / str(number)


@pytest.mark.slow
def test_a_sweep_with_two_workers_a_trial(tmp_path: Path):
    spec = load_small_spec(tmp_path, "keep=all")
    assert spec.resources.shards_policy
    result = run_sweep(spec)
    assert [record.state for record in result.records] == ["complete"] * 3
    untrained, *trained = result.records
    assert untrained.cost.completions == 0
    for record in trained:
        directory = get_trial_directory(spec, record.number)
        assert [m.step for m in read_steps(directory)] == [1, 2, 3, 4]
        assert len((directory / STEPS_FILE).read_text().splitlines()) == 4, "one of the two writes"
        assert record.cost.completions == 4 * 16
        assert record.checkpoint == directory / "checkpoint-4"
        assert len(list(record.checkpoint.glob("rng_state_?.pth"))) == 2
        assert record.environment["sandbox"]
        assert all(e.mean >= 0 for e in record.test.values())


def list_workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """List the processes that train."""
    processes = psutil.Process(process.pid).children(recursive=True)
    return [child for child in processes if "RayTrainWorker" in " ".join(child.cmdline())]


@pytest.mark.fault
def test_a_killed_worker_costs_an_attempt_and_an_interruption_nothing(tmp_path: Path):
    steps = "training.steps=40"
    spec = load_small_spec(tmp_path, steps)
    directory = get_trial_directory(spec, 1)
    with start_sweep(TRAIN, f"storage={tmp_path}", *SMALL, steps) as process:
        wait_until(lambda: list(directory.glob("checkpoint-*")))
        list_workers(process)[-1].kill()
        lines = len((directory / STEPS_FILE).read_text().splitlines())
        # It resumes in another attempt, from its newest checkpoint and not from the start.
        wait_until(lambda: len((directory / STEPS_FILE).read_text().splitlines()) > lines + 3)
        written = [m.step for m in read_steps(directory)]
        assert written == list(range(1, len(written) + 1))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=240) == 130
    before = read_steps(directory)
    result = run_sweep(spec)
    assert [record.state for record in result.records] == ["complete"] * 3
    after = read_steps(directory)
    assert [m.step for m in after] == list(range(1, 41))
    assert after[: len(before)] == before, "nothing was trained twice after the interruption"
