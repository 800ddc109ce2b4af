"""Refusal of a transfer without a value that it needs, with options that give every such value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.text import format_parameter
from gdpo_tune.results.transfer_recipe import FREE, OPTION, list_fitting_spaces
from gdpo_tune.results.transfer_values import (
    LIMIT,
    LONGEST,
    MICRO,
    MINI,
    NEEDS,
    PROMPT,
    RANK,
    RATE,
    STEPS,
    SUBJECTS,
    TOTAL,
    WantedValues,
    describe_conditions,
)
from gdpo_tune.spec.document import YamlMap
from gdpo_tune.spec.text import join_names, show, suggest

EXAMPLES = {STEPS: 100, TOTAL: 512, MICRO: 32, LONGEST: 512, LIMIT: 200, PROMPT: 512}
"""Key -> a value for a policy from the Hub, as `init` writes it."""


@dataclass(frozen=True)
class MissingValues:
    """Values that a transfer needs and that nobody gave."""

    message: str
    """Every key, the reasons, and options that give them values."""
    examples: Mapping[str, float | int]
    """Key -> value in those options."""

    def list_overrides(self) -> list[str]:
        """Return the options as overrides."""
        return [f"{key}={show(value)}" for key, value in self.examples.items()]


def find_missing_values(values: WantedValues, option: str, source: str) -> MissingValues | None:
    """Return the values that a transfer needs and that nobody gave; None if there are all.

    `option` and `source` name the candidate.
    """
    missing = [key for key in values.list_needs() if not values.has(key)]
    problems = [
        f"{key} = {format_value(values.get_searched(key))}: {NEEDS[key][1]}" for key in missing
    ]
    rank = values.recipe.spec.model.lora_rank if values.recipe else None
    if values.recipe and bool(values.get(RANK)) != bool(rank) and not values.is_set(RATE):
        missing = [RATE]
        trained = "adapters" if rank else "all weights"
        rate = format_value(values.recipe.params["learning_rate"])
        problems = [f"{RATE} = {rate}: {OPTION} {values.recipe.name} has it for {trained}"]
    examples = {key: _suggest_value(key, values) for key in missing}
    size, total = int(values.params["group_size"]), values.get(TOTAL)
    if TOTAL not in missing and isinstance(total, int) and total > 0 and total % size:
        unit = _find_batch_unit(values)
        near = sorted({max(1, total // unit) * unit, -(-total // unit) * unit})
        reason = f"group_size {size}, which carries over, does not divide it"
        problems.append(f"{TOTAL} = {total}: {reason}; {' or '.join(map(str, near))} would do")
        examples[TOTAL] = min(near, key=lambda count: abs(count - total))
    if not problems:
        return None
    asked = [key for keys in SUBJECTS.values() for key in keys if values.is_changed(key)]
    shown = ", ".join(f"{key} = {show(values.get(key))}" for key in asked)
    lines = [
        f"{option} {source}: the sweep measured on {describe_conditions(values.searched)}; values "
        f"of it do not carry over to {shown or 'this recipe'}",
        *problems,
        "fix: choose values, for example "
        + " ".join(f"--set {key}={show(value)}" for key, value in examples.items()),
    ]
    fitting = list_fitting_spaces(values.searched.task, str(values.get("policy")))
    if values.recipe is None and fitting:
        recipe = f"{OPTION} {fitting[0]}"
        lines.append(f"or: {recipe}, for its data, lengths, batch, learning rate and adapters")
    return MissingValues("\n    ".join(lines), examples)


def refuse_parameters(own: YamlMap, option: str, *, allowed: Sequence[str] = ()) -> None:
    """Refuse `--set space.` for parameters that come from the candidate.

    Raises:
        UsageError: with the reason.
    """
    if "space" not in own:
        return
    space = own["space"]
    if not allowed:
        raise UsageError(
            f"{option} takes the parameters of a trial, so --set space. has no effect\n"
            f"    fix: leave it out; only under another policy may {join_names(FREE)} be set"
        )
    for name in space if isinstance(space, YamlMap) else [show(space)]:
        if name not in allowed:
            raise UsageError(
                f"--set space.{name}: {option} takes it from the trial: what a sweep finds about "
                f"rewards carries over to another policy\n    fix: {suggest(name, allowed)}leave "
                f"it out; {join_names(allowed)} may be set"
            )


def format_value(value: object) -> str:
    """Return a value of a file or a parameter, in three digits, for a person."""
    return format_parameter(value) if isinstance(value, float) else show(value)


def _find_batch_unit(values: WantedValues) -> int:
    sizes = (values.params["group_size"], values.get(MINI))
    return math.lcm(*(size for size in sizes if isinstance(size, int) and size > 0))


def _suggest_value(key: str, values: WantedValues) -> float | int:
    if key == RATE:  # of the method's paper; ten times as high for adapters
        return 1e-5 if values.get(RANK) else 1e-6
    example = EXAMPLES[key] if values.is_changed("policy") else values.get_searched(key)
    if key == TOTAL:
        unit = _find_batch_unit(values)
        return -(-example // unit) * unit
    if key == MICRO and example:
        total = values.get(TOTAL) if values.has(TOTAL) else _suggest_value(TOTAL, values)
        batch = values.get(MINI) or total
        return math.gcd(example, batch) if isinstance(batch, int) else example
    longest, training = values.get(LONGEST), values.searched.training
    if key == LIMIT and values.has(LONGEST) and isinstance(longest, int):
        return max(1, round(training.length_limit / training.max_completion_length * longest))
    return example
