"""Pictures of a sweep: an interactive report and a PNG of the front. One file a picture."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_tune.figures.comparison_page import write_comparison
    from gdpo_tune.figures.front_png import write_front_png
    from gdpo_tune.figures.report_page import write_report


__all__ = ["write_comparison", "write_front_png", "write_report"]


_PLOTLY = {
    "write_comparison": "gdpo_tune.figures.comparison_page",
    "write_report": "gdpo_tune.figures.report_page",
}
"""What draws with plotly, and where it is."""


def __getattr__(name: str) -> Any:
    # Lazy, so that the terminal, which shares `style`, does not pay for plotly and matplotlib.
    if name == "write_front_png":
        from gdpo_tune.figures.front_png import write_front_png

        return write_front_png
    if name in _PLOTLY:
        # plotly takes pandas as it finds it among the loaded modules: half of it, while a thread
        # that tracks is importing MLflow. An import of our own waits until it is whole.
        import_module("pandas")
        return getattr(import_module(_PLOTLY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
