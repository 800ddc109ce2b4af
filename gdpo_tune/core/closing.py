"""What ends with `close`, or with a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager whose end is `close`."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
