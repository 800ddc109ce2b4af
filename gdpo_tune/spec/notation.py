"""Notation of a domain, such as `3`, `[1, 2]` or `{log: [1, 2]}`, and of the resolved file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from gdpo_tune.core.parameters import ParameterInfo
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.problems import (
    KeyPath,
    Problems,
    UnreadableNodeError,
    format_flow,
    join_names,
    show,
    suggest,
)
from gdpo_tune.spec.space import Choices, Domain, Fixed, Number, Uniform, is_on_grid, is_one_of

SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127
"""Smallest number with all its digits in a 32-bit float, and the largest such float."""
MOST_VALUES = 100_000
"""Most values of a finite domain: some functions list them."""
KINDS = ("range", "log", "choices", "value")
PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
RESERVED = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that some parser of YAML reads as another value."""
SYNTAX = "write 3 (fixed), [1, 2] (choices), {range: [1, 2]} or {log: [1, 2]}"


def get_mapping(data: object) -> Mapping[str, object] | None:
    """Return a value that is a mapping, else None."""
    return cast("Mapping[str, object]", data) if isinstance(data, Mapping) else None


def get_list(data: object) -> tuple[object, ...] | None:
    """Return a value that is a list, else None."""
    return cast("tuple[object, ...]", data) if isinstance(data, tuple) else None


@dataclass(frozen=True)
class DomainReader:
    """Reads the domain of one parameter; every method raises `UnreadableNodeError`."""

    info: ParameterInfo
    path: KeyPath
    """Path of the parameter in the document."""
    problems: Problems

    def _reject(
        self, reason: str, fix: str, *inner: str | int, value: object = None
    ) -> UnreadableNodeError:
        return self.problems.note((*self.path, *inner), reason, fix, value)

    def read(self, data: object) -> Domain:
        """Return a domain in any notation, without its `when`."""
        elements, entries = get_list(data), get_mapping(data)
        if elements is not None:
            return self._read_list(elements)
        if entries is None:
            return Fixed(value=self.read_value(data))
        unknown = [key for key in entries if key not in (*KINDS, "step", "when")]
        for key in unknown:
            self._reject("unknown key of a domain", f"{suggest(key, KINDS)}{SYNTAX}", key)
        if unknown:
            raise UnreadableNodeError
        kinds = [key for key in KINDS if key in entries]
        if len(kinds) != 1:
            raise self._reject(f"needs exactly one of {join_names(KINDS)}", SYNTAX)
        kind, value = kinds[0], entries[kinds[0]]
        if "step" in entries and kind != "range":
            fix = "remove step:" if kind == "log" else "list the values instead"
            raise self._reject(f"{kind} has no step", fix, "step")
        if kind == "value":
            return Fixed(value=self.read_value(value))
        if kind != "choices":
            return self._read_range(value, entries.get("step"), kind)
        elements = get_list(value)
        if elements is None:
            raise self._reject("not a list of choices", "write choices: [1, 2]")
        return self._read_list(elements, kind)

    def _read_list(self, elements: tuple[object, ...], *inner: str) -> Choices:
        if not elements:
            raise self._reject("no choices", "list at least one value", *inner)
        values: list[ParamValue] = []
        for index, element in enumerate(elements):
            with suppress(UnreadableNodeError):
                value = self.read_value(element, *inner, index)
                if is_one_of(value, tuple(values)):
                    reason, fix = f"{show(value)} is given twice", "name each value once"
                    raise self._reject(reason, fix, value=element)
                values.append(value)
        if len(values) < len(elements):
            raise UnreadableNodeError
        return Choices(choices=tuple(values))

    def _read_range(self, data: object, step: object, kind: str) -> Uniform:
        ends, integer, log = get_list(data) or (), self.info.kind == "int", kind == "log"
        if self.info.kind == "choice":
            fix = f"list choices: {show(self.info.choices)}"
            raise self._reject("has no order, so it cannot have a range", fix)
        if len(ends) != 2:
            raise self._reject("a range has two ends", f"write {kind}: [low, high]")
        numbers: list[Number] = []
        for end in ends:
            with suppress(UnreadableNodeError):
                if log and isinstance(end, int | float) and not isinstance(end, bool) and end <= 0:
                    fix = "start above 0, such as {log: [0.01, 1]}, or use range:"
                    raise self._reject("a log range cannot reach 0 or below", fix, value=end)
                numbers.append(cast("Number", self.read_value(end)))
        if len(numbers) < 2:
            raise UnreadableNodeError
        low, high = numbers
        if low >= high:
            fix = f"{kind}: [{show(high)}, {show(low)}]" if low > high else show(low)
            reason = "an empty range: low is not below high"
            raise self._reject(reason, f"write {fix}", value=data)
        width = None if step is None else self._read_step(step, low, high)
        distance = width or (1 if integer else None)
        if distance is not None and (high - low) / distance >= MOST_VALUES:
            fix = "end the range earlier" if integer else "write none, for any number"
            fix += "" if log else ", or write a larger step:"
            raise self._reject(f"more than {MOST_VALUES:,} values", fix, value=data)
        return Uniform(low=low, high=high, log=log, step=width, integer=integer)

    def _read_step(self, step: object, low: Number, high: Number) -> Number:
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < math.inf:
            raise self._reject("not a positive number", "write a number above 0", "step")
        if self.info.kind == "int" and not isinstance(step, int):
            raise self._reject("not a whole number", "write a whole number", "step")
        if not is_on_grid(high - low, step):
            last = low + step * math.floor((high - low) / step)
            reason = f"steps from {show(low)} do not land on {show(high)}"
            fix = f"end the range at {last:.12g} or {last + step:.12g}, or remove step:"
            raise self._reject(reason, fix, "step")
        return step

    def read_value(self, data: object, *inner: str | int) -> ParamValue:
        """Return one value of the parameter's type and within its bounds."""
        complaint = explain_bad_value(data, self.info)
        if complaint is not None:
            raise self._reject(*complaint, *inner, value=data)
        # 1 and 1.0 mean the same weight, and so the same sweep.
        is_float = self.info.kind == "float"
        return float(cast("Number", data)) if is_float else cast("ParamValue", data)


def explain_bad_value(value: object, info: ParameterInfo) -> tuple[str, str] | None:
    """Return reason and fix if a parameter cannot have `value`, else None."""
    if info.kind == "choice":
        if isinstance(value, bool | int | float | str) and is_one_of(value, info.choices):
            return None
        close = suggest(value, map(str, info.choices))
        return "unknown value", f"{close}use one of {join_names(info.choices)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not a number", f"write a {'whole ' if info.kind == 'int' else ''}number"
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite", "write a finite number"
    if isinstance(value, int) and abs(value) > LARGEST:  # no float holds it
        return "out of range", f"write a number of at most {LARGEST:.2g}"
    if info.kind == "int" and not isinstance(value, int):
        return "not a whole number", f"write {round(value)}"
    if info.low is not None and (value <= info.low if info.open_low else value < info.low):
        negative = value < 0 and info.low == 0
        reason = "a weight or rate cannot be negative" if negative else "too small"
        return reason, f"write a number {'above' if info.open_low else 'of at least'} {info.low:g}"
    if info.high is not None and value > info.high:
        return "too large", f"write a number of at most {info.high:g}"
    if info.kind == "float" and value and not SMALLEST <= abs(value) <= LARGEST:
        result = "0" if abs(value) < SMALLEST else "infinity"
        between = f"between {SMALLEST:.2g} and {LARGEST:.2g}"
        return f"{result} in the 32 bits that training computes in", f"write a number {between}"
    return None


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


def dump_entries(entries: Mapping[str, object]) -> str:
    """Return a document that any parser reads alike: an entry a line, values in flow style."""
    lines = [line for key, value in entries.items() for line in _dump_block(key, value)]
    return "\n".join(lines) + "\n"


def _dump_block(key: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield f"{key}:"
        group = ""
        for name, child in cast("Mapping[str, object]", value).items():
            prefix, _, leaf = name.rpartition(".")
            if prefix and prefix != group:
                yield f"  {prefix}:"
            group = prefix
            yield f"  {'  ' if prefix else ''}{leaf}: {dump_flow(child)}"
    elif isinstance(value, tuple) and value:
        yield f"{key}:"
        yield from (f"  - {dump_flow(child)}" for child in cast("Sequence[object]", value))
    else:
        yield f"{key}: {dump_flow(value)}"


def dump_flow(value: object) -> str:
    """Return a value on one line of YAML 1.1 or 1.2."""
    return format_flow(value, _dump_scalar)


def _dump_scalar(value: object) -> str:
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in RESERVED
        return value if plain else json.dumps(value, ensure_ascii=False)
    text = json.dumps(value)
    # Parsers of YAML 1.1 take 3e-05 for a word.
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text
