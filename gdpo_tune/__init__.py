"""Find the Pareto front of a multi-reward RL run: correctness against format and length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_tune.results.notebook import LoadedSweep
    from gdpo_tune.results.open_sweep import Sweep

__all__ = ["__version__", "load_sweep"]
__version__ = "0.1.0"


def load_sweep(named: str) -> LoadedSweep:
    """Load a sweep into a notebook.

    Args:
        named: its directory or address, its name under `runs`, or its file.

    Raises:
        UsageError: there is no such sweep.
    """
    # Late: commands and trials import this package, and need neither Optuna nor pandas for that.
    from gdpo_tune.results.notebook import LoadedSweep
    from gdpo_tune.results.open_sweep import find_sweep

    return LoadedSweep(find_sweep(str(named)), _gallery)


def _gallery(sweep: Sweep) -> Any:
    from gdpo_tune.figures.report_page import build_gallery  # late: tables alone need no plotly

    return build_gallery(sweep)
