"""What may stop a trial before its end: the settings of each scheduler, by its type."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from gdpo_tune.spec.base import Finite, Section


class FifoSettings(Section):
    """First in, first out: no trial is stopped early."""

    type: Literal["fifo"] = "fifo"
    """One of the schedulers below."""


class AshaSettings(Section):
    """Asynchronous successive halving by dominance: most trials end early."""

    type: Literal["asha"] = "asha"
    """One of the schedulers below."""
    reduction_factor: Annotated[Finite, Gt(1)] = 3.0
    """At each rung, one of so many trials goes on, and all on the front of that rung. Rungs lie at
    the budget divided by it once, twice, and so on."""
    grace: Annotated[Finite, Ge(0), Lt(1)] = 0.1
    """Share of a trial's budget before which it is compared with no other."""
    variant: Literal["stop", "promote"] = "stop"
    """What happens to a trial that does not go on: `stop` ends it; `promote` lets it wait, without
    a process, until it is among the best after all."""


SchedulerSettings = FifoSettings | AshaSettings
SCHEDULERS: dict[str, type[SchedulerSettings]] = {"fifo": FifoSettings, "asha": AshaSettings}
"""Type -> its settings."""
