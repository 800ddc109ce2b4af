"""What every section of the file is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Section(BaseModel):
    """A mapping of the file: unknown keys are errors, and `"60"` is not 60."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
