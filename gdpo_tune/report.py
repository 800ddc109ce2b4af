"""Draw a sweep's report again from its ledger.

    python -m gdpo_tune.report search_spaces/code.yaml

The ledger is only read, so this works beside a running sweep.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gdpo_tune import cli


def main(arguments: Sequence[str]) -> int:
    """Parse `arguments`, write report.html and front.png, print where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m gdpo_tune.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_spec_arguments(parser)
    options = parser.parse_args(arguments)

    from gdpo_tune.display import print_summary
    from gdpo_tune.figures import write_front_png, write_report
    from gdpo_tune.ledger import Ledger
    from gdpo_tune.spec import load_spec

    spec = load_spec(options.space, options.overrides, options.name)
    with Ledger.open(spec, read_only=True) as ledger:
        records = ledger.records()
        sessions = ledger.sessions()
    write_report(spec, records, ending=sessions[-1].get("ending", "") if sessions else "")
    write_front_png(spec, records)
    print_summary(spec, records)
    return 0


if __name__ == "__main__":
    cli.run(main)
