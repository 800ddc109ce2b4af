"""Regenerate a sweep's report from its ledger.

    python -m gdpo_tune.report search_spaces/code.yaml
    python -m gdpo_tune.report runs/code --pick "max correctness where length >= 0.9"
    python -m gdpo_tune.report runs/code --sync

The second marks one candidate, and prints the commands that train and export it. Ledgers are only
read, so this works beside a running sweep. The last sends MLflow and the other trackers what they
lack of a sweep that is not running: updates that an unreachable server missed, or everything if its
database is gone. With another sweep, or with --modes, it does what `compare` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import explain_write_errors

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__, abbreviations=True)
    parser.spec("SWEEP", cli.SWEEP)
    parser.file("against", "another sweep, to compare with", metavar="OTHER_SWEEP", nargs="?")
    parser.pick()
    parser.modes("the sweep to compare")
    parser.flag("--sync", "send MLflow and the trackers of `report_to` what they lack of the sweep")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Parse `arguments`, write report.html, front.png and front.csv, print where they are."""
    options = build_parser().parse_args(arguments)
    if options.against is not None or options.modes:
        from gdpo_tune.compare import compare_named

        if options.pick or options.overrides or options.name or options.sync:
            raise UsageError(
                "--pick, --set, --name and --sync have no effect on a comparison: leave them out"
            )
        return compare_named(options.space, options.against, options.modes)

    spec, pick = _load_named(options)  # first: a refusal needs none of the imports below

    from gdpo_tune.display.console_summary import print_summary
    from gdpo_tune.ledger import Ledger
    from gdpo_tune.results.open_sweep import Sweep, download_artifacts
    from gdpo_tune.results.picks import parse_pick, pick_trial

    download_artifacts(spec)
    with Ledger.open(spec, read_only=True) as ledger:
        sweep = Sweep(ledger.spec, ledger.get_records(), ledger.get_sessions())
    if pick is not None:
        sweep = replace(sweep, chosen=pick_trial(sweep, parse_pick(pick)))
    with explain_write_errors("the report"):
        cli.write_figures(sweep)
    print_summary(sweep)
    if options.sync:
        from gdpo_tune.tracking.mlflow_sink import sync
        from gdpo_tune.tracking.trackers import send_runs

        return max(sync(spec), send_runs(sweep))
    return 0


def _load_named(options: argparse.Namespace) -> tuple[SweepSpec, str | None]:
    from gdpo_tune.results.open_sweep import (
        is_space,
        resolve_location,
        resolve_spec_file,
        split_source,
    )

    if is_space(options.space):
        from gdpo_tune.spec import load_spec
        from gdpo_tune.spec.load import keep_recorded_tracking

        spec = load_spec(options.space, options.overrides, options.name, to_run=False)
        return keep_recorded_tracking(spec), options.pick
    location, pick = split_source(options.space, options.pick)
    file, storage = resolve_spec_file(resolve_location(location), options.space)

    from gdpo_tune.spec import load_spec

    name = options.name or file.parent.name
    return load_spec(file, [storage, *options.overrides], name, to_run=False), pick


if __name__ == "__main__":
    cli.run_command(main)
