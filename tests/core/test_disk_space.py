"""What a disk that takes no more has run out of."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdpo_tune.core.errors import DiskFullError
from gdpo_tune.core.files import explain_full_disk, explain_no_space


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


def write_through_a_library() -> None:
    try:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    except OSError as error:
        raise RuntimeError("cannot serialize") from error


def test_the_cause_below_an_error_of_a_library_counts(tmp_path: Path):
    with (
        pytest.raises(DiskFullError, match=r"a policy .*quota is used up\n.* the last whole"),
        explain_full_disk(tmp_path, "a policy"),
    ):
        write_through_a_library()
