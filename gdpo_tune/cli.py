"""What the commands share: exit statuses and how an error reaches a person.

Exit status 0: done. 1: something broke. 2: the request was wrong, nothing was started.
130: stopped by Ctrl-C, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.files import is_disk_full

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

INTERRUPTED = 130


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a command's `main` on the process's arguments and exit with its status."""
    try:
        status = main(sys.argv[1:])
    except GdpoTuneError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_status
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(f"error: no space left on a disk: {error}; make room, and try again", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on where this one stopped.", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that decide which sweep a command speaks of."""
    parser.add_argument("space", metavar="SEARCH_SPACE.yaml", help="what to search")
    add_override_argument(parser)
    parser.add_argument("--name", help="name of the sweep (default: the file's name:, or its stem)")


def add_override_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, which lays single values over the file."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override one key of the file, such as training.length_limit=20; may be repeated",
    )


def add_pick_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--pick`, which chooses among the trials of a sweep."""
    parser.add_argument(
        "--pick",
        metavar="CHOICE",
        help="what to take of the sweep: knee, max_<metric>, min_<metric>, a trial's number, "
        "'max correctness where length >= 0.9 and format >= 0.95', or weights of preference such "
        "as 'prefer correctness=2, length=1'",
    )


def probe_environment(spec: SweepSpec, *, tracked: bool = True) -> dict[str, str]:
    """Start and ask whatever trials will need: refuse at once what would fail every one of them.

    Args:
        spec: the sweep.
        tracked: whether its tracking server will be needed.

    Returns:
        What the task says of its environment, such as the tier of its sandbox.

    Raises:
        ResourcesError: the policy does not fit into the share of a GPU that a trial gets.
        PolicyError: the policy cannot be read, or lacks a pad or end token.
        DataError: the data cannot be had, read or used, or a split is too small.
        SandboxUnavailable: the task runs code, and the sandbox for it is not to be had.
        TrackingError: `tracking.required` and the server does not answer.
    """
    from gdpo_tune.core import task_files
    from gdpo_tune.policies.load_policy import check_available
    from gdpo_tune.tasks.data import check_data
    from gdpo_tune.tracking import check_server

    check_available(spec.policy, spec.model.revision)
    check_share(spec)
    check_data(spec.data, spec.training)
    with task_files.build_task(spec.task, spec.training, spec.sandbox, spec.data) as task:
        environment = task.environment()  # starts what the task needs, such as the sandbox
    if tracked:
        check_server(spec)
    return environment


def check_share(spec: SweepSpec) -> None:
    """Refuse a share of this machine's GPUs in which the policy could not be trained.

    Raises:
        ResourcesError: with the share that could do.
    """
    if spec.resources.gpus:
        from gdpo_tune.policies.size import parameters
        from gdpo_tune.spec import check_gpu_share, device_memory

        check_gpu_share(spec, parameters(spec.policy), device_memory())
