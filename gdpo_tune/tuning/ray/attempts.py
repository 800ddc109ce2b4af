"""How often a trial may be tried: what it fails of by itself counts, what its machines do does not.

Pure: no Ray in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RETRIES = 2
"""Further attempts after failures of a trial's own, each from its newest checkpoint."""
LOSSES = 5
"""Nodes that a trial may lose in a row without a result in between: it might be what kills them."""


@dataclass
class Account:
    """What has befallen a trial so far."""

    own: int = 0
    """Attempts that failed by themselves."""
    lost: int = 0
    """Nodes lost in a row, without a result in between."""
    died_on: str = ""
    """Node on which its process died last; the node may turn out to have died with it."""
    died_at: float = 0.0


@dataclass
class Accounts:
    """The accounts of all trials under way, by Ray's id of a trial."""

    retries: int = RETRIES
    losses: int = LOSSES
    soon: float = 60.0
    """Seconds within which a node's death explains that of a process on it."""
    _known: dict[str, Account] = field(default_factory=dict[str, Account])

    def failed(self, trial: str) -> bool:
        """An attempt failed by itself; return whether there may be another one."""
        account = self._of(trial)
        account.own += 1
        return account.own <= self.retries

    def died(self, trial: str, node: str, now: float) -> bool:
        """The same where all that is known is that its process died, on a node."""
        account = self._of(trial)
        account.died_on, account.died_at = node, now
        return self.failed(trial)

    def lost(self, trial: str) -> bool:
        """A trial lost its node, or that one the store; return whether there may be another
        attempt."""
        account = self._of(trial)
        account.lost += 1
        return account.lost <= self.losses

    def excuse(self, node: str, now: float) -> list[str]:
        """A node turns out to have died: of processes that died there, that was no fault of theirs.

        Returns:
            Their trials.
        """
        excused: list[str] = []
        for trial, account in self._known.items():
            if account.died_on == node and now - account.died_at <= self.soon:
                account.own -= 1
                account.lost += 1
                account.died_on = ""
                excused.append(trial)
        return excused

    def progressed(self, trial: str) -> None:
        """A trial has reported something."""
        if trial in self._known:
            self._known[trial].lost = 0

    def close(self, trial: str) -> None:
        """A trial has ended."""
        self._known.pop(trial, None)

    def _of(self, trial: str) -> Account:
        return self._known.setdefault(trial, Account())
