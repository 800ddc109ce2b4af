"""Rows of `gpu_check.py`: one a check, with its figure, its limit and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Result = Literal["held", "did not hold", "not run"]
HEADER = ("step", "check", "figure", "limit", "result")
WIDEST = 60
"""Characters of a column; longer texts are in the line of JSON."""


@dataclass(frozen=True)
class Row:
    """One check."""

    step: str
    check: str
    figure: str
    limit: str
    result: Result
    reason: str = ""
    """Why a check was not run or did not hold, for a person."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Figures for a program."""
    stops: bool = False
    """True if the steps that follow make no sense where this check does not hold."""

    def describe_result(self) -> str:
        """Return the result with its reason."""
        return f"{self.result} ({self.reason})" if self.reason else self.result


def judge(
    step: str, check: str, figure: str, limit: str, held: bool, *, stops: bool = False, **values
) -> Row:
    """Build the row of a check that was run."""
    return Row(step, check, figure, limit, "held" if held else "did not hold", "", values, stops)


def skip(step: str, check: str, reason: str, limit: str = "") -> Row:
    """Build the row of a check that was not run."""
    return Row(step, check, "", limit, "not run", reason)


def fail(step: str, check: str, reason: str, *, stops: bool = False) -> Row:
    """Build the row of a check that ended in an error."""
    return Row(step, check, "", "runs to its end", "did not hold", reason, stops=stops)


def find_stop(rows: Sequence[Row]) -> Row | None:
    """Return the first row that stops the steps after it; None if nothing does."""
    return next((row for row in rows if row.stops and row.result == "did not hold"), None)


def compute_exit_status(rows: Sequence[Row]) -> int:
    """Return 0 if every check that was run held, else 1."""
    return int(any(row.result == "did not hold" for row in rows))


def format_table(rows: Sequence[Row]) -> str:
    """Format the rows as a table of text; long texts are cut, except results."""
    lines = [HEADER, *(_list_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _list_cells(row: Row) -> tuple[str, ...]:
    texts = (row.step, row.check, row.figure, row.limit)
    return (*(_cut(text) for text in texts), row.describe_result())


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def build_summary(rows: Sequence[Row], **about: object) -> dict[str, object]:
    """Build the figures for the line of JSON; `about` says what was checked."""
    results = [row.result for row in rows]
    return {
        "benchmark": "gpu_check",
        **about,
        "held": results.count("held"),
        "did_not_hold": results.count("did not hold"),
        "not_run": results.count("not run"),
        "rows": [
            {name: value for name, value in asdict(row).items() if value and name != "stops"}
            for row in rows
        ],
    }
