"""What stands in the terminal after a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gdpo_tune.analysis.verdict import Verdict


def print_comparison(
    verdict: Verdict, notes: Sequence[str], page: Path, console: Console | None = None
) -> None:
    """Print the verdict, what it rests on, what limits it, and where the page is."""
    out = console or Console()
    out.print(Text(f"\n{verdict.headline}", style="bold"), soft_wrap=True)
    for line in verdict.reasons:
        out.print(Text(f"  {line}"), soft_wrap=True, highlight=False)
    for line in notes:
        out.print(Text(f"  {line}", style="dim"), soft_wrap=True, highlight=False)
    out.print(Text(f"\nreport  {page}"), soft_wrap=True, highlight=False)
