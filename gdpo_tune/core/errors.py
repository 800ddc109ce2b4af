"""One tree of errors. Each survives pickling, because Ray carries errors between processes.

GdpoTuneError                 anything that this package raises on purpose
|- UsageError                 the request is wrong: exit status 2, before any work starts
|  |- SpecError               the YAML file or a --set override, with every problem at once
|  |- TaskFileError           `task: file.py:Class` that cannot be used
|  |- PolicyError             a policy that cannot be loaded or trained
|  |- DataError               a data set that cannot be had, read or used
|  |- ResourcesError          more CPUs or GPUs asked for than the machine or cluster has
|  |- EngineError             vLLM is to sample completions, and cannot
|  |- LedgerHeldError         another process writes to this sweep's ledger
|  |- PickError               words for a choice that cannot be read or carried out
|  |- ExportError             settings that another library would change or ignore
|  |- IdentityError           another sweep lives under the same name
|  |- StoreError              a storage that cannot be read, written, or kept free of doubles
|  |- BackendError            a job that a backend does not take
|  |- ClusterError            a Ray cluster that cannot be joined from here
|  `- TrackingError           `tracking.required: true` and the server does not answer
|- TrialFailure               this trial ends, with a reason that lands in the ledger
|  `- NonFiniteError          NaN or inf in a loss, a gradient norm or a reward
|- SupersededError            this process was taken for dead, and another one does its work
|- LedgerUnreachableError     the database of the ledger does not answer: the same command goes on
|- StoreUnreachableError      an object store does not answer: the same command goes on
|- FolderLostError            the sweep's folder is gone: the same command goes on
|- DiskFullError              no space left: the sweep ends, and goes on once there is room
|- BackendUnreachableError    a backend does not answer: the same call may succeed later
|- ClusterLostError           Ray's servers died or did not start: the same command goes on
|- SandboxUnavailable         no isolation on this machine: fail closed
`- SandboxInfraError          the sandbox itself broke, repeatedly: never a zero reward
"""

from __future__ import annotations

from dataclasses import dataclass


class GdpoTuneError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_status = 1


class UsageError(GdpoTuneError):
    """The request cannot be carried out as asked; nothing was started."""

    exit_status = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a sweep file: where, what, why, and what to do instead."""

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
    """Every problem of a sweep file, together."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the sweep specification"
        return "\n".join([head, *(str(problem) for problem in self.problems)])


class TaskFileError(UsageError):
    """A task's file cannot be read or run, or its class is no task."""


class PolicyError(UsageError):
    """A policy that cannot be found, read or trained."""


class DataError(UsageError):
    """A data set that cannot be had, read or used."""


class ResourcesError(UsageError):
    """More CPUs or GPUs a trial than the machine or cluster has."""


class EngineError(UsageError):
    """vLLM is not installed, not of a supported version, or not for this machine."""


class LedgerHeldError(UsageError):
    """Another live process holds the lease of this sweep's ledger."""


class IdentityError(UsageError):
    """A sweep with another task, policy, space, objectives or training lives under this name."""


class PickError(UsageError):
    """A choice among trials that cannot be read, or that nothing fits."""

    def __init__(self, text: str, position: int, reason: str, fix: str) -> None:
        """
        Args:
            text: the choice as it was typed.
            position: of the first character that is wrong, from 1.
            reason: why.
            fix: what to do instead.
        """
        super().__init__(text, position, reason, fix)
        self.text, self.position, self.reason, self.fix = text, position, reason, fix

    def __str__(self) -> str:
        return (
            f"choice {self.text!r}, position {self.position}: {self.reason}\n"
            f"    {self.text}\n    {' ' * (self.position - 1)}^\n    fix: {self.fix}"
        )


class ExportError(UsageError):
    """What a library cannot do as it was trained here, every reason together."""

    def __init__(self, library: str, problems: tuple[Problem, ...]) -> None:
        super().__init__(library, problems)
        self.library = library
        self.problems = problems

    def __str__(self) -> str:
        head = f"{self.library} cannot repeat this training"
        return "\n".join([head, *(str(problem) for problem in self.problems)])


class TrackingError(UsageError):
    """The tracking server does not answer although the spec requires it."""


class StoreError(UsageError):
    """Sweeps, or the history of a schedule, cannot be kept where the file says."""


class BackendError(UsageError):
    """A backend answers, and does not take the job."""


class ClusterError(UsageError):
    """A Ray cluster that cannot be joined, or on which the sweep could not be kept."""


class BackendUnreachableError(GdpoTuneError):
    """A backend does not answer; nothing was lost, and the same call may succeed later."""

    exit_status = 6


class TrialFailure(GdpoTuneError):
    """This trial cannot go on; its message is the reason that the ledger keeps."""


class NonFiniteError(TrialFailure):
    """NaN or inf where training needs a number; the message names the quantity and the step."""


class DiskFullError(GdpoTuneError):
    """Nothing can be written any more; what is on disk is whole, and the same command goes on."""


class SupersededError(GdpoTuneError):
    """Another process has gone on with a trial meanwhile; this one writes nothing more."""


class FolderLostError(GdpoTuneError):
    """The sweep's folder went away, as a mount does, and did not come back."""


class LedgerUnreachableError(GdpoTuneError):
    """The database of the ledger does not answer; what is recorded stays."""


class StoreUnreachableError(GdpoTuneError):
    """An object store does not answer any more; what is there stays."""

    def __init__(self, address: str, told: str, seconds: int) -> None:
        """
        Args:
            address: what was asked for.
            told: the last answer, or what came instead of one.
            seconds: for which it was asked again.
        """
        super().__init__(address, told, seconds)
        self.address, self.told, self.seconds = address, told, seconds

    @property
    def what(self) -> str:
        """What is wrong, without what follows from it."""
        return f"{self.address} has not answered for {self.seconds} s ({self.told})"

    def __str__(self) -> str:
        return f"{self.what}; what trials have recorded is kept, and the same command goes on"


class ClusterLostError(GdpoTuneError):
    """Nothing can be placed any more; what is recorded stays, and the same command goes on."""


class SandboxUnavailable(GdpoTuneError):
    """This machine offers no sufficient isolation, so no candidate code is run."""

    exit_status = 2


class SandboxInfraError(GdpoTuneError):
    """The sandbox failed repeatedly for reasons of its own, so no verdict exists."""
