"""Figures of a sweep: an interactive report, and the front as a still picture."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_tune.figures.front_png import write_front_png
    from gdpo_tune.figures.report_page import write_comparison, write_report

__all__ = ["write_comparison", "write_front_png", "write_report"]


def __getattr__(name: str) -> Any:
    # Lazy: importing this package costs neither plotly nor matplotlib.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "write_front_png":
        return import_module(f"{__name__}.front_png").write_front_png
    # plotly uses pandas if it is in `sys.modules`, even while the tracking thread has imported only
    # a part of it. This import waits until pandas is complete.
    import_module("pandas")
    return getattr(import_module(f"{__name__}.report_page"), name)
