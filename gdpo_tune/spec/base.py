"""What every section of the file is made of."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Section(BaseModel):
    """A mapping of the file: unknown keys are errors, and `"60"` is not 60."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def refused(reason: str, fix: str) -> PydanticCustomError:
    """What a validator raises: `section` tells both to the reader of the file."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "fix": fix})


def written(pattern: str, reason: str, fix: str) -> AfterValidator:
    """A text that matches a pattern from end to end; `reason` and `fix` for one that does not."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise refused(reason, fix)
        return text

    return AfterValidator(check)
