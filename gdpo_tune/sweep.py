"""Search for the Pareto front of a multi-reward RL run.

    python -m gdpo_tune.sweep search_spaces/code.yaml

The same command after an interruption, a crash or `kill -9` goes on where the sweep was; a larger
`search.trials` extends it; on a finished sweep it starts nothing. On a node of a Ray cluster,
`--address auto` spreads the trials over all nodes; from anywhere, `--submit http://HEAD:8265` runs
the sweep there and follows it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.core import ray_access
from gdpo_tune.core.errors import UsageError

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
    where = parser.add_argument_group("on a Ray cluster").add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        help="join the cluster of which this machine is a node: auto, or HOST:PORT of its head",
    )
    where.add_argument(
        "--submit",
        metavar="URL",
        help="run as a job of the cluster with this dashboard, such as http://head:8265, and show "
        "its log until it ends",
    )
    parser.add_argument(
        "--detach", action="store_true", help="with --submit: return once the job was taken"
    )
    parser.add_argument(
        "--working-dir",
        type=Path,
        metavar="FOLDER",
        help="with --submit: what is sent, with the search space in it (default: this folder)",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the sweep that `arguments` ask for and return the exit status."""
    # Before numpy: the driver's linear algebra is small, and trials want the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parsed(arguments)

    from gdpo_tune.spec import check_resources, load_spec, sandbox_doubts

    spec = load_spec(options.space, options.overrides, options.name)
    if options.dry_run:
        from gdpo_tune.spec import dry_run

        print(dry_run(spec))
        cli.check_share(spec)
        return 0
    if options.submit is not None:
        return submitted(spec, options)
    check_resources(spec)
    for warning in sandbox_doubts(spec):
        print(f"warning: {warning}", file=sys.stderr)
    for what, value in cli.probe_environment(spec).items():
        print(f"{what}: {value}")
    again = [word for word in arguments if word != "--fresh"]
    command = shlex.join(["python", "-m", "gdpo_tune.sweep", *again])
    return run(spec, fresh=options.fresh, command=command)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; an address among them is where Ray is looked for from here on.

    Raises:
        UsageError: options that mean nothing together, or an address that is none.
    """
    options = parser().parse_args(arguments)
    for name in ("detach", "working_dir"):
        if getattr(options, name) and options.submit is None:
            raise UsageError(f"--{name.replace('_', '-')} means nothing without --submit URL")
    if options.address is not None:
        found = ray_access.address(options.address, "--address")
        # Ray takes a variable for more than what it is asked for; auto leaves it what it is.
        if found != "auto" or not os.environ.get(ray_access.ADDRESS):
            os.environ[ray_access.ADDRESS] = found
    return options


def submitted(spec: SweepSpec, options: argparse.Namespace) -> int:
    """Run the sweep as a job of a cluster; return the exit status."""
    from gdpo_tune.clusters.backends.submit import Submission, cluster_at, submit
    from gdpo_tune.clusters.reach import lost_tracking

    refuse_passwords(options.overrides)
    storage = spec.storage if spec.address else os.path.abspath(os.path.expanduser(spec.storage))
    words = ["--name", spec.name, *(["--fresh"] if options.fresh else [])]
    for change in [*options.overrides, f"storage={json.dumps(storage)}"]:
        words += ["--set", change]
    folder = (options.working_dir or Path()).absolute()
    submission = Submission(Path(options.space), tuple(words), spec.name, storage, folder)
    print(f"kept in {storage}/{spec.name}, as the nodes of the cluster see it")
    doubt = lost_tracking(spec)
    if doubt:
        print(f"warning: {doubt}; --set tracking.uri=http://SERVER:5000", file=sys.stderr)
    return submit(submission, cluster_at(options.submit), follow=not options.detach)


def refuse_passwords(overrides: Sequence[str]) -> None:
    """Refuse overrides that a cluster's list of jobs must not show.

    Raises:
        UsageError: one has a password in an address.
    """
    from gdpo_tune.spec import without_password

    for override in overrides:
        shown = without_password(override)
        if shown != override:
            raise UsageError(
                f"--set {shown}: with a password, which the cluster's list of jobs would show\n"
                "    fix: leave it out; PGPASSWORD or ~/.pgpass, or MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD on the cluster hold it"
            )


def run(spec: SweepSpec, *, fresh: bool, command: str) -> int:
    """Run the sweep; return the exit status, and say how to go on where it ended too soon."""
    from gdpo_tune.core.errors import ClusterLostError

    try:
        return searched(spec, fresh=fresh, command=command)
    except ClusterLostError as error:
        say_how_to_go_on(f"error: {error}.", command)
        return error.exit_status


def searched(spec: SweepSpec, *, fresh: bool, command: str) -> int:
    """Compose the search with tracking and display; return the exit status."""
    from gdpo_tune.display import LiveDisplay, print_summary
    from gdpo_tune.tracking import MlflowSink
    from gdpo_tune.tuning import run_sweep

    with MlflowSink(spec) as sink, LiveDisplay(spec, tracking=sink.state) as display:
        result = run_sweep(spec, fresh=fresh, listeners=[sink, display])
        display.close()
        # Only now: plotting libraries take a second to import, and a refusal needs none.
        from gdpo_tune.figures import write_front_png, write_report

        write_report(spec, result.records, ending=result.reason, sessions=result.sessions)
        write_front_png(spec, result.records)
        sink.log_pictures()
    print_summary(
        spec, result.records, note=display.note, view=sink.link(), sessions=result.sessions
    )
    if result.interrupted:
        say_how_to_go_on("Interrupted.", command)
        return cli.INTERRUPTED
    trained = [record for record in result.records if record.role != "untrained"]
    if trained and all(record.state == "failed" for record in trained):
        print(
            "error: every trial failed; after the cause is mended, start with --fresh",
            file=sys.stderr,
        )
        return 1
    return 0


def say_how_to_go_on(why: str, command: str) -> None:
    """Print why a sweep ended too soon, and the line that continues it."""
    print(f"{why} Go on with:\n  {command}", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
