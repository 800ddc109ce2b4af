"""What a disk that takes no more has run out of, and `steps.jsonl` while it grows."""

import errno
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune.core.errors import DiskFullError
from gdpo_tune.core.files import explain_full_disk, explain_no_space
from gdpo_tune.core.trial_files import (
    COMPLETIONS_FILE,
    CUT,
    LONGEST_TEXT,
    MARKER,
    MOST_POINTS,
    STEPS_FILE,
    Completion,
    StepsReader,
    append_step,
    is_kept,
    iterate_whole_checkpoints,
    read_steps,
    shorten_completion,
    write_completions,
)
from gdpo_tune.core.trials import Cost, Measurement


@pytest.mark.parametrize(
    ("code", "inodes", "reason"),
    [
        (errno.ENOSPC, (0, 0), "2,147,393,536 bytes free"),  # btrfs counts no inodes
        (errno.ENOSPC, (1000, 5), "2,147,393,536 bytes free"),
        (errno.ENOSPC, (1000, 0), "no inode is free"),
        (errno.EDQUOT, (1000, 0), "your quota is used up"),
        (errno.EFBIG, (1000, 5), "a file would be larger than a limit allows"),
    ],
)
def test_the_reason_is_that_of_the_error(code, inodes, reason, monkeypatch):
    """longhorn#4508, vsc_user_docs#660; errno(3), setrlimit(2) and statvfs(3)."""
    total, free = inodes
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=total, f_favail=free))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2_147_393_536))
    assert explain_no_space(Path("/a"), OSError(code, os.strerror(code)))[0].startswith(reason)


def fail_on_purpose():
    try:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    except OSError as error:
        raise RuntimeError("cannot serialize") from error


def fail_while_cleaning_up():
    try:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    finally:
        raise RuntimeError("cannot serialize")


@pytest.mark.parametrize("write", [fail_on_purpose, fail_while_cleaning_up])
def test_the_cause_below_an_error_of_a_library_counts(tmp_path, write):
    with (
        pytest.raises(DiskFullError, match=r"a policy .*quota is used up\n.* the last whole"),
        explain_full_disk(tmp_path, "a policy"),
    ):
        write()


def test_a_reader_follows_a_file_that_grows_and_reads_nothing_twice(tmp_path, monkeypatch):
    reader, path = StepsReader(tmp_path), tmp_path / STEPS_FILE
    assert reader.read() == []
    append_step(tmp_path, Measurement(1, {"train/loss": 0.5}, Cost()))
    assert [step.step for step in reader.read()] == [1]
    with monkeypatch.context() as unreadable:
        unreadable.setattr(type(tmp_path), "open", None)
        assert [step.step for step in reader.read()] == [1]
    append_step(tmp_path, Measurement(2, {"train/loss": 0.4}, Cost()))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # the writer is in the middle of its line
    assert [step.step for step in reader.read()] == [1]
    path.write_bytes(whole)
    assert reader.read() == read_steps(tmp_path)
    append_step(tmp_path, Measurement(1, {"train/loss": 0.3}, Cost()))  # a later attempt
    assert [step.metrics["train/loss"] for step in reader.read()] == [0.3]
    path.unlink()
    assert reader.read() == []


@given(st.integers(1, 5000))
def test_a_long_curve_is_thinned_evenly(last):
    kept = [step for step in range(1, last + 1) if is_kept(step, last)]
    assert kept[-1] == last
    assert min(last, MOST_POINTS / 2) <= len(kept) <= MOST_POINTS
    assert last > MOST_POINTS or len(kept) == last
    assert len({after - step for step, after in itertools.pairwise([0, *kept[:-1]])}) <= 1


def test_whole_checkpoints_are_found_with_the_one_of_most_steps_first():
    marker = json.dumps({"files": {"model": {"size": 5}}}).encode()
    steps = {9: 5, 10: 5, 200: 4, 3: 5}  # of step 200 a part is there
    sizes = {f"checkpoint-{step}/model": size for step, size in steps.items()}
    sizes |= {f"checkpoint-{step}/{MARKER}": len(marker) for step in (9, 10, 200)}
    found = iterate_whole_checkpoints(sizes, lambda _: marker)
    assert list(found) == ["checkpoint-10", "checkpoint-9"]
    assert list(iterate_whole_checkpoints(sizes, lambda _: b"{")) == []


def test_a_step_begins_a_line_of_its_own_and_completions_stay_readable(tmp_path):
    file = tmp_path / STEPS_FILE
    for step in (1, 2):
        append_step(tmp_path, Measurement(step, {}, Cost()))
    file.write_bytes(file.read_bytes()[:-9])  # the writer was killed in its line
    append_step(tmp_path, Measurement(3, {}, Cost()))
    first, _, last = file.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (first, last)] == [1, 3]
    write_completions(tmp_path, [Completion("É?", "ü", {})])
    assert '"É?"' in (tmp_path / COMPLETIONS_FILE).read_text(encoding="utf-8")


def test_a_text_is_cut_once_it_is_longer_than_the_limit():
    whole = "x" * LONGEST_TEXT
    kept = shorten_completion(whole, whole, {}, {"answer": whole})
    assert (kept.prompt, kept.completion) == (whole, whole)
    cut = shorten_completion(f"a{whole}", f"{whole}z", {}, {"answer": f"{whole}z"})
    assert (cut.prompt, cut.completion) == (f"{CUT}{whole}", f"{whole}{CUT}")
    assert kept.columns == cut.columns == {"answer": whole}
