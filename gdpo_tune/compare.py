"""Compare two sweeps, or two normalization modes of one: a verdict in words, and a page.

    python -m gdpo_tune.compare runs/gdpo runs/grpo
    python -m gdpo_tune.compare runs/code --modes gdpo grpo

Ledgers are only read, so this works beside a running sweep.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune import cli
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import explain_write_errors


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__, abbreviations=True)
    parser.file("sweep", cli.SWEEP, metavar="SWEEP")
    parser.file("other", "the other one", metavar="SWEEP", nargs="?")
    parser.modes("the one sweep")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Compare what `arguments` name; print the verdict and where its page is."""
    options = build_parser().parse_args(arguments)
    return compare_named(options.sweep, options.other, options.modes)


def compare_named(sweep: str, other: str | None, modes: Sequence[str] | None) -> int:
    """Compare a sweep with another one, or two modes of it, and return the exit status.

    Raises:
        UsageError: the two are not named, are not there, or judge different things.
    """
    from gdpo_tune.results.open_sweep import find_sweep

    if (other is None) == (not modes):
        raise UsageError("name two sweeps, or one sweep with two --modes")
    first, second = find_sweep(sweep), None if other is None else find_sweep(other)

    from gdpo_tune.display.console_summary import print_comparison
    from gdpo_tune.figures.report_page import write_comparison
    from gdpo_tune.results.comparison_report import compare_modes, compare_sweeps

    found = compare_sweeps(first, second) if second else compare_modes(first, *modes or ())
    with explain_write_errors("the comparison"):
        write_comparison(found)
    print_comparison(found)
    return 0


if __name__ == "__main__":
    cli.run_command(main)
