"""A trial resumes bitwise equal wherever it died while it wrote a checkpoint.

So does a trial whose disk was full. A small disk in memory is filled, if this user may mount one.
"""

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
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from tests.support import training as support
from tests.support.paths import ROOT
from tests.support.training import SETTINGS, ToyTask, have_same_weights
from tests.support.trials import build_trial, get_results

pytestmark = pytest.mark.usefixtures("toy")

STEPS = 4
RESUMABLE = SETTINGS.replace(steps=STEPS, checkpoint_every=1, evaluate_every=4)
OPERATIONS = (
    *((torch, "save"), (checkpoints, "_sync"), (checkpoints, "_hash")),
    *((Path, "write_text"), (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree")),
)
"""All disk operations that write checkpoints."""


class Killed(BaseException):
    """Stands for the death of the process: no code of the trial handles it."""


def run(config, resume=None):
    worker_cache.release_worker_cache()  # a first training writes more
    return train(config, resume=resume, report=lambda *_: None), config.directory


def run_with_failure(config, at: int, error: BaseException) -> int:
    """Raise at the n-th operation, if n is not 0, and at all later ones; return their number."""
    count = 0

    def wrap(operation):
        def counted(*arguments, **keywords):
            nonlocal count
            count += 1
            if at and count >= at:
                raise error
            return operation(*arguments, **keywords)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, wrap(getattr(owner, name)))
        run(config)
    return count


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory):
    """A trial without any failure."""
    with pytest.MonkeyPatch.context() as patch:
        support.register_toy_task(patch)
        return run(build_trial(policy, tmp_path_factory.mktemp("whole"), training=RESUMABLE))


@pytest.fixture(scope="module")
def total(policy, whole, tmp_path_factory):
    """The number of operations of that trial."""
    with pytest.MonkeyPatch.context() as patch:
        support.register_toy_task(patch)
        config = build_trial(policy, tmp_path_factory.mktemp("count"), training=RESUMABLE)
        count = run_with_failure(config, 0, Killed())
    assert read_metrics(config.directory) == read_metrics(whole[1])
    assert count > 10 * STEPS
    return count


def read_metrics(directory):
    return [(m.step, m.metrics) for m in read_steps(directory)]


def assert_equal(done, expected):
    (outcome, directory), (reference, reference_directory) = done, expected
    assert get_results(outcome) == get_results(reference)
    assert read_metrics(directory) == read_metrics(reference_directory)
    assert have_same_weights(outcome.checkpoint, reference.checkpoint)


@pytest.mark.system
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_a_trial_that_dies_at_any_operation_resumes_bitwise_equal(
    policy, tmp_path, whole, total, stride
):
    for point in range(stride % total, total + 1, stride):
        config = build_trial(policy, tmp_path / str(point), training=RESUMABLE)
        with pytest.raises(Killed):
            run_with_failure(config, point, Killed())
        assert_equal(run(config, find_newest_checkpoint(config.directory)), whole)
        names = sorted(path.name for path in config.directory.glob("*checkpoint*"))
        assert names[-2:] == [f"checkpoint-{STEPS - 1}", f"checkpoint-{STEPS}"]


@pytest.mark.parametrize(("number", "later"), [(errno.ENOSPC, 0), (errno.EDQUOT, 5)])
def test_a_full_disk_ends_the_trial_in_one_line_and_it_can_be_resumed(
    policy, tmp_path, whole, total, number, later
):
    config = build_trial(policy, tmp_path, training=RESUMABLE)
    with pytest.raises((DiskFullError, OSError)) as caught:
        run_with_failure(config, total // 2 + later, OSError(number, os.strerror(number)))
    if isinstance(caught.value, DiskFullError):
        assert str(config.directory) in str(caught.value)
    assert_equal(run(config, find_newest_checkpoint(config.directory)), whole)


BEGIN = """
import os, signal, sys
from pathlib import Path
from gdpo_tune.core import registry
from gdpo_tune.core.errors import DiskFullError
from gdpo_tune.core.trial_files import read_steps
from gdpo_tune.training import checkpoints, train
from gdpo_tune.training.checkpoints import find_checkpoint
from tests.support.training import TARGET, build_trial_config
from tests.training.test_kills import RESUMABLE
registry.TASKS["toy"] = TARGET
policy, directory = sys.argv[1], Path(sys.argv[2])
"""
KILLED = """
sync = checkpoints._sync
def dies(path):
    sync(path)
    if path.name == ".unfinished-3":
        os.kill(os.getpid(), signal.SIGKILL)  # between writing and naming
checkpoints._sync = dies
config = build_trial_config(policy, directory, settings=RESUMABLE)
train(config, resume=None, report=lambda *_: None)
"""
FULL = """
config = build_trial_config(policy, directory)
blocker = config.directory / "blocker"
try:
    train(config, resume=None, report=lambda m, path: blocker.write_bytes(bytes(int(sys.argv[3]))))
except DiskFullError as error:
    blocker.unlink()
    assert not list(config.directory.glob(".unfinished*"))
    print(error)
    newest = find_checkpoint(config.directory).newest
    train(config, resume=newest, report=lambda *_: None)
    print([m.step for m in read_steps(config.directory)])
"""


def run_process(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.system
@pytest.mark.integration
@pytest.mark.slow
def test_a_sigkill_before_the_checkpoint_gets_its_name(policy, tmp_path, whole):
    config = build_trial(policy, tmp_path / "t", training=RESUMABLE)
    done = run_process(sys.executable, "-c", BEGIN + KILLED, policy, str(config.directory))
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert (config.directory / ".unfinished-3").is_dir()
    newest = find_newest_checkpoint(config.directory)
    assert newest == config.directory / "checkpoint-2"
    assert_equal(run(config, newest), whole)
    assert ToyTask.opened


@pytest.mark.system
@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("left", [20_000, 60_000, 120_000, 200_000])
def test_a_full_disk_ends_a_trial_that_can_be_resumed(policy, tmp_path, left: int):
    """`left` bytes are free for the first checkpoint, so that each case fails in another file."""
    disk, size = tmp_path / "disk", 2**22
    disk.mkdir()
    mount = f'mount -t tmpfs -o size={size} tmpfs "{disk}" && exec "$@"'
    within = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or run_process(*within, "true").returncode:
        pytest.skip("this user may mount nothing")
    script = [sys.executable, "-c", BEGIN + FULL, policy, str(disk / "t"), str(size - left)]
    done = run_process(*within, *script)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("no space left for the checkpoint of step 2 in ")
    assert first.endswith(" bytes free")
    assert last == "[1, 2, 3]"
