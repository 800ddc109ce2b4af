"""What may stop a trial before its end: the settings of each scheduler, by its type."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from gdpo_tune.spec.base import Finite, Section

TOLERANCE = 1e-9
"""Keeps a share of 0.2 at five parts."""


class FifoSettings(Section):
    """First in, first out: no trial is stopped early."""

    type: Literal["fifo"] = "fifo"
    """One of the schedulers below."""


class AshaSettings(Section):
    """Asynchronous successive halving by dominance: most trials end early."""

    type: Literal["asha"] = "asha"
    """One of the schedulers below."""
    reduction_factor: Annotated[Finite, Ge(1.01)] = 3.0
    """At each rung, one of so many trials goes on, and all on the front of that rung. Rungs lie at
    the budget divided by it once, twice, and so on."""
    grace: Annotated[Finite, Ge(0), Lt(1)] = 0.3
    """Share of a trial's budget before which it is compared with no other."""
    variant: Literal["stop", "promote"] = "stop"
    """What happens to a trial that does not go on: `stop` ends it; `promote` lets it wait, without
    a process, until it is among the best after all."""

    def levels(self, steps: int) -> tuple[int, ...]:
        """Steps at which trials are compared, of a trial with so many: before its end."""
        found: set[int] = set()
        level = steps / self.reduction_factor
        while math.ceil(level) >= self.grace * steps:
            found.add(math.ceil(level))
            if level <= 1:
                break
            level /= self.reduction_factor
        return tuple(sorted(found - {steps}))

    def highest(self, steps: int) -> int:
        """The last step at which trials would be compared, were it not for their grace."""
        return math.ceil(steps / self.reduction_factor)


class PbtSettings(Section):
    """Population-based training by dominance: weights and learning rate move while trials train."""

    type: Literal["pbt"] = "pbt"
    """One of the schedulers below."""
    interval: Annotated[Finite, Ge(0.001), Lt(1)] = 0.2
    """Share of a trial's steps after which all members meet, again and again. Each runs up to the
    meeting, in turns where slots are fewer, and goes on once all are there."""
    quantile: Annotated[Finite, Gt(0), Le(0.5)] = 0.25
    """Share of the members, one at least, that take over the training of one of as many that come
    first: by constraints, dominance, and distance to others in their front."""
    factors: Annotated[tuple[Annotated[Finite, Gt(0)], ...], Field(min_length=1, strict=False)] = (
        0.8,
        1.25,
    )
    """Who takes over multiplies each value that it gets by one of these, inside of its domain."""
    resample: Annotated[Finite, Ge(0), Le(1)] = 0.25
    """Probability with which it draws the value anew from its domain instead."""

    def meetings(self, steps: int) -> tuple[int, ...]:
        """Steps at which members meet, of a trial with so many."""
        count = math.ceil(1 / self.interval - TOLERANCE) - 1
        places = {round(turn * self.interval * steps) for turn in range(1, count + 1)}
        return tuple(sorted(places - {0, steps}))


SchedulerSettings = FifoSettings | AshaSettings | PbtSettings
SCHEDULERS: dict[str, type[SchedulerSettings]] = {
    "fifo": FifoSettings,
    "asha": AshaSettings,
    "pbt": PbtSettings,
}
"""Type -> its settings."""
