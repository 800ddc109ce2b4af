"""Which process writes a trial's folder: the one that began last.

A machine that was taken for dead, because it was stopped or cut off, may wake up in the middle of a
step of a trial that has gone on elsewhere since. What it then wrote would supersede newer steps,
and take the newer process's unfinished checkpoint away. Light: importing this needs no torch.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from gdpo_tune.core.errors import SupersededError
from gdpo_tune.core.files import room_in, write_whole

WRITER = "writer"
"""File of a trial's folder that names it."""


class Claim:
    """The right to write a trial's folder, which whoever claims it next takes away."""

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: the trial's; created if missing.

        Raises:
            DiskFullError: there is no room for the claim.
        """
        self._file = directory / WRITER
        self._name = uuid.uuid4().hex
        with room_in(directory, "the start of the trial"):
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, self._name)

    def check(self) -> None:
        """
        Raises:
            SupersededError: another process has begun since.
        """
        if self._file.read_text() != self._name:
            raise SupersededError(f"another process goes on with what is in {self._file.parent}")
