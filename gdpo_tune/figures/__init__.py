"""Pictures of a sweep: an interactive report and a PNG of the front. One file a picture."""

from gdpo_tune.figures.front_png import write_front_png
from gdpo_tune.figures.report import write_report

__all__ = ["write_front_png", "write_report"]
