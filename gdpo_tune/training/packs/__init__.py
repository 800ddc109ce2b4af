"""Many LoRA trials in one process, on one frozen base policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_tune.training.packs.pack import Pack

__all__ = ["Pack"]


def __getattr__(name: str) -> Any:
    # Lazy, as in the room's own `__init__`.
    if name == "Pack":
        from gdpo_tune.training.packs.pack import Pack

        return Pack
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
