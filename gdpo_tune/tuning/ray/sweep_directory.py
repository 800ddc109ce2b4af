"""The sweep's directory, which may go away where it is a mount: trials do not fail because of it.

A lost mount leaves an empty directory behind, in which a trial could continue without anybody ever
seeing its files again. So the directory counts as there only while the sweep's spec is in it.
"""

from __future__ import annotations

import os

from gdpo_tune.core.errors import DirectoryLostError
from gdpo_tune.core.outages import PATIENCE, build_retrying
from gdpo_tune.tuning.ray.messages import Setup


def has_directory(setup: Setup) -> bool:
    """Return whether this process can write to the sweep's directory, if the sweep has one."""
    try:
        return bool(setup.address) or (
            setup.spec_file.exists() and os.access(setup.spec_file.parent, os.W_OK)
        )
    except OSError:  # of a mount whose server is gone
        return False


def wait_for_directory(setup: Setup) -> str:
    """Wait until the directory is there again; return what has happened, for a person.

    Raises:
        DirectoryLostError: it stays away.
    """
    from tenacity import RetryError, retry_if_result

    retrying = build_retrying(PATIENCE, retry=retry_if_result(lambda there: not there))
    try:
        retrying(has_directory, setup)
    except RetryError:
        raise DirectoryLostError(
            f"{setup.spec_file.parent} is gone, or cannot be written to, since {PATIENCE:g} s\n"
            "    fix: mount it again and give the same command again, which goes on from "
            "the last whole checkpoints"
        ) from None
    waited = retrying.statistics["idle_for"]
    return f"the sweep's directory was away; waited {waited:.0f} s for it"
