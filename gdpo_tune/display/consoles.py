"""Consoles: where a live table may be drawn."""

from __future__ import annotations

import sys

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with status 1 and without a word


def build_console(width: int | None = None) -> Console:
    """Build a console that draws live in a terminal alone.

    For rich `FORCE_COLOR` makes a terminal of any file. Jupyter and CI set it, and would keep every
    frame of a live table.
    """
    return _Console(force_terminal=None if sys.stdout.isatty() else False, width=width)
