"""Search for the Pareto front of a multi-reward RL run.

    python -m gdpo_tune.sweep search_spaces/code.yaml

The same command after an interruption, a crash or `kill -9` goes on where the sweep was; a larger
`search.trials` extends it; on a finished sweep it starts nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from gdpo_tune import cli

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def parser() -> argparse.ArgumentParser:
    """The command line, without importing anything heavy: `--help` answers at once."""
    parser = argparse.ArgumentParser(
        prog="python -m gdpo_tune.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the line that continues a sweep must be able to leave --fresh out
    )
    cli.add_spec_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved spec, space, budget and doubtful combinations; start nothing",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start anew; an earlier sweep of this name is moved aside, not deleted",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the sweep that `arguments` ask for and return the exit status."""
    # Before numpy: the driver's linear algebra is small, and trials want the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parser().parse_args(arguments)

    from gdpo_tune.spec import load_spec

    spec = load_spec(options.space, options.overrides, options.name)
    if options.dry_run:
        from gdpo_tune.spec import dry_run

        print(dry_run(spec))
        return 0
    check_requirements(spec)
    again = [word for word in arguments if word != "--fresh"]
    command = shlex.join(["python", "-m", "gdpo_tune.sweep", *again])
    return run(spec, fresh=options.fresh, command=command)


def check_requirements(spec: SweepSpec) -> None:
    """Refuse at once what would fail every trial.

    Raises:
        ResourcesError: a trial asks for more than this machine has.
        PolicyError: the policy cannot be read, or lacks a pad or end token.
        SandboxUnavailable: the task runs code and this machine cannot isolate it.
        TrackingError: `tracking.required` and the server does not answer.
    """
    from gdpo_tune import registry
    from gdpo_tune.policies.load import check_available
    from gdpo_tune.spec import check_resources
    from gdpo_tune.tracking import check_server

    check_resources(spec)
    check_available(spec.policy)
    with registry.load(registry.TASKS[spec.task].target)(spec.training) as task:
        task.environment()  # starts what the task needs, such as the sandbox
    check_server(spec)


def run(spec: SweepSpec, *, fresh: bool, command: str) -> int:
    """Compose the search with tracking and display; return the exit status."""
    from gdpo_tune.display import LiveDisplay, print_summary
    from gdpo_tune.tracking import MlflowSink
    from gdpo_tune.tuning import run_sweep

    with MlflowSink(spec) as sink, LiveDisplay(spec) as display:
        result = run_sweep(spec, fresh=fresh, listeners=[sink, display])
        display.stop()
        # The tracking thread may be in the middle of importing pandas, of which plotly would see
        # half; an import of our own waits until it is whole.
        import_module("pandas")
        # Only now: plotting libraries take a second to import, and a refusal needs none.
        from gdpo_tune.figures import write_front_png, write_report

        write_report(spec, result.records)
        write_front_png(spec, result.records)
        sink.log_pictures()
    print_summary(spec, result.records, note=display.note)
    if result.interrupted:
        print(f"Interrupted. Go on with:\n  {command}", file=sys.stderr)
        return cli.INTERRUPTED
    trained = [record for record in result.records if record.role != "untrained"]
    if trained and all(record.state == "failed" for record in trained):
        print(
            "error: every trial failed; after the cause is mended, start with --fresh",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    cli.run(main)
