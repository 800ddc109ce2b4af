"""Programs of others that a backend calls: kubectl, sbatch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from gdpo_tune.core.errors import BackendError, BackendUnreachableError

ANSWER_SECONDS = 60.0
"""How long a program may take."""


@dataclass(frozen=True)
class Answer:
    """How a program ended, and what it said."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it said of an error, in one line."""
        return " ".join((self.err.strip() or self.out.strip()).split())[:500] or "no reason given"


def call(backend: str, words: Sequence[str], text: str = "") -> Answer:
    """Call a program and wait for its end.

    Args:
        backend: on whose behalf.
        words: the program and its arguments.
        text: its standard input.

    Raises:
        BackendError: there is no such program, or it cannot be run.
        BackendUnreachableError: it does not come to an end.
    """
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise BackendError(
            f"backend {backend}: there is no program {words[0]} here\n"
            f"    fix: install it, or call this command where it is"
        ) from None
    except OSError as error:
        raise BackendError(
            f"backend {backend}: {words[0]} cannot be run ({error.strerror})\n"
            f"    fix: mend the program {words[0]} on the PATH"
        ) from error
    except subprocess.TimeoutExpired:
        raise BackendUnreachableError(
            f"backend {backend}: {words[0]} gave no answer within {ANSWER_SECONDS:g} s"
        ) from None
    return Answer(done.returncode, done.stdout, done.stderr)
