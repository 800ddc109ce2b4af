"""Goes once other rooms import these names from `model`."""

from gdpo_tune.spec.model import differences, meaning

__all__ = ["differences", "meaning"]
