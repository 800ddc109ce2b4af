"""One tree of errors. Each can be pickled, because Ray sends errors between processes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of a command; after a signal it is 128 and the signal's number."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    """The request was wrong, and no work was started."""
    SKIPPED = 3
    """A scheduled run did not start, because another one is active."""
    BUDGET_SPENT = 4
    """A scheduled run did not start, because the GPU-hours of 30 days are spent."""
    STOPPED = 5
    """A scheduled run was stopped by a person, by `max_runtime` or for another run."""
    UNREACHABLE = 6
    """A backend does not answer."""
    NO_SIGNAL = 7
    """No training had a signal."""
    INTERRUPTED = 130
    """By Ctrl-C."""
    PIPE_CLOSED = 141
    """The reader of the output has ended."""


class GdpoTuneError(Exception):
    """Base class of every error that this package raises on purpose."""

    exit_status = ExitCode.FAILED


class UsageError(GdpoTuneError):
    """A request that cannot be carried out; no work was started."""

    exit_status = ExitCode.REFUSED


@dataclass(frozen=True)
class SpecProblem:
    """One mistake in a sweep file: where, what, why, and what to write instead."""

    where: str
    """`file:line`, or the `--set` override as it was typed."""
    key: str
    """Dotted key, such as `space.group_size`; empty for the file as a whole."""
    value: str
    """The offending value as a reader would type it; empty if there is none."""
    reason: str
    fix: str

    def __str__(self) -> str:
        subject = self.key + (f" = {self.value}" if self.value else "")
        head = f"{self.where}: {subject}: " if subject else f"{self.where}: "
        return f"{head}{self.reason}\n    fix: {self.fix}"


class SpecError(UsageError):
    """Every problem of a sweep file and of `--set` overrides, together."""

    def __init__(self, problems: tuple[SpecProblem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the sweep specification"
        return "\n".join([head, *(str(problem) for problem in self.problems)])


class TaskFileError(UsageError):
    """A task's file that cannot be read or run, or whose class is no task."""


class PolicyError(UsageError):
    """A policy that cannot be found, read or trained."""


class DataError(UsageError):
    """A data set that cannot be read or used."""


class ResourcesError(UsageError):
    """More CPUs or GPUs for a trial than the machine or cluster has."""


class EngineError(UsageError):
    """A vLLM that is missing, of an unsupported version, or not for this machine."""


class EngineDiedError(GdpoTuneError):
    """A vLLM that stopped working during a trial; another attempt may succeed."""


class EngineMemoryError(GdpoTuneError):
    """A vLLM that was closed and still holds memory; another process can continue."""


class CrowdedGpuError(GdpoTuneError):
    """Too little memory on a GPU because other processes hold it; another attempt may succeed."""


class LedgerHeldError(UsageError):
    """A live process that holds the lease of this sweep's ledger."""


class NoLocksError(UsageError):
    """A disk without file locks, on which a second writer could not be kept out."""


class IdentityError(UsageError):
    """A sweep of this name with another task, policy, space, objectives or training."""


class PickError(UsageError):
    """A choice of a trial that cannot be parsed, or that no trial fits.

    `position` is that of the mistake in the typed `text`, counted from 1.
    """

    def __init__(self, text: str, position: int, reason: str, fix: str) -> None:
        super().__init__(text, position, reason, fix)
        self.text, self.position, self.reason, self.fix = text, position, reason, fix

    def __str__(self) -> str:
        return (
            f"choice {self.text!r}, position {self.position}: {self.reason}\n"
            f"    {self.text}\n    {' ' * (self.position - 1)}^\n    fix: {self.fix}"
        )


class ExportError(UsageError):
    """Every setting of a training that a library cannot repeat."""

    def __init__(self, library: str, problems: tuple[SpecProblem, ...]) -> None:
        super().__init__(library, problems)
        self.library = library
        self.problems = problems

    def __str__(self) -> str:
        head = f"{self.library} cannot repeat this training"
        return "\n".join([head, *(str(problem) for problem in self.problems)])


class TrackingError(UsageError):
    """A tracking server that does not answer although the spec requires it."""


class StoreError(UsageError):
    """A storage that cannot keep sweeps or the history of a schedule."""


class BackendError(UsageError):
    """A job that a backend refuses."""


class ClusterError(UsageError):
    """A Ray cluster that cannot be joined, or on which the sweep could not be kept."""


class BackendUnreachableError(GdpoTuneError):
    """A backend that does not answer; nothing was lost, and the same call may succeed later."""

    exit_status = ExitCode.UNREACHABLE


class HubError(GdpoTuneError):
    """A Hub that refuses or no longer answers during an upload; run the command to continue."""


class TrialFailure(GdpoTuneError):
    """The end of a trial; the ledger records the message as its reason."""


class NonFiniteError(TrialFailure):
    """NaN or inf where training needs a number; the message names the quantity and the step."""


class NoSignalError(TrialFailure):
    """A training whose rewards are equal in every group, so that nothing is learnt from them."""

    exit_status = ExitCode.NO_SIGNAL


NO_SIGNAL = "no signal: "
"""Beginning of the message of a `NoSignalError`, by which the record of a trial is recognised."""


class DiskFullError(GdpoTuneError):
    """A full disk; every file on it is whole. Make room and run the command to resume."""


class SupersededError(GdpoTuneError):
    """A trial that another process has taken over; this one writes nothing more."""


class DirectoryLostError(GdpoTuneError):
    """A sweep directory that is gone, as after a lost mount; run the command later to resume."""


class StoreUnreachableError(GdpoTuneError):
    """An object store that no longer answers; its objects are kept: run the command to resume.

    `answer` is the last answer or error of a call that was repeated for some `seconds`.
    """

    def __init__(self, address: str, answer: str, seconds: int) -> None:
        super().__init__(address, answer, seconds)
        self.address, self.answer, self.seconds = address, answer, seconds

    @property
    def summary(self) -> str:
        """The failure without its consequences."""
        return f"{self.address} has not answered for {self.seconds} s ({self.answer})"

    def __str__(self) -> str:
        kept = "the records of trials are kept: run the same command to resume"
        return f"{self.summary}; {kept}"


class ClusterLostError(GdpoTuneError):
    """Loss of Ray's servers; every record is kept: run the command to resume."""


class SandboxUnavailable(GdpoTuneError):
    """A machine without sufficient isolation, so no candidate code is run (fail closed)."""

    exit_status = ExitCode.REFUSED


class SandboxInfraError(GdpoTuneError):
    """A sandbox that itself failed repeatedly: there is no verdict, and never a zero reward."""


def get_first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message, or the error's type if it has none."""
    message = (isinstance(error, OSError) and error.strerror) or str(error)
    return (message.strip().splitlines() or [type(error).__name__])[0]
