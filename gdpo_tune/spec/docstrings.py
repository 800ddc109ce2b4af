"""Goes once clusters/schedule_reference.py reads pydantic's descriptions."""

from inspect import getdoc

from gdpo_tune.spec.reference import read_attribute_docs as attribute_docs


def first_line(kind: type[object]) -> str:
    """Return the first line of a class's docstring."""
    return (getdoc(kind) or "").partition("\n")[0]


__all__ = ["attribute_docs", "first_line"]
