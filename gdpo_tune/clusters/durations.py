"""Lengths of time as a person writes them: `90m`, `6h`, `1d12h`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from annotated_types import Le
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
WRITTEN = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?")
LONGEST = 366 * UNITS["d"]


def seconds_of(text: Any) -> int:
    """The seconds that a text such as `1d12h` means.

    Raises:
        PydanticCustomError: it is no such text.
    """
    found = WRITTEN.fullmatch(text) if isinstance(text, str) and text else None
    if found is None:
        raise PydanticCustomError("duration", "not a length of time")
    return sum(int(n or 0) * size for n, size in zip(found.groups(), UNITS.values(), strict=True))


def shown(seconds: float) -> str:
    """Seconds as they would be written, to the second; `0s` for none."""
    rest, parts = round(seconds), ""
    for unit, size in UNITS.items():
        count, rest = divmod(rest, size)
        parts += f"{count}{unit}" if count else ""
    return parts or "0s"


WRITTEN_AS_TEXT = BeforeValidator(seconds_of)
"""By which the type of a length of time is known again."""
Duration = Annotated[int, WRITTEN_AS_TEXT, Le(LONGEST)]
"""Seconds, written as text in the file."""
