"""The sweep's folder, which goes away where it is a mount: what trials then fail of is not theirs.

What a lost mount leaves behind is an empty folder, in which a trial could go on and whose contents
nobody would ever see again. So the folder is there only as long as a file of the driver's is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.core.errors import FolderLostError
from gdpo_tune.core.outages import PATIENCE, attempts


class FolderAwayError(Exception):
    """The sweep's folder was away, and has come back. Not a failure of the trial."""


@dataclass(frozen=True)
class Folder:
    """The folder of a sweep, as seen from this process."""

    mark: Path
    """A file in it that is there from the start to the end."""

    def is_there(self) -> bool:
        """Whether the folder can be written to, and is the one that it was."""
        try:
            return self.mark.exists() and os.access(self.mark.parent, os.W_OK)
        except OSError:  # of a mount whose server is gone
            return False

    def check(self) -> None:
        """
        Raises:
            FolderAwayError: it is away.
        """
        if not self.is_there():
            raise FolderAwayError(f"{self.mark.parent} is away")

    def wait(self) -> str:
        """Wait until it is there again; return what has happened, for a person.

        Raises:
            FolderLostError: it stays away.
        """
        for waited in attempts(PATIENCE):
            if self.is_there():
                return f"the sweep's folder was away; waited {waited:.0f} s for it"
        raise FolderLostError(
            f"{self.mark.parent} is gone, or cannot be written to, since {PATIENCE:g} s\n"
            "    fix: mount it again and give the same command again, which goes on from "
            "the last whole checkpoints"
        )
