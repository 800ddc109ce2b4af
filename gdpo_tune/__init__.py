"""Find the Pareto front of a multi-reward RL run: correctness against format and length."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_tune.results.notebook import load_sweep

__all__ = ["__version__", "load_sweep"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy: commands and trials import this package, and need neither Optuna nor pandas for that.
    if name == "load_sweep":
        from gdpo_tune.results.notebook import load_sweep

        return load_sweep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
