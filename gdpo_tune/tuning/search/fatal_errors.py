"""Errors that end a sweep, because no record can be written any more."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gdpo_tune.core.errors import (
    DirectoryLostError,
    DiskFullError,
    LedgerHeldError,
    LedgerUnreachableError,
    StoreError,
    StoreUnreachableError,
)
from gdpo_tune.core.files import explain_full_disk

FATAL_ERRORS = (
    DirectoryLostError,
    DiskFullError,
    LedgerUnreachableError,
    LedgerHeldError,
    StoreError,
    StoreUnreachableError,
)


@contextmanager
def explain_lost_directory(directory: Path) -> Generator[None]:
    """Turn a failure to write to the ledger's directory into one of `FATAL_ERRORS`.

    Raises:
        DiskFullError: no space is left there.
        DirectoryLostError: it is gone, or cannot be written to any more.
    """
    try:
        with explain_full_disk(directory, "the ledger"):
            yield
    except OSError as error:
        raise DirectoryLostError(
            f"the ledger in {directory} cannot be written to ({error.strerror or error}); what is "
            "recorded is kept. Once the directory is back, run the same command to resume"
        ) from error
