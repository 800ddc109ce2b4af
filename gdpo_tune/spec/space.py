"""The search space: every parameter of the task with its domain, and what hangs on what."""

from __future__ import annotations

from functools import cached_property
from graphlib import TopologicalSorter

from pydantic import BaseModel, ConfigDict

from gdpo_tune.core.parameters import FAMILIES, PARAMETERS, ParameterInfo
from gdpo_tune.core.trials import Params, ParamValue
from gdpo_tune.spec.domains import Choice, Domain, Uniform


class Space(BaseModel):
    """Domains by dotted parameter name.

    Every parameter of the task is present, in the registry's order, so that files which say the
    same have the same dimensions; what the file does not name is fixed at its default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    domains: dict[str, Domain]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Every name, each after the parameters that its `when` names.

        Raises:
            graphlib.CycleError: the conditions go in a circle (a loaded file never does).
        """
        waits_for = {name: tuple(domain.when) for name, domain in self.domains.items()}
        return tuple(TopologicalSorter(waits_for).static_order())

    @cached_property
    def searched(self) -> dict[str, Choice | Uniform]:
        """Domains that are really searched: those with more than one value, in dependency order."""
        domains = ((name, self.domains[name]) for name in self.order if name not in self.fixed)
        return {name: domain for name, domain in domains if isinstance(domain, Choice | Uniform)}

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of `searched`."""
        return tuple(self.searched)

    @cached_property
    def fixed(self) -> dict[str, ParamValue]:
        """Values of parameters that have one alone."""
        found = {name: only_value(domain) for name, domain in self.domains.items()}
        return {name: value for name, value in found.items() if value is not None}

    @cached_property
    def later_defaults(self) -> dict[str, ParamValue]:
        """Defaults of parameters that did not exist when the first sweeps were run.

        A trial of such a sweep was trained as if it had had them.
        """
        infos = {name: parameter_info(name) for name in self.domains}
        return {name: info.default for name, info in infos.items() if info.added_later}

    @cached_property
    def says_nothing(self) -> frozenset[str]:
        """Names that could be left out: added later, and never anything but their default."""
        return frozenset(
            name for name, default in self.later_defaults.items() if self.fixed.get(name) == default
        )

    def active(self, params: Params) -> dict[str, Domain]:
        """Domains that have an effect given what `params` has chosen so far.

        Args:
            params: values of searched parameters; fixed ones need not be given.

        Returns:
            Name -> domain in dependency order. A parameter is left out while one that its `when`
            names is not chosen yet, is inactive itself, or has another value.
        """
        known: dict[str, ParamValue] = {}
        result: dict[str, Domain] = {}
        for name in self.order:
            domain = self.domains[name]
            if not domain.holds(known):
                continue
            result[name] = domain
            value = params.get(name, self.fixed.get(name))
            if value is not None:
                known[name] = value
        return result

    def complete(self, params: Params) -> dict[str, ParamValue]:
        """Every parameter of the task, as training wants it.

        Args:
            params: a value for every searched parameter that is active; others are ignored.

        Returns:
            `params` where active, the only value where there is one, and the parameter's default
            where it is inactive, so that equal trials have equal parameters.

        Raises:
            KeyError: an active, searched parameter has no value.
        """
        active = self.active(params)
        result: dict[str, ParamValue] = {}
        for name in self.domains:
            value = params.get(name, self.fixed.get(name))
            if name not in active:
                value = parameter_info(name).default
            if value is None:
                raise KeyError(f"no value for {name}, which is active")
            result[name] = value
        return result

    def baseline(self, params: Params) -> dict[str, ParamValue]:
        """A complete setting around `params`, which may lie outside of the domains.

        A parameter that is not given has its default if the domain holds it, else the domain's
        middle, so that a published setting is trained with a learning rate that fits the policy.
        """
        chosen = dict(params)
        for name in self.order:
            domain = self.active(chosen).get(name)
            if name in chosen or domain is None:
                continue
            default = parameter_info(name).default
            chosen[name] = default if domain.contains(default) else domain.middle()
        return self.complete(chosen)

    def reachable(self, name: str) -> tuple[ParamValue, ...] | None:
        """Values that a trial can have, the default included where `name` can be inactive.

        None stands for a continuous range.
        """
        values = self.domains[name].values()
        default = parameter_info(name).default
        if values is None or not self.can_be_inactive(name) or default in values:
            return values
        return (*values, default)

    def can_be_inactive(self, name: str) -> bool:
        """Whether some choice of the other parameters leaves `name` without effect."""
        for parent, wanted in self.domains[name].when.items():
            values = self.domains[parent].values()
            if values is None or not set(values) <= set(wanted) or self.can_be_inactive(parent):
                return True
        return False


def only_value(domain: Domain) -> ParamValue | None:
    """The value of a domain that has one alone, else None."""
    if domain.values() is None:
        return None
    values = domain.values() or ()
    return values[0] if len(values) == 1 else None


def parameter_info(name: str) -> ParameterInfo:
    """What the registry says of a dotted parameter name, whatever the task."""
    family, dot, _ = name.partition(".")
    return FAMILIES[family] if dot else PARAMETERS[name]
