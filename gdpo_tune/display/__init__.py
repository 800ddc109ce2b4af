"""What a person sees in the terminal: the running sweep, and a summary at its end."""

from gdpo_tune.display.comparison_summary import print_comparison
from gdpo_tune.display.live import LiveDisplay
from gdpo_tune.display.summary import print_summary

__all__ = ["LiveDisplay", "print_comparison", "print_summary"]
