"""Markdown of an export's page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a `|` in a cell is escaped."""

    def format_row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join(map(format_row, [heads, ["---"] * len(heads), *rows]))
