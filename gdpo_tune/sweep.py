"""Search for the Pareto front of a multi-reward RL run.

    python -m gdpo_tune.sweep search_spaces/code.yaml

After an interruption, a crash or `kill -9`, run the same command to resume. A larger budget, or
`search.trials`, extends a sweep; a finished one starts nothing. On a node of a Ray cluster,
`--address auto` spreads the trials over all nodes. From any machine, `--submit http://HEAD:8265`
runs the sweep on the cluster and shows its log.
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
from gdpo_tune.core import addresses, task_files
from gdpo_tune.core.addresses import refuse_hub_address
from gdpo_tune.core.errors import ClusterError, ClusterLostError, ExitCode, UsageError

if TYPE_CHECKING:
    from gdpo_tune.core.errors import SpecProblem
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tuning.runner import SweepResult


def main(arguments: Sequence[str]) -> int:
    """Run the sweep that `arguments` ask for and return the exit status."""
    # Before numpy: the driver's linear algebra is small, and trials want the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parse_arguments(arguments)

    from gdpo_tune.spec import load_spec
    from gdpo_tune.spec.load import keep_recorded_tracking

    needs = [] if options.dry_run or options.submit is not None else None
    spec = load_spec(options.space, options.overrides, options.name, needs=needs)
    refuse_hub_address(spec.address)
    spec = spec if options.fresh else keep_recorded_tracking(spec)
    if options.dry_run:
        with cli.name_file(str(options.space)):
            return _print_dry_run(spec, needs or ())
    if options.submit is not None:
        return _submit_sweep(spec, options)
    cli.outlive_readers()
    cli.set_written_variables(spec)
    with cli.name_file(str(options.space)):
        print_environment(spec)
    once = ("--fresh", "--accept-changes")
    words = [word for word in arguments if word not in once]
    return _run_here(spec, options, shlex.join(["python", "-m", "gdpo_tune.sweep", *words]))


def _run_here(spec: SweepSpec, options: argparse.Namespace, command: str) -> int:
    from gdpo_tune.display.console_summary import print_summary
    from gdpo_tune.display.live_table import LiveDisplay
    from gdpo_tune.results.open_sweep import Sweep
    from gdpo_tune.tracking.mlflow_sink import MlflowTracker
    from gdpo_tune.tracking.sweep_notifier import SweepNotifier
    from gdpo_tune.tracking.trackers import Trackers
    from gdpo_tune.tuning.runner import run_sweep

    try:
        with (
            SweepNotifier(spec) as notifier,  # closed last, when the report is written
            Trackers(spec) as trackers,
            MlflowTracker(spec) as tracker,
            LiveDisplay(spec, tracking=tracker.get_state) as display,
        ):
            result = run_sweep(
                spec,
                fresh=options.fresh,
                accept_changes=options.accept_changes,
                listeners=[tracker, display, notifier, trackers],
            )
            display.close()
            spec = result.spec
            view = Sweep(spec, result.records, result.sessions)
            cli.write_figures(view)
            tracker.log_figures()
    except ClusterLostError as error:
        print(f"error: {error}. Resume with:\n  {command}", file=sys.stderr)
        return error.exit_status
    print_summary(view, note=display.note, view=tracker.get_front_link())
    if result.exit_status:
        print(f"Interrupted. Resume with:\n  {command}", file=sys.stderr)
        return result.exit_status
    return _find_status(result)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, and set the address at which Ray finds its cluster from here on.

    Raises:
        UsageError: an option requires another one, or the address is malformed.
    """
    options = build_parser().parse_args(arguments)
    for name in ("detach", "working_dir"):
        if getattr(options, name) and options.submit is None:
            raise UsageError(f"--{name.replace('_', '-')} requires --submit URL")
    if options.address is not None:
        address = addresses.check_ray_address(options.address, "--address")
        # The variable names a cluster more exactly than auto does.
        if address != "auto" or not os.environ.get(addresses.RAY_ADDRESS):
            os.environ[addresses.RAY_ADDRESS] = address
    return options


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    parser.spec("SEARCH_SPACE.yaml", "the file that says what to search")
    parser.flag("--dry-run", "print the resolved spec, space, budget and warnings; start nothing")
    parser.flag("--fresh", "start anew; an earlier sweep of this name is moved aside, not deleted")
    parser.flag(
        "--accept-changes",
        "go on although the task's file, data, policy or versions have changed, if that decides "
        "no value: all trials share a front",
    )
    cluster = parser.add_argument_group("on a Ray cluster").add_mutually_exclusive_group()
    text = "join the cluster of which this machine is a node: auto, or HOST:PORT of its head"
    cluster.add_argument("--address", help=text)
    cluster.add_argument(
        "--submit",
        metavar="URL",
        help="run as a job of the cluster with this dashboard, such as http://head:8265, and show "
        "its log until it ends",
    )
    parser.flag("--detach", "with --submit: return once the job is accepted")
    text = "with --submit: directory to send, with the search space in it (default: this one)"
    parser.add_argument("--working-dir", type=Path, metavar="DIRECTORY", help=text)
    return parser


def _print_dry_run(spec: SweepSpec, needs: Sequence[SpecProblem]) -> int:
    from gdpo_tune.policies.load_policy import describe_policy, measure_policy
    from gdpo_tune.spec.dry_run import render_dry_run, render_needs

    cli.set_written_variables(spec)
    size = measure_policy(spec.policy, spec.model.revision)
    description = describe_policy(spec.policy, spec.model.revision)
    print(render_dry_run(spec, size, description))
    print(f"\n{render_needs([*needs, *cli.find_problems(spec)])}")
    print_cluster()
    cli.check_trainable(spec)
    if spec.data.is_local and not any(need.key == "data.source" for need in needs):
        from gdpo_tune.tasks.dataset import check_data

        check_data(spec.data, spec.training, spec.sandbox.modules)
    has_references = spec.data.source and spec.data.is_local and not needs
    has_start = spec.start is not None and (has_references or not spec.data.source)
    if task_files.is_task_file(spec.task) or has_references or has_start:
        with task_files.build_task(
            spec.task, spec.training, spec.sandbox, spec.data, scoring=spec.scoring
        ) as task:
            found = cli.check_demonstrations(spec, task) if has_start else {}
            if task_files.is_task_file(spec.task) or has_references:
                found |= {**task.environment(), **cli.check_scoring(spec, task)}
            for name, value in found.items():
                print(f"{name}: {value}")
    return 0


def print_cluster() -> bool:
    """Print the cluster that RAY_ADDRESS names and whom it lets in; return whether there is one."""
    from gdpo_tune.tuning.ray.cluster import describe_access

    if address := os.environ.get(addresses.RAY_ADDRESS):
        address = addresses.check_ray_address(address, addresses.RAY_ADDRESS)
        print(f"cluster: {addresses.RAY_ADDRESS} = {address} {describe_access(address)}".rstrip())
    return bool(address)


def print_environment(spec: SweepSpec) -> None:
    """Refuse a sweep that cannot run here, and print the environment of its task."""
    from gdpo_tune.spec.machine import list_other_sweeps, list_sandbox_warnings
    from gdpo_tune.tuning.ray.cluster import find_thread_problem

    for problem in cli.find_problems(spec):
        raise problem
    has_cluster = print_cluster()
    if not has_cluster and (problem := find_thread_problem()):
        raise ClusterError(problem)
    others = () if has_cluster else list_other_sweeps()
    for warning in (*list_sandbox_warnings(spec), *others):
        print(f"warning: {warning}", file=sys.stderr)
    for name, value in cli.preflight(spec).items():
        print(f"{name}: {value}")


def _find_status(result: SweepResult) -> int:
    from gdpo_tune.results.wording import explain_dead_start
    from gdpo_tune.tuning.plan import find_dead_start

    dead = find_dead_start(result.spec, result.records)
    if dead is not None and dead.directory is not None:
        text = explain_dead_start(dead.reason, dead.directory)
        print(f"error: trial {dead.number} and all others: {text}", file=sys.stderr)
        return ExitCode.NO_SIGNAL
    trained = [record for record in result.records if not record.is_initial]
    if not trained or any(record.state != "failed" for record in trained):
        return ExitCode.DONE
    print("error: every trial failed; correct the cause, then start with --fresh", file=sys.stderr)
    return ExitCode.FAILED


def _submit_sweep(spec: SweepSpec, options: argparse.Namespace) -> int:
    from gdpo_tune.clusters.backends.submit import (
        Submission,
        build_jobs_api,
        explain_lost_tracking,
        submit,
    )
    from gdpo_tune.core.redaction import redact_passwords

    for override in options.overrides:
        shown = redact_passwords(override)
        if shown != override:
            raise UsageError(
                f"--set {shown}: with a password, which the cluster's list of jobs would show\n"
                "    fix: leave it out; MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD on "
                "the cluster hold it"
            )
    storage = spec.storage if spec.address else os.path.abspath(spec.storage)
    words = ["--name", spec.name]
    for name in ("fresh", "accept_changes"):
        words += [f"--{name.replace('_', '-')}"] if getattr(options, name) else []
    for change in [*options.overrides, f"storage={json.dumps(storage)}"]:
        words += ["--set", change]
    directory = (options.working_dir or Path()).absolute()
    submission = Submission(Path(options.space), tuple(words), spec.name, storage, directory)
    print(f"kept in {storage}/{spec.name}, as the nodes of the cluster see it")
    problem = explain_lost_tracking(spec)
    if problem:
        print(f"warning: {problem}; --set tracking.uri=http://SERVER:5000", file=sys.stderr)
    return submit(submission, build_jobs_api(options.submit), follow=not options.detach)


if __name__ == "__main__":
    cli.run_command(main)
