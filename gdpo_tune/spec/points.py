"""A configuration that a person adds to a running sweep, checked as a file's `enqueue:` is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import Params, ParamValue
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.notation import explain_bad_value, format_domain
from gdpo_tune.spec.parse_space import check_weights
from gdpo_tune.spec.problems import Problems, SourceMark, join_names, show, suggest
from gdpo_tune.spec.space import Fixed, Space, get_parameter_info
from gdpo_tune.spec.training_section import check_group_sizes


def read_point(
    spec: SweepSpec, values: Mapping[str, Any], base: Params | None = None, *, force: bool = False
) -> Params:
    """Return the parameters of a configuration, some of which may be missing.

    `base` are those of an earlier trial, which `values` change. `force` allows values outside of
    the space that a training can have all the same.

    Raises:
        UsageError: a name or value that no trial of this sweep can have, or one without effect.
    """
    read = {name: _read_value(spec.space, name, value) for name, value in values.items()}
    changes = spec.space.align(read)
    for name, value in changes.items():
        domain = spec.space.domains[name]
        if not force and not domain.contains(value):
            text = format_domain(domain)
            allowed = (
                f"one of {text.strip('[]')}" if text[0] == "[" else f"within {text.strip('{}')}"
            )
            if isinstance(domain, Fixed):
                allowed = f"{show(domain.value)}, as in every trial"
            raise UsageError(
                f"{name} = {show(value)} is outside of the space: it has to be {allowed}; "
                "--force trains it all the same"
            )
    before = base or {}
    point = {n: v for n, v in before.items() if n in spec.space.select_active(before)} | changes
    active = spec.space.select_active(point)
    for name in changes:
        domain = spec.space.domains[name]
        known = all(p in point or p in spec.space.fixed_values for p in domain.when)
        if name not in active and known:
            raise UsageError(f"{name} has no effect here: it needs {show(domain.when)}")
    point = {name: value for name, value in point.items() if name in active or name in changes}
    fixed = {name: Fixed(value=value) for name, value in point.items()}
    space = Space(domains={**spec.space.domains, **fixed})
    problems = Problems(SourceMark(""))
    if "group_size" in point:
        check_group_sizes(space, spec.training, problems)
    if any(name.startswith("reward_weights.") for name in point):
        check_weights(space, problems)
    for problem in problems.list_sorted():
        raise UsageError(f"{problem.reason}; {problem.fix}")
    return point


def _read_value(space: Space, name: str, value: Any) -> ParamValue:
    if name not in space.domains:
        guess = suggest(name, space.domains)
        listed = join_names(space.dimensions)
        raise UsageError(f"{name}: unknown parameter; {guess}this sweep searches {listed}")
    info = get_parameter_info(name)
    is_listed = space.domains[name].contains(value) if isinstance(value, str | bool) else False
    complaint = None if is_listed else explain_bad_value(value, info)
    if complaint is not None:
        raise UsageError(f"{name} = {show(value)}: {'; '.join(complaint)}")
    return float(value) if info.kind == "float" else value
