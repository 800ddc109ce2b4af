"""Mappings of a file as pydantic models, and the text of pydantic's errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar, get_args

from pydantic import AfterValidator, ValidationError
from pydantic_core import ErrorDetails

from gdpo_tune.core import registry
from gdpo_tune.core.settings import Section, build_refusal
from gdpo_tune.core.text import explain_unknown_name, join_names, show, suggest
from gdpo_tune.spec.document import KeyPath, Problems, YamlMap, format_path

S = TypeVar("S", bound=Section)

NO_MAPPING = ("not a mapping", "write keys and values below it")
MESSAGES = {
    "extra_forbidden": ("unknown key", "{close}keys here are {keys}"),
    "missing": ("missing", "add {key}:"),
    "greater_than_equal": ("must be at least {ge}", "write a number of at least {ge}"),
    "greater_than": ("must be above {gt}", "write a number above {gt}"),
    "less_than_equal": ("must be at most {le}", "write a number of at most {le}"),
    "less_than": ("must be below {lt}", "write a number below {lt}"),
    "literal_error": ("unknown value", "{close}use one of {keys}"),
    "union_tag_not_found": ("without a {tag}", "add {tag}: followed by its name"),
    "int_type": ("not a whole number", "write a whole number"),
    "float_type": ("not a number", "write a number"),
    "finite_number": ("not finite", "write a finite number"),
    "string_type": ("not a piece of text", "write a word, quoted if it looks like a number"),
    "too_short": ("empty", "write one value or more in brackets"),
    "string_too_short": ("empty", "write a word, or remove the key"),
    "tuple_type": ("not a list", "write values in brackets"),
    "bool_type": ("not true or false", "write true or false"),
    "dict_type": NO_MAPPING,
    "model_type": NO_MAPPING,
    "model_attributes_type": NO_MAPPING,
    "refused": ("{reason}", "{fix}"),
}
"""Pydantic's error type -> reason and fix, with what the error knows in braces."""


def require_pattern(pattern: str, reason: str, fix: str) -> AfterValidator:
    """Return a validator of texts that match a pattern from end to end."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise build_refusal(reason, fix)
        return text

    return AfterValidator(check)


def read_section(model: type[S], data: YamlMap, problems: Problems) -> S | None:
    """Return a mapping of the file as a model, without the keys that have problems, each noted.

    It is None if the model is not valid without these keys.
    """
    rest: Any = data
    while True:
        try:
            return model.model_validate(rest)
        except ValidationError as error:
            faults = error.errors(include_url=False)
        before, within = rest, {fault["loc"][:-1] for fault in faults}
        for fault in faults:
            if fault["type"] == "too_short" and fault["loc"] in within:
                continue  # it is empty only because its values, reported below, are wrong
            path = _find_path(fault["loc"], data)
            if fault["type"] == "union_tag_invalid":
                path = (*path, str(fault.get("ctx", {})["discriminator"]).strip("'"))
            if not problems.has_problem(format_path(path)):
                problems.note(path, *_explain(fault, path, model))
            rest = _leave_out(rest, path)
        if rest is before:
            return None


def _find_path(loc: KeyPath, data: Any) -> KeyPath:
    """Return where an error is in the file: pydantic puts the name of a section's type between."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        try:
            inner = data[part]
        except (KeyError, IndexError, TypeError):
            if index < len(loc) - 1:
                continue
            inner = None
        path.append(part)
        data = inner
    return tuple(path)


def _leave_out(data: Any, path: KeyPath) -> Any:
    """Return data without the innermost entry on a path; `data` itself if there is none."""
    if not path or not isinstance(data, dict) or path[0] not in data:
        return data
    inner = _leave_out(data[path[0]], path[1:])
    if inner is not data[path[0]]:
        return {**data, path[0]: inner}
    return {key: value for key, value in data.items() if key != path[0]}


def _explain(fault: ErrorDetails, path: KeyPath, model: type[Section]) -> tuple[str, str]:
    kind, context, value = fault["type"], fault.get("ctx", {}), fault["input"]
    key, tag = str(path[-1]) if path else "", str(context.get("discriminator", "")).strip("'")
    if kind == "union_tag_invalid":
        if context["tag"] in registry.OTHER_SCHEDULERS:
            return registry.OTHER_SCHEDULERS[context["tag"]]
        names = context["expected_tags"].replace("'", "").split(", ")
        return explain_unknown_name(str(path[-2]), context["tag"], names)
    kinds = find_kinds(model, fault["loc"][:-1])
    keys, wrong = [name for each in kinds for name in (*each.model_fields, *each.other_keys)], key
    if kind == "literal_error":
        keys, wrong = re.findall(r"'([^']*)'", context["expected"]), value
    words = {name: show(each) for name, each in context.items()} | {"msg": fault["msg"]}
    words |= {"close": suggest(wrong, keys), "keys": join_names(keys), "key": key, "tag": tag}
    message = MESSAGES.get(kind, ("{msg}", "see docs/reference.md"))
    reason, fix = (text.format(**words) for text in message)
    if isinstance(value, str) and kind == "tuple_type":
        fix = f"write it in brackets: [{value}]"
    elif isinstance(value, str) and kind == "model_attributes_type":  # the name of a type alone
        tag = next(iter(find_kinds(model, fault["loc"])[0].model_fields))
        fix = f"write {{{tag}: {value}}}"
    return reason, fix


def find_kinds(model: type[Section], loc: KeyPath) -> list[type[Section]]:
    """Return the sections to which the location of an error leads; several with a tag to come."""
    kinds = [model]
    for part in loc:
        fields = [kind.model_fields[str(part)] for kind in kinds if part in kind.model_fields]
        tagged = [
            kind
            for kind in kinds
            if any(part in get_args(field.annotation) for field in kind.model_fields.values())
        ]
        inner = [section for field in fields for section in find_sections(field.annotation)]
        kinds = inner or tagged or kinds
    return kinds


def find_sections(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections that a value of this type may be, or hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from find_sections(inner)
