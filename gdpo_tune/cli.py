"""Console script `gdpo-tune`, and what its commands share.

    gdpo-tune sweep search_spaces/code.yaml     the same as python -m gdpo_tune.sweep ...
    gdpo-tune --print-completion bash           a completion script for bash, zsh or tcsh

Exit status 0: done. 1: something broke. 2: the request was wrong, and nothing was started.
130: stopped by Ctrl-C; run the same command to resume.
"""

from __future__ import annotations

import argparse
import codecs
import io
import math
import os
import select
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gdpo_tune.core.errors import (
    DataError,
    EngineError,
    GdpoTuneError,
    PolicyError,
    ResourcesError,
    TaskFileError,
)
from gdpo_tune.core.files import expand_home, find_path_problem, is_disk_full

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
PIPE_CLOSED = 141
"""Exit status if the reader of the output has ended, as shells have it."""
COMMANDS = {
    "init": "write a commented search space for a task and a policy",
    "sweep": "search for the Pareto front of a multi-reward RL run",
    "train": "train one policy, without a search",
    "report": "regenerate a sweep's report, or pick one of its candidates",
    "compare": "compare two sweeps, or two normalization modes of one",
    "watch": "watch a sweep in a browser while it runs, and steer it",
    "merge": "merge policies of a sweep toward a wish",
    "steer": "stop, add or clone trials of a running sweep, change its limits, or pause it",
    "export": "write a training, or a merge, for another library",
    "publish": "publish a policy of a sweep, or its whole front, on the Hub",
    "schedule": "run sweeps by a schedule",
}
"""Name of a command, which is a module of this package -> its help."""
SPELLED_OUT = "gdpo_tune.spelled_out"
"""Name of the handler of characters that the output's encoding lacks."""
SPELLINGS = {"±": "+-", "●": "*", "○": "o", "▾": "v", "—": "-", "…": "...", "★": "*", "─": "-"}
"""Character -> what stands for it there; any other is a question mark."""
FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""Shell -> how its completion lists files: the value of `shtab.FILE`, without the import."""


def main() -> NoReturn:
    """Run `gdpo-tune`: hand the arguments behind a command's name to that command."""
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        run_command(import_module(f"gdpo_tune.{words[0]}").main, words[1:])
    build_parser().parse_args(words)
    build_parser().error(f"name a command: {', '.join(COMMANDS)}")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `gdpo-tune`; those of its commands are part of it for completion only."""
    parser = argparse.ArgumentParser(prog="gdpo-tune", description=sys.modules["gdpo_tune"].__doc__)
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        help="print a script that completes commands and options in this shell",
        choices=("bash", "zsh", "tcsh"),
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


class _PrintCompletion(argparse.Action):
    """Print the completion script of a shell, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        import shtab

        complete = argparse.ArgumentParser(prog=parser.prog)
        commands = complete.add_subparsers()
        for name, text in COMMANDS.items():
            whole = import_module(f"gdpo_tune.{name}").build_parser()
            commands.add_parser(name, help=text, parents=[whole], add_help=False)
        print(shtab.complete(complete, str(values)))
        parser.exit()


def run_command(
    command: Callable[[Sequence[str]], int], words: Sequence[str] | None = None
) -> NoReturn:
    """Run a command's `main`, print its errors, and exit with its status.

    Args:
        command: takes the arguments and returns the exit status.
        words: the arguments; None: those of the process.
    """
    prepare_output()
    try:
        status = command(sys.argv[1:] if words is None else words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        status = PIPE_CLOSED
    except GdpoTuneError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_status
    except OSError as error:
        if not is_disk_full(error):
            raise
        fix = "make room, and run the same command again"
        print(f"error: no space left on a disk: {error}; {fix}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("Interrupted. Run the same command to resume.", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


def prepare_output() -> None:
    """Let output be written whatever the terminal can show, and even where nobody reads it.

    In a terminal or a log without UTF-8, letters stand for the marks of tables.
    """
    codecs.register_error(SPELLED_OUT, _spell_out)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in (
            "strict",
            "surrogateescape",
        ):
            stream.reconfigure(errors=SPELLED_OUT)


def _spell_out(error: UnicodeError) -> tuple[str, int]:
    """Return what stands for a character that an encoding lacks, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return SPELLINGS.get(error.object[error.start], "?"), error.start + 1


def _is_output_closed() -> bool:
    """Return whether the reader of the output, such as `head`, has gone; then nobody gets more."""
    output, poll = sys.stdout.fileno(), select.poll()
    poll.register(output)
    is_closed = any(events & select.POLLERR for _, events in poll.poll(0))
    if is_closed:  # what is still in the buffer must not fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return is_closed


def parse_directory(text: str) -> Path:
    """Return the value of an argument that names a directory, with `~` expanded.

    Raises:
        ArgumentTypeError: no directory can have this name.
    """
    problem = find_path_problem(text) if text else "empty, as a variable is that has no value"
    if problem:
        raise argparse.ArgumentTypeError(f"{text!r}: {problem}")
    return expand_home(text)


SWEEP = "a sweep: its directory, its name under runs/, or its file"
"""Help of an argument that selects a sweep."""
READ_SWEEP = f"{SWEEP}; or hf://USER/NAME, where it was published"
"""Help of an argument that selects a sweep, which is only read."""


class Parser(argparse.ArgumentParser):
    """Command line of a command, whose module has its name and its help; imports nothing heavy."""

    def __init__(self, module: str, *, abbreviations: bool = False) -> None:
        name = sys.modules["__main__"].__spec__.name if module == "__main__" else module
        super().__init__(
            prog=f"python -m {name}",
            description=sys.modules[module].__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=abbreviations,
        )

    def file(self, name: str, help: str, **options: Any) -> None:
        """Add an argument that shells complete with the names of files."""
        vars(self.add_argument(name, help=help, **options))["complete"] = FILES

    def flag(self, name: str, help: str) -> None:
        """Add a switch."""
        self.add_argument(name, action="store_true", help=help)

    def overrides(self) -> None:
        """Add `--set`, which overrides single values of the file."""
        self.add_argument(
            "--set",
            metavar="KEY=VALUE",
            action="append",
            default=[],
            dest="overrides",
            help="override one key of the file, such as training.length_limit=20; may be repeated",
        )

    def spec(self, metavar: str, help: str) -> None:
        """Add the arguments that select the sweep of a command and change its file."""
        self.file("space", help, metavar=metavar)
        self.overrides()
        text = "name of the sweep (default: the file's name:, or its stem)"
        self.add_argument("--name", help=text)

    def pick(self) -> None:
        """Add `--pick`, which names the chosen candidate of a sweep."""
        self.add_argument(
            "--pick",
            metavar="CHOICE",
            help="candidate to take from the sweep: knee, max_<metric>, min_<metric>, a trial's "
            "number, a checkpoint such as 7@40, a merge such as merge-27, or "
            "'max correctness where length >= 0.9 and format >= 0.95'",
        )

    def recipe(self) -> None:
        """Add `--recipe`, which names a search space for another policy, other data or lengths."""
        self.add_argument(
            "--recipe",
            metavar="NAME|FILE",
            default="",
            help="search space that ships, such as tools_qwen, or a file: its policy, data, "
            "lengths, batch and learning rate replace those of the sweep; weights, normalization "
            "and group size stay the candidate's",
        )

    def modes(self) -> None:
        """Add `--modes`, which compares two normalization modes of one sweep."""
        text = "two normalization modes of the one sweep, such as gdpo grpo"
        self.add_argument("--modes", nargs=2, metavar="MODE", help=text)


def integer(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number within bounds."""

    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}")
        return value

    return parse


@contextmanager
def name_file(file: str) -> Generator[None]:
    """Name the file of a sweep in the errors of its policy, data and machine."""
    try:
        yield
    except (PolicyError, DataError, ResourcesError, EngineError, TaskFileError) as error:
        text = str(error)
        raise type(error)(text if text.startswith(file) else f"{file}: {text}") from error


def probe_environment(spec: SweepSpec, *, tracked: bool = True) -> dict[str, str]:
    """Start and check everything that trials need; refuse at once what would fail all of them.

    Args:
        spec: the sweep.
        tracked: whether its tracking server will be needed.

    Returns:
        The task's description of its environment, such as the tier of its sandbox.

    Raises:
        ResourcesError: the policy does not fit into the share of a GPU that a trial gets.
        PolicyError: the policy cannot be read, or lacks a pad or end token.
        DataError: the data is missing, unreadable or unusable, or a split is too small.
        SandboxUnavailable: the task runs code, and no sandbox for it is available.
        TrackingError: `tracking.required` and the server does not answer.
    """
    from gdpo_tune.core import task_files
    from gdpo_tune.policies.hub import check_policy_available
    from gdpo_tune.tasks.data.dataset import check_data
    from gdpo_tune.tracking import check_server

    check_policy_available(spec.policy, spec.model.revision)
    check_share(spec)
    check_data(spec.data, spec.training)
    with task_files.build_task(spec.task, spec.training, spec.sandbox, spec.data) as task:
        environment = task.environment()  # starts what the task needs, such as the sandbox
    if tracked:
        check_server(spec)
    return environment


def prepare_machine(spec: SweepSpec, processes: int = 1) -> None:
    """Prepare a training in so many processes without a search, and print what its trials need.

    Raises:
        GdpoTuneError: as `probe_environment`.
    """
    from gdpo_tune.spec import check_resources, list_sandbox_warnings, settle_pack

    spec = settle_pack(spec, 1)  # no other trial shares this process
    set_written_variables(spec)
    # Before torch: a training without a GPU must not see one, and TRL takes every one that it sees.
    count = math.ceil(spec.resources.gpus) * processes
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices.split(",")[:count])
    check_resources(spec)
    for warning in list_sandbox_warnings(spec):
        print(f"warning: {warning}", file=sys.stderr)
    for name, value in probe_environment(spec, tracked=False).items():
        print(f"{name}: {value}")


def set_written_variables(spec: SweepSpec) -> None:
    """Set the variables in this process whose values the file has: it fetches policies and data."""
    os.environ.update(spec.resources.written_variables)


def check_share(spec: SweepSpec) -> None:
    """Refuse a share of this machine's GPUs in which the policy could not be trained.

    Raises:
        ResourcesError: the message names a share that would suffice.
    """
    if spec.resources.gpus:
        from gdpo_tune.policies.load_policy import measure_policy
        from gdpo_tune.spec import check_gpu_share, read_device_memory

        check_gpu_share(spec, measure_policy(spec.policy), read_device_memory())
