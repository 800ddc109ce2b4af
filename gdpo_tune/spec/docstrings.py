"""Goes once clusters/schedule_reference.py reads descriptions of pydantic."""

from gdpo_tune.spec.reference import attribute_docs, first_line

__all__ = ["attribute_docs", "first_line"]
