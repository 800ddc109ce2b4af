"""Failed attempts at one trial, and how many of each cause it may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gdpo_tune.tuning.ray.messages import Cause

RETRIES = 2
"""Further attempts after failures of a trial's own, each from its newest checkpoint."""
LOSSES = 5
"""Nodes that a trial may lose in a row without a result in between: it might be their killer. The
same number of times it may find its GPU crowded."""
DEATHS = 2
"""Deaths of shared processes, without progress in between, after which a trial is tried alone: only
then a death tells whose fault it is."""
EXCUSE_SECONDS = 60.0
"""Seconds after the death of a process within which the death of its node explains it."""


@dataclass
class TrialHistory:
    """Failed attempts at one trial that has not ended, and where it runs."""

    failed: int = 0
    """Attempts that failed by themselves."""
    lost: int = 0
    """Nodes lost, stores out of reach and GPUs crowded in a row, without a result in between."""
    host_deaths: int = 0
    """Shared processes that died with it, without progress in between."""
    step: int = 0
    """Last step that it has reported."""
    step_at_death: int = 0
    """That step when its shared process died last."""
    node: str = ""
    """Node on which it runs; empty between two attempts."""
    host: str = ""
    """Shared process in which it runs; empty without one."""
    moving: bool = False
    """True if it has lost its node and has no other yet."""
    cut_from: str = ""
    """Node to whose process the connection was lost: the node may be lost, too."""
    died_on: str = ""
    """Node on which its process died last; the node may turn out to have died with it."""
    died_at: float = 0.0
    died_shared: bool = False
    """True if it shared that process with others."""
    given_up: Any = None
    """Ray's trial, if it is given up and has not ended yet."""

    def count(self, cause: Cause, node: str, now: float) -> bool:
        """Count the end of an attempt on a node; return whether there may be another attempt."""
        if cause in ("lost", "store", "crowded"):
            self.lost += 1
            return self.lost <= LOSSES
        if cause in ("died", "host"):
            self.died_on, self.died_at, self.died_shared = node, now, cause == "host"
        if cause == "host":
            self.host_deaths += 1
            self.step_at_death = self.step
            return True
        self.failed += 1
        return self.failed <= RETRIES

    def note_step(self, step: int, checkpoint_every: int) -> None:
        """Take note of a measurement; a step beyond those that died before is progress."""
        self.lost, self.step = 0, step
        if step > self.step_at_death + checkpoint_every:
            self.host_deaths = 0

    def reclassify_as_node_loss(self, node: str, now: float) -> bool:
        """Return whether a dead process was on this node, which has died too; count it as lost."""
        excused = self.died_on == node and now - self.died_at <= EXCUSE_SECONDS
        if excused:
            if self.died_shared:
                self.host_deaths -= 1
            else:
                self.failed -= 1
            self.lost += 1
            self.died_on = ""
        return excused
