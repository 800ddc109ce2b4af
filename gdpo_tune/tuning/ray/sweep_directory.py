"""The sweep's directory, which may go away where it is a mount: trials do not fail because of it.

A lost mount leaves an empty directory behind, in which a trial could continue without anybody ever
seeing its files again. So the directory counts as there only while the sweep's spec is in it.
"""

from __future__ import annotations

import os

from gdpo_tune.core.errors import FolderLostError
from gdpo_tune.core.outages import PATIENCE, build_retrying
from gdpo_tune.tuning.ray.messages import DirectoryAwayError, Setup


class SweepDirectory:
    """The directory of a sweep, as this process sees it; always there on an object store."""

    def __init__(self, setup: Setup) -> None:
        self._spec_file = None if setup.address else setup.spec_file
        self._path = setup.spec_file.parent

    def is_there(self) -> bool:
        """Return whether the directory can be written to, and is the one that it was."""
        try:
            return not self._spec_file or (
                self._spec_file.exists() and os.access(self._path, os.W_OK)
            )
        except OSError:  # of a mount whose server is gone
            return False

    def check(self) -> None:
        """Refuse to go on beside a directory that is away.

        Raises:
            DirectoryAwayError: it is.
        """
        if not self.is_there():
            raise DirectoryAwayError(f"{self._path} is away")

    def wait(self) -> str:
        """Wait until it is there again; return what has happened, for a person.

        Raises:
            FolderLostError: it stays away.
        """
        from tenacity import RetryError, retry_if_result

        retrying = build_retrying(PATIENCE, retry=retry_if_result(lambda there: not there))
        try:
            retrying(self.is_there)
        except RetryError:
            raise FolderLostError(
                f"{self._path} is gone, or cannot be written to, since {PATIENCE:g} s\n"
                "    fix: mount it again and give the same command again, which goes on from "
                "the last whole checkpoints"
            ) from None
        waited = retrying.statistics["idle_for"]
        return f"the sweep's folder was away; waited {waited:.0f} s for it"
