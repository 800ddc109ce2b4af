"""Checkpoints are complete or absent; the steps' file survives a crash and a resume."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import sys

import pytest

from gdpo_tune.core.errors import DiskFullError, SupersededError, TrialFailure
from gdpo_tune.core.trial_files import STEPS_FILE, append_step, read_steps
from gdpo_tune.core.trials import Cost, Estimate, Measurement
from gdpo_tune.training import checkpoints
from gdpo_tune.training.checkpoints import (
    MARKER,
    find_checkpoint,
    find_newest_checkpoint,
    keep_newest,
    read_checkpoint,
    remove_all_but,
    write_checkpoint,
)
from gdpo_tune.training.step_reporter import TrialWriterToken


def fill(directory):
    (directory / "weights").write_bytes(b"w" * 1000)
    (directory / "inner").mkdir()
    (directory / "inner" / "state").write_bytes(b"s" * 10)


def test_round_trip(tmp_path):
    cost = Cost(completions=64, seconds=2.5, cpu_seconds=1.5)
    estimates = {"format": Estimate(0.5, 0.01)}
    written = write_checkpoint(tmp_path / "trial", 20, cost, fill, estimates)
    assert written.path == tmp_path / "trial" / "checkpoint-20"
    assert find_newest_checkpoint(tmp_path / "trial") == written.path
    read = read_checkpoint(written.path)
    assert (read.step, read.cost, read.validation) == (20, cost, written.validation)
    assert read.validation == estimates
    assert (written.path / "inner" / "state").read_bytes() == b"s" * 10


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_newest_checkpoint_is_that_of_most_steps(tmp_path):
    for directory in (tmp_path, tmp_path / "absent"):
        assert find_newest_checkpoint(directory) is None
        assert find_checkpoint(directory).describe_damage() == ""
    for step in (100, 20, 3):
        write_checkpoint(tmp_path, step, Cost(), fill)
    assert find_newest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"
    assert find_checkpoint(tmp_path).describe_damage() == ""


def damaged_marker(path):
    marker = path / MARKER
    marker.write_bytes(marker.read_bytes()[:-5])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / MARKER).unlink(),
        damaged_marker,
        lambda path: (path / MARKER).write_text("[]"),
        lambda path: (path / "weights").write_bytes(b"w" * 999),
        lambda path: (path / "weights").unlink(),
        lambda path: shutil.rmtree(path / "inner"),
        lambda path: (path / "weights").write_bytes(b"w" * 999 + b"v"),
        lambda path: (path / "inner" / "state").write_bytes(b"t" * 10),
    ],
    ids=[
        "no-marker",
        "cut-marker",
        "foreign-marker",
        "short-file",
        "no-file",
        "no-directory",
        "last-byte",
        "other-content",
    ],
)
def test_a_damaged_checkpoint_is_skipped(tmp_path, damage):
    older = write_checkpoint(tmp_path, 20, Cost(), fill)
    newer = write_checkpoint(tmp_path, 40, Cost(), fill)
    assert find_newest_checkpoint(tmp_path) == newer.path
    damage(newer.path)
    assert find_newest_checkpoint(tmp_path) == older.path
    with pytest.raises(TrialFailure, match=r"checkpoint-40 is (incomplete|damaged)"):
        read_checkpoint(newer.path)
    note = find_checkpoint(tmp_path).describe_damage()
    assert note.startswith("checkpoint-40 is ")
    assert note.endswith(": the trial resumes from checkpoint-20")
    damage(older.path)
    assert find_checkpoint(tmp_path).newest is None
    assert find_checkpoint(tmp_path).describe_damage().endswith(": the trial starts over")


def test_a_death_while_writing_leaves_the_older_checkpoint(tmp_path):
    older = write_checkpoint(tmp_path, 20, Cost(), fill)

    def dies(directory):
        fill(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 40, Cost(), dies)
    assert find_newest_checkpoint(tmp_path) == older.path
    again = write_checkpoint(tmp_path, 40, Cost(), fill)
    assert find_newest_checkpoint(tmp_path) == again.path


def test_writing_the_same_step_again_replaces_it(tmp_path):
    write_checkpoint(tmp_path, 20, Cost(1), fill)
    write_checkpoint(tmp_path, 20, Cost(2), lambda directory: (directory / "other").write_text("x"))
    assert read_checkpoint(tmp_path / "checkpoint-20").cost == Cost(2)
    assert not (tmp_path / "checkpoint-20" / "weights").exists()


def test_a_digest_covers_both_ends_of_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_DIGESTED", 300)
    written = write_checkpoint(tmp_path, 20, Cost(), fill)
    weights = written.path / "weights"
    for position in (0, 299, 700, 999):
        content = bytearray(b"w" * 1000)
        content[position] = 0
        weights.write_bytes(content)
        assert find_newest_checkpoint(tmp_path) is None
    content = bytearray(b"w" * 1000)
    content[500] = 0
    weights.write_bytes(content)
    assert find_newest_checkpoint(tmp_path) == written.path


def test_the_two_newest_complete_checkpoints_stay(tmp_path):
    for step in (20, 40, 60, 100):
        write_checkpoint(tmp_path, step, Cost(), fill)
    (tmp_path / "checkpoint-60" / "weights").unlink()
    (tmp_path / ".unfinished-30").mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    keep_newest(tmp_path)
    left = ["checkpoint-100", "checkpoint-40", "checkpoint-notes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_complete_checkpoints_of_some_steps_stay_too(tmp_path):
    for step in (20, 40, 60, 80, 100):
        write_checkpoint(tmp_path, step, Cost(), fill)
    (tmp_path / "checkpoint-20" / "weights").unlink()
    keep_newest(tmp_path, (20, 40, 100, 120))
    left = ["checkpoint-100", "checkpoint-40", "checkpoint-80"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_checkpoint_that_only_may_become_a_candidate_loses_its_optimizer(tmp_path):
    def fill_both(directory):
        fill(directory)
        (directory / "optimizer.pt").write_bytes(b"moments")

    for step in (20, 40, 60):
        write_checkpoint(tmp_path, step, Cost(), fill_both)
    keep_newest(tmp_path, (20,))
    assert not (tmp_path / "checkpoint-20" / "optimizer.pt").exists()
    assert read_checkpoint(tmp_path / "checkpoint-20").step == 20
    assert (tmp_path / "checkpoint-40" / "optimizer.pt").exists()
    for newer in (40, 60):
        (tmp_path / f"checkpoint-{newer}" / "weights").unlink()
    # a training that resumed from it would continue with other moments
    assert find_checkpoint(tmp_path).newest is None


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, r"[\d,]+ bytes free"), (errno.EDQUOT, "your quota is used up")],
)
def test_a_full_disk_is_reported_with_directory_and_reason(tmp_path, number, reason):
    older = write_checkpoint(tmp_path, 20, Cost(), fill)

    def full(directory):
        fill(directory)
        raise OSError(number, "no room")

    with pytest.raises(DiskFullError) as caught:
        write_checkpoint(tmp_path, 40, Cost(), full)
    message = str(caught.value)
    assert f"no space left for the checkpoint of step 40 in {tmp_path}: " in message
    assert re.search(rf": {reason}\n", message)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-20"], "makes room again"
    assert find_newest_checkpoint(tmp_path) == older.path


def test_all_checkpoints_can_be_removed(tmp_path):
    write_checkpoint(tmp_path, 20, Cost(), fill)
    (tmp_path / ".unfinished-30").mkdir()
    (tmp_path / "steps.jsonl").touch()
    remove_all_but(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["steps.jsonl"]
    remove_all_but(tmp_path / "absent")


def test_modules_that_the_driver_needs_import_no_torch():
    code = (
        "import sys, gdpo_tune.training.checkpoints, gdpo_tune.core.trial_files;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# steps.jsonl


def measurement(step: int, loss: float = 0.5) -> Measurement:
    return Measurement(step, {"train/loss": loss}, Cost(step * 64, step * 1.5, step * 1.0))


def test_steps_round_trip(tmp_path):
    written = [measurement(step) for step in (1, 2, 3)]
    for step in written:
        append_step(tmp_path / "trial", step)
    assert read_steps(tmp_path / "trial") == written
    assert read_steps(tmp_path / "absent") == []


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path):
    for step in (1, 2, 3, 4, 5):
        append_step(tmp_path, measurement(step, loss=0.1))
    for step in (3, 4):
        append_step(tmp_path, measurement(step, loss=0.2))
    losses = [(m.step, m.metrics["train/loss"]) for m in read_steps(tmp_path)]
    assert losses == [(1, 0.1), (2, 0.1), (3, 0.2), (4, 0.2)]
    assert len((tmp_path / STEPS_FILE).read_text().splitlines()) == 7, "only ever appended to"


def test_a_torn_line_loses_that_line_alone(tmp_path):
    for step in (1, 2):
        append_step(tmp_path, measurement(step))
    whole = (tmp_path / STEPS_FILE).read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole) - 1):
        (tmp_path / STEPS_FILE).write_bytes(whole[:cut])
        assert read_steps(tmp_path) == [measurement(1)]
        append_step(tmp_path, measurement(2))
        assert read_steps(tmp_path) == [measurement(1), measurement(2)]


def test_nan_never_reaches_the_file(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        append_step(tmp_path, measurement(1, loss=float("nan")))
    assert read_steps(tmp_path) == []


def test_the_process_that_began_last_may_write(tmp_path):
    first = TrialWriterToken(tmp_path / "7")
    first.append_step(measurement(1), "a step")
    second = TrialWriterToken(tmp_path / "7")
    TrialWriterToken(tmp_path / "8").append_step(measurement(1), "a step")
    second.append_step(measurement(2), "a step")
    with pytest.raises(SupersededError, match=r"another process has taken over the trial in .*7"):
        first.append_step(measurement(3), "a step")
    assert read_steps(tmp_path / "7") == [measurement(1), measurement(2)]
