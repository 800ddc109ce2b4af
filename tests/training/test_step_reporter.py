"""The token that decides which process writes a trial's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core.errors import SupersededError
from gdpo_tune.training.step_reporter import TrialWriterToken


def test_the_process_that_began_last_may_write(tmp_path: Path):
    first = TrialWriterToken(tmp_path / "7")
    first.check()
    second = TrialWriterToken(tmp_path / "7")
    TrialWriterToken(tmp_path / "8").check()
    second.check()
    with pytest.raises(SupersededError, match=r"another process has taken over the trial in .*7"):
        first.check()
