"""Calls of other programs, which might never return."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from gdpo_tune.core.errors import BackendError, BackendUnreachableError

PROGRAM_SECONDS = 60.0
"""Longest time that a program may take."""
SURROUNDING = re.compile(
    r"SLURM_(?!(CONF|JWT|CLUSTERS)$)|SBATCH_(?!(ACCOUNT|CLUSTERS|PARTITION|QOS|RESERVATION)$)"
    r"|(SRUN|SALLOC|SQUEUE|SACCT|SCANCEL|PMI|PMIX|OMPI|RAY_JOB)_|RAY_ADDRESS$"
)
"""Variables of the job in which this command may run, and such as filter what programs show.
sbatch(1) passes on every `SLURM_*`, whatever `--export` is, and srun(1) takes them for options."""


@dataclass(frozen=True)
class ProgramAnswer:
    """Exit status and output of a program."""

    exit_status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Its error message in one line."""
        return " ".join((self.err.strip() or self.out.strip()).split())[:500] or "no reason given"

    def raise_unless_expected(
        self, backend: str, away: re.Pattern[str], expected: str = ""
    ) -> None:
        """Raise an error unless it is expected; `BackendUnreachableError` if it matches `away`."""
        if self.exit_status == 0 or (expected and expected in self.message.lower()):
            return
        if away.search(self.message):
            raise BackendUnreachableError(
                f"backend {backend} does not answer: {self.message}\n"
                "    fix: start it, or correct how this machine reaches it"
            )
        raise BackendError(f"backend {backend}: {self.message}")


def call_program(backend: str, words: Sequence[str], text: str = "") -> ProgramAnswer:
    """Call a program for a backend, with `text` as its standard input, and wait for its end.

    Raises:
        BackendError: it does not exist, or cannot be run.
        BackendUnreachableError: it does not end in time.
    """
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PROGRAM_SECONDS,
            check=False,
            env={name: os.environ[name] for name in os.environ if not SURROUNDING.match(name)},
        )
    except FileNotFoundError:
        raise BackendError(
            f"backend {backend}: there is no program {words[0]} here\n"
            "    fix: install it, or call this command on a machine that has it"
        ) from None
    except OSError as error:
        raise BackendError(
            f"backend {backend}: {words[0]} cannot be run ({error.strerror})\n"
            f"    fix: make {words[0]} on the PATH a program that can be run"
        ) from error
    except subprocess.TimeoutExpired:
        raise BackendUnreachableError(
            f"backend {backend}: {words[0]} gave no answer within {PROGRAM_SECONDS:g} s"
        ) from None
    return ProgramAnswer(done.returncode, done.stdout, done.stderr)
