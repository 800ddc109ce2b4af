"""The search space: the domain of every parameter of the task, and the conditions between them."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cached_property
from graphlib import TopologicalSorter

from pydantic import BaseModel, ConfigDict

from gdpo_tune.core.parameters import FAMILIES, PARAMETERS, ParameterInfo
from gdpo_tune.core.text import show
from gdpo_tune.core.trials import Params, ParamValue
from gdpo_tune.core.trl_fields import TRL_FIELDS

Number = int | float

GRID_TOLERANCE = 1e-9
"""Share of a step within which a float counts as lying on the grid."""


class ConditionalDomain(BaseModel):
    """Base of the three kinds of domain."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    when: dict[str, tuple[ParamValue, ...]] = {}
    """Parameter -> values under which this one has an effect; empty: always."""

    def holds(self, chosen_values: Params) -> bool:
        """Return whether every condition is met; a parameter without a value meets none."""
        return not self.when or all(
            name in chosen_values and is_one_of(chosen_values[name], values)
            for name, values in self.when.items()
        )

    def list_values(self) -> tuple[ParamValue, ...] | None:
        """Return every value that a trial may have; None for a continuous range."""
        return None

    def contains(self, value: ParamValue) -> bool:
        """Return whether a trial may have `value`."""
        return is_one_of(value, self.list_values() or ())

    def align(self, value: ParamValue) -> ParamValue:
        """Return the value itself: only a grid of floats has its own."""
        return value

    def find_middle(self) -> ParamValue:
        """Return a typical value: of a list, the one half-way down."""
        values = self.list_values() or ()
        return values[(len(values) - 1) // 2]


class Fixed(ConditionalDomain):
    """One value, equal in every trial."""

    value: ParamValue

    def list_values(self) -> tuple[ParamValue, ...] | None:
        """Return the value."""
        return (self.value,)


class Choices(ConditionalDomain):
    """One of a few values, without an order."""

    choices: tuple[ParamValue, ...]

    def list_values(self) -> tuple[ParamValue, ...] | None:
        """Return the choices."""
        return self.choices


class Uniform(ConditionalDomain):
    """A range, both ends included; uniform in the value, or in its logarithm."""

    low: Number
    high: Number
    log: bool = False
    step: Number | None = None
    """Distance between two values; None: 1 for integers, continuous for floats."""
    integer: bool = False

    def contains(self, value: ParamValue) -> bool:
        """Return whether `value` lies in the range, and on its grid."""
        value = self.align(value)
        if isinstance(value, bool | str) or not self.low <= value <= self.high:
            return False
        if self.integer and value != int(value):
            return False
        return self.step is None or is_on_grid(value - self.low, self.step)

    def list_values(self) -> tuple[ParamValue, ...] | None:
        """Return every value on the grid; None without one."""
        if self.integer:
            return tuple(range(int(self.low), int(self.high) + 1, int(self.step or 1)))
        return tuple(min(value, self.high) for value in self.grid) or None

    @cached_property
    def grid(self) -> tuple[float, ...]:
        """Grid of floats, or empty; the last one passes `high` if `step` was rounded up.

        They are computed with decimals, as a file has them: in floats, 0.1 + 2 * 0.1 is not 0.3.
        """
        if self.step is None or self.integer:
            return ()
        first, width = Fraction(repr(self.low)), Fraction(repr(self.step))
        scale = math.lcm(first.denominator, width.denominator)
        start, distance = int(first * scale), int(width * scale)
        count = round((self.high - self.low) / self.step) + 1
        return tuple((start + index * distance) / scale for index in range(count))

    def align(self, value: ParamValue) -> ParamValue:
        """Return the grid point that `value` equals up to float rounding, else `value`."""
        if isinstance(value, bool | str) or self.step is None or not self.grid:
            return value
        steps = (value - self.low) / self.step
        index = round(steps) if math.isfinite(steps) else -1
        is_close = 0 <= index < len(self.grid) and is_on_grid(value - self.low, self.step)
        return min(self.grid[index], self.high) if is_close else value

    def find_middle(self) -> ParamValue:
        """Return a typical value: half-way on the range's own scale, on its grid."""
        if self.step is not None:
            return super().find_middle()
        centre = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return round(centre) if self.integer else centre

    def find_place(self, value: float) -> float:
        """Return where `value` lies on the range's own scale, from 0 to 1; an end if outside."""
        low, high, value = float(self.low), float(self.high), min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


Domain = Fixed | Uniform | Choices


def is_one_of(value: ParamValue, values: tuple[ParamValue, ...]) -> bool:
    """Return whether a value is among others; `true` is not 1, unlike in Python."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
    )


def is_on_grid(distance: Number, step: Number) -> bool:
    """Return whether `distance` is a whole number of steps, up to float rounding."""
    steps = distance / step
    return abs(steps - round(steps)) <= GRID_TOLERANCE * max(1.0, abs(steps))


class Space(BaseModel):
    """Domains by dotted parameter name: every parameter of the task, in the registry's order.

    A parameter that the file does not name is fixed at its default; TRL's are left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    domains: dict[str, Domain]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Every name, each after the parameters that its `when` names."""
        waits_for = {name: tuple(domain.when) for name, domain in self.domains.items()}
        return tuple(TopologicalSorter(waits_for).static_order())

    @cached_property
    def searched_domains(self) -> dict[str, Choices | Uniform]:
        """Domains with more than one value, in dependency order."""
        domains = (
            (name, self.domains[name]) for name in self.order if name not in self.fixed_values
        )
        return {name: domain for name, domain in domains if isinstance(domain, Choices | Uniform)}

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of `searched_domains`."""
        return tuple(self.searched_domains)

    @cached_property
    def fixed_values(self) -> dict[str, ParamValue]:
        """Values of parameters that have only one."""
        values = {name: domain.list_values() for name, domain in self.domains.items()}
        return {name: only[0] for name, only in values.items() if only and len(only) == 1}

    def select_active(self, params: Params) -> dict[str, Domain]:
        """Return the domains that have an effect under these values, in dependency order.

        A parameter is left out while one that its `when` names is not chosen yet, is inactive
        itself, or has another value. Values of fixed parameters are optional.
        """
        chosen_values: dict[str, ParamValue] = {}
        result: dict[str, Domain] = {}
        for name in self.order:
            domain = self.domains[name]
            if not domain.holds(chosen_values):
                continue
            result[name] = domain
            value = params.get(name, self.fixed_values.get(name))
            if value is not None:
                chosen_values[name] = value
        return result

    def drop_inactive(self, params: Params) -> dict[str, ParamValue]:
        """Return the parameters without those of the space that have no effect under the others."""
        active = self.select_active(params)
        return {n: value for n, value in params.items() if n in active or n not in self.domains}

    def align(self, params: Params) -> dict[str, ParamValue]:
        """Return parameters with the values of their grids, see `ConditionalDomain.align`."""
        domains = self.domains
        return {n: domains[n].align(v) if n in domains else v for n, v in params.items()}

    def complete(self, params: Params) -> dict[str, ParamValue]:
        """Return all parameters, inactive ones at their default: equal trials have equal ones.

        An active, searched parameter without a value raises a `KeyError`.
        """
        params = self.align(params)
        active = self.select_active(params)
        result: dict[str, ParamValue] = {}
        for name in self.domains:
            value = params.get(name, self.fixed_values.get(name))
            if name not in active:
                value = get_parameter_info(name).default
            if value is None:
                raise KeyError(f"no value for {name}, which is active")
            result[name] = value
        return result

    def complete_baseline(self, params: Params) -> dict[str, ParamValue]:
        """Return a complete setting around `params`, which may lie outside of the domains.

        Any other parameter has its default if the domain holds it, else the domain's middle, so
        that a published setting is trained with a learning rate that fits the policy.
        """
        chosen, active = dict(params), dict[str, ParamValue]()
        for name in self.order:
            domain = self.domains[name]
            if not domain.holds(active):
                continue
            if name not in chosen:
                default = get_parameter_info(name).default
                chosen[name] = default if domain.contains(default) else domain.find_middle()
            active[name] = chosen[name]
        return self.complete(chosen)

    def list_reachable(self, name: str) -> tuple[ParamValue, ...] | None:
        """Return the values that a trial can have, inactive ones too; None: a continuous range."""
        values = self.domains[name].list_values()
        default = get_parameter_info(name).default
        if values is None or not self.can_be_inactive(name) or default in values:
            return values
        return (*values, default)

    def can_be_inactive(self, name: str) -> bool:
        """Return whether some choice of the other parameters leaves `name` without effect."""
        for parent, wanted in self.domains[name].when.items():
            values = self.domains[parent].list_values()
            if values is None or not set(values) <= set(wanted) or self.can_be_inactive(parent):
                return True
        return False


def get_parameter_info(name: str) -> ParameterInfo:
    """Return the registry's entry of a dotted parameter name, whatever the task."""
    family, dot, _ = name.partition(".")
    return TRL_FIELDS.get(name) or (FAMILIES[family] if dot else PARAMETERS[name])


def convert_to_notation(domain: Domain) -> object:
    """Return a domain in the shortest form that the file allows."""
    when = {"when": {name: list(values) for name, values in domain.when.items()}}
    if isinstance(domain, Fixed):
        return {"value": domain.value, **when} if domain.when else domain.value
    if isinstance(domain, Choices):
        choices = list(domain.choices)
        return {"choices": choices, **when} if domain.when else choices
    data: dict[str, object] = {"log" if domain.log else "range": [domain.low, domain.high]}
    if domain.step is not None:
        data["step"] = domain.step
    return {**data, **when} if domain.when else data


def format_domain(domain: Domain) -> str:
    """Return a domain in the file's notation, without its conditions."""
    return show(convert_to_notation(domain.model_copy(update={"when": {}})))
