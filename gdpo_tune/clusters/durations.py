"""Lengths of time as a person writes them: `90m`, `6h`, `1d12h`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from gdpo_tune.spec.base import refused

UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
WRITTEN = re.compile("".join(f"(?:([0-9]{{1,9}}){unit})?" for unit in UNITS))
SHORTEST = UNITS["m"]
"""Who calls `tick` may come every minute, not every second."""
LONGEST = 366 * UNITS["d"]


def seconds_of(text: Any) -> int:
    """The seconds that a text such as `1d12h` means.

    Raises:
        PydanticCustomError: it is no such text, or means more or less than makes sense.
    """
    found = WRITTEN.fullmatch(text) if isinstance(text, str) and text else None
    if found is None:
        raise refused("not a length of time", "write it like 90m, 6h or 1d12h")
    given = zip(found.groups(), UNITS.values(), strict=True)
    seconds = sum(int(count or 0) * size for count, size in given)
    if not SHORTEST <= seconds <= LONGEST:
        bounds = f"{shown(SHORTEST)} to {shown(LONGEST)}"
        raise refused(f"must be {bounds}", f"write a length of time of {bounds}")
    return seconds


def shown(seconds: float) -> str:
    """Seconds as they would be written, to the second; `0s` for none."""
    rest, parts = round(seconds), ""
    for unit, size in UNITS.items():
        count, rest = divmod(rest, size)
        parts += f"{count}{unit}" if count else ""
    return parts or "0s"


WRITTEN_AS_TEXT = BeforeValidator(seconds_of)
"""By which the type of a length of time is known again."""
Duration = Annotated[int, WRITTEN_AS_TEXT]
"""Seconds, written as text in the file."""
