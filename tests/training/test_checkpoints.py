"""Checkpoints are complete or absent; the steps' file survives a crash and a resume."""

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
from gdpo_tune.training.checkpoints import MARKER, find_checkpoint, read_checkpoint
from gdpo_tune.training.step_reporter import TrialWriterToken


def fill(directory):
    (directory / "weights").write_bytes(b"w" * 1000)
    (directory / "inner").mkdir()
    (directory / "inner" / "state").write_bytes(b"s" * 10)


def write(directory, *steps, fill=fill):
    """Write checkpoints; return the path of the last one."""
    return [checkpoints.write_checkpoint(directory, step, Cost(), fill).path for step in steps][-1]


def find_newest(directory):
    newest = find_checkpoint(directory).newest
    assert newest == checkpoints.find_newest_checkpoint(directory)
    return newest


def list_names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(tmp_path):
    cost = Cost(completions=64, seconds=2.5, cpu_seconds=1.5)
    estimates = {"format": Estimate(0.5, 0.01)}
    written = checkpoints.write_checkpoint(tmp_path / "trial", 20, cost, fill, estimates)
    assert written.path == tmp_path / "trial" / "checkpoint-20" == find_newest(tmp_path / "trial")
    read = read_checkpoint(written.path)
    assert (read.step, read.cost, read.validation) == (20, cost, written.validation)
    assert read.validation == estimates
    assert (written.path / "inner" / "state").read_bytes() == b"s" * 10


def test_the_newest_checkpoint_is_that_of_most_steps(tmp_path):
    for directory in (tmp_path, tmp_path / "absent"):
        assert find_newest(directory) is None
        assert find_checkpoint(directory).describe_damage() == ""
    write(tmp_path, 100, 20, 3)
    assert find_newest(tmp_path) == tmp_path / "checkpoint-100"
    assert find_checkpoint(tmp_path).describe_damage() == ""


DAMAGES = [
    (lambda path: (path / MARKER).unlink(), r"incomplete \(complete.json is missing\)"),
    (
        lambda path: (path / MARKER).write_bytes((path / MARKER).read_bytes()[:-5]),
        r"incomplete \(complete.json: Unterminated string .*\)",
    ),
    (lambda path: (path / MARKER).write_text("[]"), r"incomplete \(complete.json: list .*\)"),
    (
        lambda path: (path / "weights").write_bytes(b"w" * 999),
        r"incomplete \(weights has 999 bytes instead of 1000\)",
    ),
    (lambda path: (path / "weights").unlink(), r"incomplete \(weights is missing\)"),
    (lambda path: shutil.rmtree(path / "inner"), r"incomplete \(state is missing\)"),
    (
        lambda path: (path / "weights").write_bytes(b"w" * 999 + b"v"),
        r"damaged \(weights has other content\)",
    ),
    (
        lambda path: (path / "inner" / "state").write_bytes(b"t" * 10),
        r"damaged \(inner/state has other content\)",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_checkpoint_is_skipped(tmp_path, damage, reason):
    older, newer = write(tmp_path, 20), write(tmp_path, 40)
    assert find_newest(tmp_path) == newer
    damage(newer)
    assert find_newest(tmp_path) == older
    with pytest.raises(TrialFailure, match=f"checkpoint-40 is {reason} in "):
        read_checkpoint(newer)
    note = find_checkpoint(tmp_path).describe_damage()
    expected = f"checkpoint-40 is {reason}: the trial resumes from checkpoint-20"
    assert re.fullmatch(expected, note)
    damage(older)
    assert find_newest(tmp_path) is None
    assert find_checkpoint(tmp_path).describe_damage().endswith(": the trial starts over")


def test_a_death_while_writing_leaves_the_older_checkpoint(tmp_path):
    older = write(tmp_path, 20)

    def dies(directory):
        fill(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 40, fill=dies)
    assert find_newest(tmp_path) == older
    again = write(tmp_path, 40)
    assert find_newest(tmp_path) == again


def test_writing_the_same_step_again_replaces_it(tmp_path):
    write(tmp_path, 20)
    other = (tmp_path, 20, Cost(2), lambda directory: (directory / "other").write_text("x"))
    checkpoints.write_checkpoint(*other)
    assert read_checkpoint(tmp_path / "checkpoint-20").cost == Cost(2)
    assert not (tmp_path / "checkpoint-20" / "weights").exists()


def test_a_digest_covers_both_ends_of_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_DIGESTED", 300)
    written = write(tmp_path, 20)
    for position, newest in ((0, None), (299, None), (700, None), (999, None), (500, written)):
        content = bytearray(b"w" * 1000)
        content[position] = 0
        (written / "weights").write_bytes(content)
        assert find_newest(tmp_path) == newest


@pytest.mark.parametrize(
    ("candidates", "damaged", "left"),
    [((), 80, (100, 60)), ((20, 40, 100, 120), 20, (100, 40, 80))],
)
def test_the_two_newest_complete_checkpoints_and_candidates_stay(
    tmp_path, candidates, damaged, left
):
    write(tmp_path, 20, 40, 60, 80, 100)
    (tmp_path / f"checkpoint-{damaged}" / "weights").unlink()
    (tmp_path / ".unfinished-30").mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    checkpoints.keep_newest(tmp_path, candidates)
    names = [*(f"checkpoint-{step}" for step in left), "checkpoint-notes"]
    assert list_names(tmp_path) == names


def test_a_checkpoint_that_only_may_become_a_candidate_loses_its_optimizer(tmp_path):
    def fill_both(directory):
        fill(directory)
        (directory / "optimizer.pt").write_bytes(b"moments")

    write(tmp_path, 20, 40, 60, fill=fill_both)
    checkpoints.keep_newest(tmp_path, (20,))
    assert not (tmp_path / "checkpoint-20" / "optimizer.pt").exists()
    assert read_checkpoint(tmp_path / "checkpoint-20").step == 20
    assert (tmp_path / "checkpoint-40" / "optimizer.pt").exists()
    for newer in (40, 60):
        (tmp_path / f"checkpoint-{newer}" / "weights").unlink()
    assert find_newest(tmp_path) is None, "from it, a training would go on with other moments"


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, r"[\d,]+ bytes free"), (errno.EDQUOT, "your quota is used up")],
)
def test_a_full_disk_is_reported_with_directory_and_reason(tmp_path, number, reason):
    older = write(tmp_path, 20)

    def full(directory):
        fill(directory)
        raise OSError(number, "no room")

    message = f"no space left for the checkpoint of step 40 in {tmp_path}: "
    with pytest.raises(DiskFullError, match=f"{re.escape(message)}(.*: |){reason}\n"):
        write(tmp_path, 40, fill=full)
    assert list_names(tmp_path) == ["checkpoint-20"], "makes room again"
    assert find_newest(tmp_path) == older


def test_all_checkpoints_can_be_removed(tmp_path):
    write(tmp_path, 20)
    (tmp_path / ".unfinished-30").mkdir()
    (tmp_path / "steps.jsonl").touch()
    for directory in (tmp_path, tmp_path / "absent"):
        checkpoints.remove_all_but(directory)
    assert list_names(tmp_path) == ["steps.jsonl"]


def test_modules_that_the_driver_needs_import_no_torch():
    code = (
        "import sys, gdpo_tune.training.checkpoints, gdpo_tune.core.trial_files;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def measurement(step: int, loss: float = 0.5) -> Measurement:
    return Measurement(step, {"train/loss": loss}, Cost(step * 64, step * 1.5, step * 1.0))


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path):
    assert read_steps(tmp_path / "trial") == []
    first = [measurement(step, loss=0.1) for step in (1, 2, 3, 4, 5)]
    again = [measurement(step, loss=0.2) for step in (3, 4)]
    for step in [*first, *again]:
        append_step(tmp_path / "trial", step)
    assert read_steps(tmp_path / "trial") == [*first[:2], *again]
    lines = (tmp_path / "trial" / STEPS_FILE).read_text().splitlines()
    assert len(lines) == 7, "only ever appended to"


def test_a_torn_line_loses_that_line_alone(tmp_path):
    for step in (1, 2):
        append_step(tmp_path, measurement(step))
    whole = (tmp_path / STEPS_FILE).read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole) - 1):
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
