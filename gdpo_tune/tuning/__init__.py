"""The search: Optuna proposes, Ray places trials, the ledger remembers. The only room with Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_tune.tuning.runner import SweepResult, run_sweep

__all__ = ["SweepResult", "run_sweep"]


def __getattr__(name: str) -> Any:
    # Lazy, so that a trial's process does not pay for what only the driver needs.
    if name in __all__:
        from gdpo_tune.tuning import runner

        return getattr(runner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
