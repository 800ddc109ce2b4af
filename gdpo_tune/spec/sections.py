"""The plain sections of the file: pydantic's errors in our words, with lines and close matches."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from gdpo_tune.spec.problems import KeyPath, Node, Problems, did_you_mean, dotted, one_of, show

S = TypeVar("S", bound=BaseModel)
T = TypeVar("T")

KINDS_OF_VALUE = {
    "int_type": ("not a whole number", "write a whole number"),
    "int_from_float": ("not a whole number", "write a whole number"),
    "float_type": ("not a number", "write a number"),
    "finite_number": ("not finite", "write a finite number"),
    "string_type": ("not a piece of text", "write a word, quoted if it looks like a number"),
    "too_short": ("empty", "write one value or more, such as [0.8, 1.25]"),
    "string_too_short": ("empty", "write a word, or remove the key"),
    "string_pattern_mismatch": (
        "not the address of a tracking server or database",
        "write sqlite:///mlflow.db, http://HOST:PORT, or the URL of a database",
    ),
    "tuple_type": ("not a list", "write values in brackets"),
    "bool_type": ("not true or false", "write true or false"),
    "model_type": ("not a mapping", "write keys and values below it"),
    "model_attributes_type": ("not a mapping", "write keys and values below it"),
}
"""Pydantic's error type -> reason and fix."""

AS_WRITTEN = {
    "tuple_type": "write it in brackets: [{}]",
    "model_attributes_type": "write {{{tag}: {}}}",
}
"""Pydantic's error type -> fix of a word where more belongs; the latter where kinds differ, and
`tag` is the key that tells them apart."""

BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def section(model: type[S], node: Node | None, path: KeyPath, problems: Problems) -> S | None:
    """Validate one mapping of the file.

    Args:
        model: what the mapping must be; its fields name the keys.
        node: the mapping; None (not in the file) stands for an empty one.
        path: where it stands.
        problems: where problems go.

    Returns:
        What the mapping says. Keys with problems are as if they were not in the file, so that the
        rest can still be checked; None if the model does not stand without them.
    """
    given = {} if node is None else node.plain()
    try:
        return model.model_validate(given)
    except ValidationError as error:
        faults = _plain_faults(error)
    origin = node if node is not None else Node(problems.origin)
    for details in faults:
        translate(details, model, origin, path, problems)
    bad = {details["loc"][0] for details in faults if details["loc"]}
    entries = origin.entries or {}
    try:
        return model.model_validate({k: v.plain() for k, v in entries.items() if k not in bad})
    except ValidationError:
        return None


def _plain_faults(error: ValidationError) -> list[ErrorDetails]:
    """Pydantic's errors, without that a list is empty because what is in it is wrong."""
    faults = error.errors(include_url=False)
    within = {fault["loc"][:-1] for fault in faults}
    return [f for f in faults if f["type"] != "too_short" or f["loc"] not in within]


def translate(
    details: ErrorDetails, model: type[BaseModel], node: Node, path: KeyPath, problems: Problems
) -> None:
    """Note one of pydantic's errors."""
    inner, owner = located(model, tuple(details["loc"]))
    at, full = node.find(inner), (*path, *inner)
    kind, context = details["type"], details.get("ctx", {})
    if kind == "union_tag_invalid":
        return  # noted by `checks`, which knows all names
    if kind == "union_tag_not_found":
        name = str(context["discriminator"]).strip("'")
        problems.at(at, full, f"without a {name}", f"add {name}: followed by its name")
    elif kind == "extra_forbidden":
        keys = list(owner.model_fields)
        fix = f"{did_you_mean(inner[-1], keys)}keys here are {one_of(keys)}"
        problems.at(at, full, "unknown key", fix)
    elif kind == "missing":
        problems.add(at.mark, dotted(full), None, "missing", f"add {inner[-1]}:")
    elif kind == "literal_error":
        expected = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        matches = did_you_mean(details["input"], expected.split(", "))
        problems.at(at, full, "unknown value", f"{matches}use one of {expected}")
    elif kind in BOUNDS:
        key, words = BOUNDS[kind]
        bound = f"{words} {show(context[key])}"
        fix = f"write a number {'of ' if bound.startswith('at') else ''}{bound}"
        problems.at(at, full, f"must be {bound}", fix)
    else:
        otherwise = (details["msg"], context.get("fix", "see docs/reference.md"))
        reason, fix = KINDS_OF_VALUE.get(kind, otherwise)
        if kind in AS_WRITTEN and isinstance(at.value, str):
            tag = owner.model_fields[str(inner[-1])].discriminator
            fix = AS_WRITTEN[kind].format(at.value, tag=tag)
        problems.at(at, full, reason, fix)


def located(model: type[BaseModel], loc: KeyPath) -> tuple[KeyPath, type[BaseModel]]:
    """Where an error is in the file, and the class whose keys stand there.

    Where a section comes in several types, pydantic puts the type's name into the path.
    """
    path: list[str | int] = []
    parts = iter(loc)
    for part in parts:
        path.append(part)
        field = model.model_fields.get(str(part))
        kinds: tuple[Any, ...] = () if field is None else (field.annotation,)
        if field is not None and field.discriminator is not None:
            name = next(parts, None)
            members = get_args(field.annotation)
            tag = str(field.discriminator)
            kinds = tuple(k for k in members if tag_of(k, tag) == name)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
    return tuple(path), model


def tag_of(kind: type[BaseModel], tag: str) -> str:
    """The word by which a file asks for one of several kinds of section."""
    (word,) = get_args(kind.model_fields[tag].annotation)
    return word


def settings(kind: type[T], key: str, node: Node | None, problems: Problems) -> T | None:
    """`training:` or `sandbox:` as the settings that every room shares.

    Args:
        kind: a dataclass of settings.
        key: the section's.
        node: the section; None (not in the file) stands for an empty one.
        problems: where problems go.
    """
    valid = section(settings_model(kind), node, (key,), problems)
    return None if valid is None else kind(**valid.model_dump())


def settings_model(kind: type[Any]) -> type[BaseModel]:
    """A dataclass as a strict model, so that its errors read like every other section's."""
    hints = get_type_hints(kind, include_extras=True)
    fields: dict[str, Any] = {
        f.name: (_from_list(hints[f.name]), f.default) for f in dataclasses.fields(kind)
    }
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    return create_model(kind.__name__, __config__=config, **fields)


def _from_list(hint: Any) -> Any:
    """A tuple is written as a list; what is in it stays strict."""
    return Annotated[hint, Field(strict=False)] if get_origin(hint) is tuple else hint
