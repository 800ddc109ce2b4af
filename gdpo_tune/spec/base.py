"""Goes once clusters imports these names from `sections`."""

from gdpo_tune.spec.sections import Section, refused, written

__all__ = ["Section", "refused", "written"]
