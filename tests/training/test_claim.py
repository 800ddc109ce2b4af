"""Who writes a trial's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core.errors import SupersededError
from gdpo_tune.training.claim import Claim


def test_whoever_began_last_may_write(tmp_path: Path):
    first = Claim(tmp_path / "7")
    first.check()
    second = Claim(tmp_path / "7")
    Claim(tmp_path / "8").check()
    second.check()
    with pytest.raises(SupersededError, match=r"another process goes on with what is in .*7"):
        first.check()
