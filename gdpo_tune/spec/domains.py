"""What one parameter may be: fixed, a range, or one of several choices."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict

from gdpo_tune.core.trials import Params, ParamValue

Number = int | float

GRID_TOLERANCE = 1e-9
"""Share of a step within which a float counts as lying on the grid."""


class Condition(BaseModel):
    """What the three kinds of domain have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    when: dict[str, tuple[ParamValue, ...]] = {}
    """Parameter -> values under which this one has an effect; empty: always."""

    def holds(self, known: Params) -> bool:
        """Whether every condition is met; a parameter absent from `known` meets none."""
        return not self.when or all(
            name in known and is_one_of(known[name], values) for name, values in self.when.items()
        )


class Fixed(Condition):
    """The same value in every trial."""

    value: ParamValue

    def contains(self, value: ParamValue) -> bool:
        """Whether a trial may have `value`."""
        return is_one_of(value, (self.value,))

    def values(self) -> tuple[ParamValue, ...] | None:
        """Every value that a trial may have."""
        return (self.value,)

    def middle(self) -> ParamValue:
        """A typical value."""
        return self.value


class Choice(Condition):
    """One of a few values, without an order."""

    choices: tuple[ParamValue, ...]

    def contains(self, value: ParamValue) -> bool:
        """Whether a trial may have `value`."""
        return is_one_of(value, self.choices)

    def values(self) -> tuple[ParamValue, ...] | None:
        """Every value that a trial may have."""
        return self.choices

    def middle(self) -> ParamValue:
        """A typical value: the one half-way down the list."""
        return self.choices[(len(self.choices) - 1) // 2]


class Uniform(Condition):
    """A range, both ends included; uniform in the value, or in its logarithm."""

    low: Number
    high: Number
    log: bool = False
    step: Number | None = None
    """Distance between two values; None: 1 for integers, continuous for floats."""
    integer: bool = False

    def contains(self, value: ParamValue) -> bool:
        """Whether a trial may have `value`."""
        if isinstance(value, bool | str) or not self.low <= value <= self.high:
            return False
        if self.integer and value != int(value):
            return False
        return self.step is None or on_grid(value - self.low, self.step)

    def values(self) -> tuple[ParamValue, ...] | None:
        """Every value that a trial may have; None for a continuous range."""
        if self.integer:
            return tuple(range(int(self.low), int(self.high) + 1, int(self.step or 1)))
        if self.step is None:
            return None
        count = round((self.high - self.low) / self.step) + 1
        return tuple(self.low + index * self.step for index in range(count))

    def middle(self) -> ParamValue:
        """A typical value: half-way on the range's own scale, on its grid."""
        if self.log:
            centre = math.sqrt(self.low * self.high)
        elif self.step is not None:
            centre = self.low + self.step * ((self.high - self.low) // self.step // 2)
        else:
            centre = (self.low + self.high) / 2
        return round(centre) if self.integer else centre


Domain = Fixed | Uniform | Choice


def is_one_of(value: ParamValue, values: tuple[ParamValue, ...]) -> bool:
    """Membership that tells `true` from 1, which Python does not."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
    )


def on_grid(distance: Number, step: Number) -> bool:
    """Whether `distance` is a whole number of steps, up to float rounding."""
    steps = distance / step
    return abs(steps - round(steps)) <= GRID_TOLERANCE * max(1.0, abs(steps))
