"""One trial: training with TRL, then held-out evaluation. Knows neither Ray nor Optuna."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_tune.training.trial import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    # Lazy, so that modules of this room that need no torch can be imported without it.
    if name == "train":
        from gdpo_tune.training.trial import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
