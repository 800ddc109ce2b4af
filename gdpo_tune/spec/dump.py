"""A spec as the YAML that loads to an equal one."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from gdpo_tune.spec.domains import Choice, Domain, Fixed
from gdpo_tune.trials import ParamValue

if TYPE_CHECKING:
    from gdpo_tune.spec.model import SweepSpec


def dump_yaml(spec: SweepSpec) -> str:
    """The resolved file, every default written out."""
    plain = spec.model_dump(mode="json")
    plain["constraints"] = {name: str(limit) for name, limit in spec.constraints.items()}
    plain["space"] = nested({n: domain_notation(d) for n, d in spec.space.domains.items()})
    plain["enqueue"] = [nested(point) for point in spec.enqueue]
    stream = io.StringIO()
    dumper().dump(plain, stream)
    return stream.getvalue()


def dumper() -> Any:
    """Innermost mappings and lists on one line, keys in our order."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 100
    return yaml


def domain_notation(domain: Domain) -> object:
    """A domain in the shortest notation that the file allows."""
    when = {"when": {name: list(values) for name, values in domain.when.items()}}
    if isinstance(domain, Fixed):
        return {"value": domain.value, **when} if domain.when else domain.value
    if isinstance(domain, Choice):
        choices = list(domain.choices)
        return {"choices": choices, **when} if domain.when else choices
    notation: dict[str, object] = {"log" if domain.log else "range": [domain.low, domain.high]}
    if domain.step is not None:
        notation["step"] = domain.step
    return {**notation, **when} if domain.when else notation


def nested(flat: Mapping[str, object] | Mapping[str, ParamValue]) -> dict[str, object]:
    """Dotted names as nested mappings."""
    result: dict[str, object] = {}
    groups: dict[str, dict[str, object]] = {}
    for name, value in flat.items():
        group, _, leaf = name.rpartition(".")
        if not group:
            result[leaf] = value
            continue
        groups.setdefault(group, {})[leaf] = value
        result[group] = groups[group]
    return result
