"""One trial: training with TRL, then held-out evaluation. Knows neither Ray nor Optuna."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_tune.training.trial import train

__all__ = ["train"]

# TRL would import MLflow, seconds of every start, for reports that no trainer here makes,
os.environ.setdefault("DISABLE_MLFLOW_INTEGRATION", "TRUE")
# and would warn in every trainer that `rollout_func` is experimental.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def __getattr__(name: str) -> Any:
    # Lazy, so that modules of this room that need no torch can be imported without it.
    if name == "train":
        from gdpo_tune.training.trial import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
