"""Errors by which an attempt at a trial ends for reasons that lie where it ran.

Ray counts a process that was taken away as no attempt, and gives its trial another one. So what is
not the trial's failure calls itself the loss of a process that was taken away.
"""

from __future__ import annotations

from ray.exceptions import RayActorError

from gdpo_tune.core.errors import StoreUnreachableError

NODE_DIED = "its node has died"
"""In the message of Ray's error, which has no type of its own, for a process lost that way."""


class ActorWornOut(RayActorError):
    """This process has grown too large: the trial wants a fresh one."""

    def __init__(self) -> None:
        super().__init__(error_msg="the process has grown too large", preempted=True)


class StoreAwayError(RayActorError):
    """A node does not reach the store."""

    def __init__(self, error: StoreUnreachableError) -> None:
        super().__init__(error_msg=str(error), preempted=True)
        self.error = error

    def __reduce__(self) -> tuple[type[StoreAwayError], tuple[StoreUnreachableError]]:
        return type(self), (self.error,)


class NodeLostError(RayActorError):
    """A process of a trial was lost with its node."""

    def __init__(self) -> None:
        super().__init__(error_msg="the node of one of the trial's processes died", preempted=True)


class WorkerDiedError(Exception):
    """One of the processes of a trial ended without a word: an attempt, which counts."""
