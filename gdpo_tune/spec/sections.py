"""Sections of a YAML file as pydantic models, and the text of pydantic's errors."""

from __future__ import annotations

import dataclasses
import re
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from gdpo_tune.spec.problems import (
    KeyPath,
    Problems,
    YamlNode,
    explain_unknown_name,
    format_path,
    join_names,
    show,
    suggest,
)

S = TypeVar("S", bound=BaseModel)
T = TypeVar("T")

KINDS_OF_VALUE = {
    "int_type": ("not a whole number", "write a whole number"),
    "float_type": ("not a number", "write a number"),
    "finite_number": ("not finite", "write a finite number"),
    "string_type": ("not a piece of text", "write a word, quoted if it looks like a number"),
    "too_short": ("empty", "write one value or more, such as [0.8, 1.25]"),
    "string_too_short": ("empty", "write a word, or remove the key"),
    "tuple_type": ("not a list", "write values in brackets"),
    "bool_type": ("not true or false", "write true or false"),
    "dict_type": ("not a mapping", "write keys and values below it"),
    "model_type": ("not a mapping", "write keys and values below it"),
    "model_attributes_type": ("not a mapping", "write keys and values below it"),
}
"""Pydantic's error type -> reason and fix."""
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""Constraint of annotated_types and pydantic -> its words."""


class Section(BaseModel):
    """A mapping of the file: unknown keys are errors, and `"60"` is not 60."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    other_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the file that are read elsewhere."""


def build_refusal(reason: str, fix: str) -> PydanticCustomError:
    """Return the error that a validator raises, with its reason and fix for the message."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "fix": fix})


def require_pattern(pattern: str, reason: str, fix: str) -> AfterValidator:
    """Return a validator of texts that match a pattern from end to end."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise build_refusal(reason, fix)
        return text

    return AfterValidator(check)


def build_settings_model(kind: Any) -> type[Section]:
    """Return a section with the fields of a plain dataclass."""
    hints, default = get_type_hints(kind, include_extras=True), kind()
    names = [field.name for field in dataclasses.fields(kind)]
    model: dict[str, Any] = {name: (hints[name], getattr(default, name)) for name in names}
    return create_model(kind.__name__, __base__=Section, **model)


def accept_mapping(kind: type[T]) -> BeforeValidator:
    """Return a validator that reads a plain dataclass from a mapping of the file."""
    model = build_settings_model(kind)

    def read(data: object) -> object:
        return data if isinstance(data, kind) else kind(**dict(model.model_validate(data)))

    return BeforeValidator(read)


def read_section(
    model: type[S], node: YamlNode | None, path: KeyPath, problems: Problems
) -> S | None:
    """Return one mapping of the file as a model, without the keys that have problems.

    A node of None (not in the file) stands for an empty mapping. The result is None if the model
    is not valid without these keys.
    """
    origin = node if node is not None else YamlNode(problems.origin, entries={})
    data: Any = origin.convert_to_plain()
    changed = True
    while changed:
        try:
            return model.model_validate(data)
        except ValidationError as error:
            faults = error.errors(include_url=False)
        changed = not isinstance(data, dict)
        data = {} if changed else data
        within = {fault["loc"][:-1] for fault in faults}
        for fault in faults:
            if fault["type"] == "too_short" and fault["loc"] in within:
                continue  # it is empty only because its values, reported below, are wrong
            inner, keys, field = _locate(model, tuple(fault["loc"]))
            if fault["type"] == "union_tag_invalid" and field is not None:
                inner = (*inner, str(field.discriminator))
            key, value = format_path((*path, *inner)), origin.get(inner)
            if not problems.has_problem(key):
                reason, fix = _explain(fault, inner, keys, field)
                shown = None if value is None else value.convert_to_plain()
                problems.add(origin.find(inner).mark, key, shown, reason, fix)
            changed |= _remove(data, inner)
    return None


def _remove(data: Any, path: KeyPath) -> bool:
    if not path or not isinstance(data, dict) or path[0] not in data:
        return False
    if not _remove(data[path[0]], path[1:]):
        del data[path[0]]
    return True


def _explain(
    fault: ErrorDetails, path: KeyPath, keys: list[str], field: FieldInfo | None
) -> tuple[str, str]:
    kind, context, key = fault["type"], fault.get("ctx", {}), path[-1] if path else ""
    if kind == "union_tag_invalid":
        names = context["expected_tags"].replace("'", "").split(", ")
        return explain_unknown_name(str(path[-2]), context["tag"], names)
    if kind == "union_tag_not_found":
        name = str(context["discriminator"]).strip("'")
        return f"without a {name}", f"add {name}: followed by its name"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return "unknown key", f"{suggest(key, keys)}keys here are {join_names(keys)}"
    if kind == "missing":
        return "missing", f"add {key}:"
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        matches = suggest(fault["input"], expected.split(", "))
        return "unknown value", f"{matches}use one of {expected}"
    for name in context.keys() & BOUNDS.keys():
        bound = f"{BOUNDS[name]} {show(context[name])}"
        return f"must be {bound}", f"write a number {'of ' if name[1] == 'e' else ''}{bound}"
    reason, fix = KINDS_OF_VALUE.get(kind, (fault["msg"], "see docs/reference.md"))
    if isinstance(fault["input"], str) and kind == "tuple_type":
        fix = f"write it in brackets: [{fault['input']}]"
    elif isinstance(fault["input"], str) and field is not None and field.discriminator:
        fix = f"write {{{field.discriminator}: {fault['input']}}}"
    return reason, context.get("fix", fix)


def _locate(model: type[BaseModel], loc: KeyPath) -> tuple[KeyPath, list[str], FieldInfo | None]:
    """Return the path of an error in the file, the keys allowed at that path, and its field.

    Where a section comes in several types, pydantic puts the type's name into the path.
    """
    kind: Any = model
    path: list[str | int] = []
    keys, field = _list_keys(kind), None
    parts = iter(loc)
    for part in parts:
        path.append(part)
        if get_origin(kind) is dict:
            kind, field = get_args(kind)[1], None
            continue
        keys = _list_keys(kind) or keys
        field = getattr(kind, "model_fields", {}).get(part)
        if dataclasses.is_dataclass(kind):
            kind = get_type_hints(kind).get(str(part))
        else:
            kind = None if field is None else field.annotation
        if field is not None and get_origin(kind) in (Union, UnionType):
            members = [member for member in get_args(kind) if _list_keys(member)]
            if field.discriminator:
                name, tag = next(parts, None), str(field.discriminator)
                members = [m for m in members if name in get_args(m.model_fields[tag].annotation)]
            kind = members[0] if members else None
    return tuple(path), keys, field


def _list_keys(kind: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, Section):
        return [*kind.model_fields, *kind.other_keys]
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return []
