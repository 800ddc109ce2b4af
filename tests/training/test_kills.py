"""A trial resumes bitwise equal wherever it died while it wrote a checkpoint.

So does a trial whose disk was full, or whose newest checkpoint is damaged.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdpo_tune.core.errors import DiskFullError
from gdpo_tune.core.trial_files import read_steps
from gdpo_tune.training import checkpoints, train, worker_cache
from gdpo_tune.training.checkpoints import find_checkpoint, find_newest_checkpoint
from tests.support.paths import ROOT
from tests.support.training import (
    SETTINGS,
    ToyTask,
    build_trial_config,
    have_same_weights,
    register_toy_task,
)

pytestmark = pytest.mark.usefixtures("toy")

STEPS = 4
RESUMABLE = SETTINGS.replace(steps=STEPS, checkpoint_every=1, evaluate_every=4)


class Killed(BaseException):
    """Stands for the death of the process: no code of the trial handles it."""


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory):
    """A trial without any failure."""
    with pytest.MonkeyPatch.context() as patch:
        register_toy_task(patch)
        return run(build_trial_config(policy, tmp_path_factory.mktemp("whole"), settings=RESUMABLE))


def run(config, resume=None):
    return train(config, resume=resume, report=lambda *_: None), config.directory


def assert_equal(done, expected):
    (outcome, directory), (reference, reference_directory) = done, expected
    assert (outcome.validation, outcome.test) == (reference.validation, reference.test)
    assert [(m.step, m.metrics) for m in read_steps(directory)] == [
        (m.step, m.metrics) for m in read_steps(reference_directory)
    ]
    assert have_same_weights(outcome.checkpoint, reference.checkpoint)


class DiskFailure:
    """Raises at the n-th of all disk operations that write checkpoints."""

    def __init__(self, monkeypatch, at: int, error: BaseException) -> None:
        self.count, self.at, self.error = 0, at, error
        for owner, name in (
            (torch, "save"),
            (checkpoints, "_sync"),
            (checkpoints, "_hash"),
            (Path, "write_text"),
            (Path, "rename"),
            (Path, "mkdir"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name)))

    def wrapped(self, operation):
        def counted(*arguments, **keywords):
            self.count += 1
            if self.at and self.count >= self.at:
                raise self.error
            return operation(*arguments, **keywords)

        return counted


def count_operations(policy, directory, whole) -> int:
    worker_cache.release_worker_cache()
    with pytest.MonkeyPatch.context() as patch:
        failure = DiskFailure(patch, 0, Killed())
        assert_equal(run(build_trial_config(policy, directory, settings=RESUMABLE)), whole)
    return failure.count


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_a_trial_that_dies_at_any_operation_resumes_bitwise_equal(policy, tmp_path, whole, stride):
    total = count_operations(policy, tmp_path / "count", whole)
    assert total > 10 * STEPS
    for point in range(stride % total, total + 1, stride):
        worker_cache.release_worker_cache()  # a first training writes more
        config = build_trial_config(policy, tmp_path / str(point), settings=RESUMABLE)
        with pytest.MonkeyPatch.context() as patch:
            DiskFailure(patch, point, Killed())
            with pytest.raises(Killed):
                run(config)
        worker_cache.release_worker_cache()
        assert_equal(run(config, find_newest_checkpoint(config.directory)), whole)
        names = sorted(path.name for path in config.directory.glob("*checkpoint*"))
        assert names[-2:] == [f"checkpoint-{STEPS - 1}", f"checkpoint-{STEPS}"]


def test_a_full_disk_ends_the_trial_in_one_line_and_it_can_be_resumed(policy, tmp_path, whole):
    total = count_operations(policy, tmp_path / "count", whole)
    for number, point in ((errno.ENOSPC, total // 2), (errno.EDQUOT, total // 2 + 5)):
        config = build_trial_config(policy, tmp_path / str(point), settings=RESUMABLE)
        with pytest.MonkeyPatch.context() as patch:
            DiskFailure(patch, point, OSError(number, os.strerror(number)))
            with pytest.raises((DiskFullError, OSError)) as caught:
                run(config)
        if isinstance(caught.value, DiskFullError):
            assert str(config.directory) in str(caught.value)
        worker_cache.release_worker_cache()
        assert_equal(run(config, find_newest_checkpoint(config.directory)), whole)


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(policy, tmp_path, whole):
    file = "optimizer.pt"
    config = build_trial_config(policy, tmp_path / "t", settings=RESUMABLE)

    def report(measurement, _):
        if measurement.step == 3:
            raise Killed

    with pytest.raises(Killed):
        train(config, resume=None, report=report)
    path = config.directory / "checkpoint-3" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    point_of_resume = find_checkpoint(config.directory)
    assert point_of_resume.newest == config.directory / "checkpoint-2"
    assert point_of_resume.describe_damage() == (
        f"checkpoint-3 is damaged ({file} has other content): the trial resumes from checkpoint-2"
    )
    worker_cache.release_worker_cache()
    assert_equal(run(config, point_of_resume.newest), whole)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training.test_kills import RESUMABLE
from tests.support.training import TARGET, build_trial_config
from gdpo_tune.core import registry
from gdpo_tune.training import checkpoints, train
registry.TASKS["toy"] = TARGET
sync, seen = checkpoints._sync, []
def dies(path):
    sync(path)
    seen.append(path)
    if path.name == ".unfinished-3":
        os.kill(os.getpid(), signal.SIGKILL)  # between writing and naming
checkpoints._sync = dies
config = build_trial_config(sys.argv[1], Path(sys.argv[2]), settings=RESUMABLE)
train(config, resume=None, report=lambda *_: None)
"""


@pytest.mark.system
@pytest.mark.integration
@pytest.mark.slow
def test_a_sigkill_before_the_checkpoint_gets_its_name(policy, tmp_path, whole):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, policy, str(tmp_path / "t")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    config = build_trial_config(policy, tmp_path / "t", settings=RESUMABLE)
    assert (config.directory / ".unfinished-3").is_dir()
    newest = find_newest_checkpoint(config.directory)
    assert newest == config.directory / "checkpoint-2"
    assert_equal(run(config, newest), whole)
    assert ToyTask.opened
