"""A spec as the YAML that loads to an equal one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from gdpo_tune.spec.domains import Choice, Domain, Fixed
from gdpo_tune.spec.sandbox_checks import UNUSED

if TYPE_CHECKING:
    from gdpo_tune.spec.model import SweepSpec

PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
RESERVED = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that some reader of YAML takes for something else."""


def dump_yaml(spec: SweepSpec) -> str:
    """The resolved file, every default written out that has an effect."""
    plain = spec.model_dump(mode="json")
    for name in UNUSED.get(spec.sandbox.type, {}):
        del plain["sandbox"][name]
    plain["constraints"] = {name: str(limit) for name, limit in spec.constraints.items()}
    # `reward_weights` and its like stay together, because a key may be written only once.
    grouped = sorted(spec.space.domains.items(), key=lambda item: item[0].rpartition(".")[0])
    plain["space"] = {name: notation(domain) for name, domain in grouped}
    plain["enqueue"] = spec.enqueue
    return "\n".join(line for key, value in plain.items() for line in block(key, value)) + "\n"


def without_password(uri: str) -> str:
    """`uri` as it may be shown."""
    # in the address of a database a password may hold a slash, and stand among the options
    uri = re.sub(r"(https?://[^/@:]*):[^@\s/]*@", r"\1:***@", uri)
    uri = re.sub(r"(?<!http)(?<!https)(://[^/@:]*):[^@\s]*@", r"\1:***@", uri)
    return re.sub(r"([?&](?:ssl)?password=)[^&\s]*", r"\1***", uri)


def shown_service(url: str) -> str:
    """Scheme, host and port of a service: all else may be what opens it."""
    return re.sub(r"^(\w+://)(?:[^/?#]*@)?([^/?#]*).*$", r"\1\2", url, flags=re.DOTALL)


def shown_yaml(spec: SweepSpec) -> str:
    """The resolved file as it may be shown: without what opens the doors at its addresses."""
    uri = without_password(spec.tracking.uri)
    tracking = spec.tracking.model_copy(update={"uri": uri})
    sandbox = replace(spec.sandbox, url=shown_service(spec.sandbox.url))
    shown = {
        "tracking": tracking,
        "sandbox": sandbox,
        "ledger": without_password(spec.ledger),
    }
    return dump_yaml(spec.model_copy(update=shown))


def block(key: str, value: object) -> Iterator[str]:
    """One top-level key: an entry a line."""
    if isinstance(value, Mapping) and value:
        yield f"{key}:"
        group = ""
        for name, child in cast("Mapping[str, object]", value).items():
            prefix, _, leaf = name.rpartition(".")
            if prefix and prefix != group:
                yield f"  {prefix}:"
            group = prefix
            yield f"  {'  ' if prefix else ''}{leaf}: {flow(child)}"
    elif isinstance(value, tuple) and value:
        yield f"{key}:"
        for child in cast("Sequence[object]", value):
            yield f"  - {flow(child)}"
    else:
        yield f"{key}: {flow(value)}"


def flow(value: object) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{key}: {flow(child)}" for key, child in entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(child) for child in cast("Sequence[object]", value)) + "]"
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in RESERVED
        return value if plain else json.dumps(value, ensure_ascii=False)
    text = json.dumps(value)
    # Readers of YAML 1.1 take 3e-05 for a word.
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def notation(domain: Domain) -> object:
    """A domain in the shortest form that the file allows."""
    when = {"when": {name: list(values) for name, values in domain.when.items()}}
    if isinstance(domain, Fixed):
        return {"value": domain.value, **when} if domain.when else domain.value
    if isinstance(domain, Choice):
        choices = list(domain.choices)
        return {"choices": choices, **when} if domain.when else choices
    written: dict[str, object] = {"log" if domain.log else "range": [domain.low, domain.high]}
    if domain.step is not None:
        written["step"] = domain.step
    return {**written, **when} if domain.when else written
