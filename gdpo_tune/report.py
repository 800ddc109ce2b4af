"""Draw a sweep's report again from its ledger.

    python -m gdpo_tune.report search_spaces/code.yaml
    python -m gdpo_tune.report runs/code --pick "max correctness where length >= 0.9"

The second marks one trial, and says how to train and to export it. The ledger is only read, so this
works beside a running sweep.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune import cli

if TYPE_CHECKING:
    from gdpo_tune.figures import Choice
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.trials import TrialRecord


def parser() -> argparse.ArgumentParser:
    """The command line, without importing anything heavy: `--help` answers at once."""
    parser = argparse.ArgumentParser(
        prog="python -m gdpo_tune.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_spec_arguments(parser)
    cli.add_pick_argument(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Parse `arguments`, write report.html and front.png, print where they are."""
    options = parser().parse_args(arguments)

    from gdpo_tune.display import print_summary
    from gdpo_tune.figures import write_front_png, write_report
    from gdpo_tune.ledger import Ledger

    spec, pick = _asked(options)
    with Ledger.open(spec, read_only=True) as ledger:
        records = ledger.records()
        sessions = ledger.sessions()
    chosen = None if pick is None else _chosen(spec, records, pick)
    ending = sessions[-1].get("ending", "") if sessions else ""
    write_report(spec, records, ending=ending, chosen=chosen)
    write_front_png(spec, records, chosen=chosen and chosen.number)
    print_summary(spec, records, chosen=chosen)
    return 0


def _asked(options: argparse.Namespace) -> tuple[SweepSpec, str | None]:
    """The sweep, by its file or by its folder, and the choice, by `--pick` or behind a colon."""
    from gdpo_tune.choosing import split_source, sweep_file
    from gdpo_tune.spec import load_spec

    if Path(options.space).is_file():
        return load_spec(options.space, options.overrides, options.name), options.pick
    folder, pick = split_source(options.space, options.pick)
    file, place = sweep_file(folder, options.space)
    name = options.name or file.parent.name
    return load_spec(file, [place, *options.overrides], name), pick


def _chosen(spec: SweepSpec, records: Sequence[TrialRecord], pick: str) -> Choice:
    from gdpo_tune.choosing import choose, told_of
    from gdpo_tune.figures import Choice
    from gdpo_tune.picks import parse

    found = choose(records, spec, parse(pick))
    return Choice(found.record.number, tuple(told_of(found, spec)))


if __name__ == "__main__":
    cli.run(main)
