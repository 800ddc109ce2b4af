"""Reading of a YAML file and `--set` overrides as a `SweepSpec`, with every problem at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import SpecError, SpecProblem, UsageError
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.parameters import PARAMETERS, list_parameters
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.core.text import join_names, show, suggest
from gdpo_tune.core.trials import Params, ParamValue
from gdpo_tune.core.trl_fields import TRL_FIELDS
from gdpo_tune.spec import checks, document
from gdpo_tune.spec.checks import Finding
from gdpo_tune.spec.model import TRACKING_VARIABLES, SweepSpec
from gdpo_tune.spec.read_space import SpaceReader, explain_bad_value
from gdpo_tune.spec.sections import read_section
from gdpo_tune.spec.space import Fixed, Space, format_domain, get_parameter_info

REQUIRED = {
    "objectives": "{correctness: {direction: maximize, reference: 0}}",
    "space": "{group_size: [4, 8]}",
}
"""Key that every sweep needs, besides its task -> an example."""


def load_spec(
    path: Path | str,
    overrides: Sequence[str] = (),
    name: str | None = None,
    *,
    to_run: bool = True,
    needs: list[SpecProblem] | None = None,
) -> SweepSpec:
    """Read, merge and validate a sweep file and the files that it `extends:`.

    `overrides` are `key=value` with dotted keys and YAML values; later ones win. `name` replaces
    the name in the file. `to_run` also checks what training needs: data, packages and the sweeps
    of `search.warm_start`. Where another machine will train, `needs` takes the data and packages
    that this one lacks, which are no errors then.

    Raises:
        SpecError: the file or an override has problems; each with its line, value, reason and fix.
    """
    path = Path(path)
    problems = document.Problems(document.Place(str(path), 1))
    data = problems.root = document.read_document(path, overrides, name, problems)
    written = document.resolve_paths(data, path) if path.name == SPEC else dict[str, str]()
    _read_variables(data)
    problems.refuse_unusable()
    for key, example in REQUIRED.items():
        if key not in data:
            problems.refuse(key, "missing", f"add {key}: {example}")
    weighted = document.get_map(document.get_map(data, "space"), "reward_weights")
    task = checks.check_task(data.get("task"), weighted, problems)
    parameters = (PARAMETERS if task is None else list_parameters(task)) | TRL_FIELDS
    optional = [f"reward_weights.{name}" for name in (task.optional_rewards if task else ())]
    reader = SpaceReader(parameters, problems, optional, knows_task=task is not None)
    space = reader.read_space(data.get("space", {}))
    parsed = {
        "name": checks.check_name(data.get("name", path.stem), problems),
        "task": data["task"] if task is not None else "unknown",
        "policy": data.get("policy", task.embedded if task is not None else "unknown"),
        "space": space,
        "enqueue": reader.read_enqueue(data.get("enqueue", ()), space, task),
    }
    spec = read_section(SweepSpec, document.YamlMap({**data, **parsed}, data.marks), problems)
    assert spec is not None, "every key that is not parsed above has a default"
    _refuse_all(checks.check_spec(spec, task, to_run=to_run), problems)
    if needs is not None:
        problems.raise_if_any()
    if to_run:
        _refuse_all(checks.list_needs(spec), problems)
    if needs is None:
        problems.raise_if_any()
    else:
        needs += problems.list_sorted()
    uri = document.expand_address(spec.tracking.uri)
    tracking = spec.tracking.replace(experiment=spec.tracking.experiment or spec.name, uri=uri)
    for key in TRACKING_VARIABLES:
        mark, value = problems.find(("tracking", key))
        if value is not document.ABSENT:
            tracking.origins[key] = str(mark)
    spec = spec.replace(tracking=tracking)
    spec.set_written(written)
    return spec


def _read_variables(root: document.YamlMap) -> None:
    """Add MLflow's variables to a document that does not have the keys of `tracking`.

    The file of a sweep has a variable's address without its password, which is added again. In
    `resources.env` values become their texts: neither 9.0 nor 007 is a number.
    """
    env = document.get_map(document.get_map(root, "resources"), "env")
    if isinstance(env, document.YamlMap):
        for name, value in env.items():
            if value is not None and not isinstance(value, document.YamlMap | document.YamlList):
                env[name] = env.marks[name].text or value
    for key, variable in TRACKING_VARIABLES.items():
        value, mark = os.environ.get(variable), document.Place(variable)
        written = document.get_map(root, "tracking").get(key, document.ABSENT)
        if value and (written is document.ABSENT or value != written == redact_passwords(value)):
            if "tracking" not in root:
                root.put("tracking", document.YamlMap(), mark)
            if isinstance(root["tracking"], document.YamlMap):
                root["tracking"].put(key, value, mark)


def keep_recorded_tracking(spec: SweepSpec) -> SweepSpec:
    """Return `spec` with the tracking that its sweep began with, as far as its file has none.

    MLflow's variables may have changed since then: a note on stderr says so.
    """
    try:
        recorded = load_spec(spec.directory / SPEC, name=spec.name, to_run=False).tracking
    except SpecError:  # the sweep begins now, or another version wrote the file
        return spec
    kept: dict[str, str] = {}
    for key, variable in TRACKING_VARIABLES.items():
        origin, before = spec.tracking.origins.get(key, "default"), getattr(recorded, key)
        if origin in ("default", variable) and before != (now := getattr(spec.tracking, key)):
            kept[key], spec.tracking.origins[key] = before, recorded.origins.get(key, SPEC)
            text = f"{spec.name} keeps tracking.{key} = {before}, as it began, not {now} ({origin})"
            print(f"note: {redact_passwords(text)}; --set changes that", file=sys.stderr)
    return spec.replace(tracking=spec.tracking.replace(**kept))


def _refuse_all(findings: Iterable[Finding], problems: document.Problems) -> None:
    for key, reason, fix, inputs, value, instead in findings:
        named = instead if instead and not problems.has_key(key) else key
        problems.refuse(named, reason, fix, *inputs, value=value)


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
    base = base or {}
    point = {n: v for n, v in base.items() if n in spec.space.select_active(base)} | changes
    active = spec.space.select_active(point)
    for name in changes:
        domain = spec.space.domains[name]
        known = all(p in point or p in spec.space.fixed_values for p in domain.when)
        if name not in active and known:
            raise UsageError(f"{name} has no effect here: it needs {show(domain.when)}")
    point = {name: value for name, value in point.items() if name in active or name in changes}
    fixed = {name: Fixed(value=value) for name, value in point.items()}
    asked = spec.replace(space=Space(domains={**spec.space.domains, **fixed}))
    for prefix, check in (
        ("group_size", checks.check_group_sizes),
        ("reward_weights.", checks.check_weights),
    ):
        for finding in check(asked) if any(name.startswith(prefix) for name in point) else ():
            raise UsageError(f"{finding.reason}; {finding.fix}")
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
