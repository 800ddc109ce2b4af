"""Terminal output: the running sweep, and summaries at its end."""

from gdpo_tune.display.console_summary import print_comparison, print_summary
from gdpo_tune.display.live_table import LiveDisplay

__all__ = ["LiveDisplay", "print_comparison", "print_summary"]
