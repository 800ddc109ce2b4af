"""Console script `gdpo-tune`, and what its commands share.

    gdpo-tune sweep search_spaces/code.yaml     the same as python -m gdpo_tune.sweep ...
    gdpo-tune --print-completion bash           a completion script for bash, zsh or tcsh

Exit status 0: done. 1: something broke. 2: the request was wrong, and nothing was started.
7: no training had a signal, because its rewards were equal in every group.
130: stopped by Ctrl-C; 143: by SIGTERM; 129: by SIGHUP; run the same command to resume.
"""

from __future__ import annotations

import argparse
import codecs
import io
import math
import os
import select
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gdpo_tune.core.errors import (
    DataError,
    EngineError,
    ExitCode,
    GdpoTuneError,
    PolicyError,
    ResourcesError,
    TaskFileError,
    UsageError,
)
from gdpo_tune.core.files import (
    expand_path,
    explain_no_space,
    find_path_problem,
    is_directory,
    is_disk_full,
)
from gdpo_tune.core.http import bypass_proxies_on_loopback
from gdpo_tune.core.text import join_names, suggest

if TYPE_CHECKING:
    from gdpo_tune.results.open_sweep import Sweep
    from gdpo_tune.spec import SweepSpec

COMMANDS = {
    "init": "write a commented search space for a task and a policy",
    "score": "score texts with the rewards of a search space, without training",
    "sweep": "search for the Pareto front of a multi-reward RL run",
    "train": "train one policy, without a search",
    "evaluate": "evaluate a policy on the test prompts of a sweep",
    "report": "regenerate a sweep's report, or pick one of its candidates",
    "compare": "compare two sweeps, or two normalization modes of one",
    "watch": "watch a sweep in a browser while it runs, and steer it",
    "merge": "merge policies of a sweep toward a target",
    "steer": "stop, add or clone trials of a running sweep, change its limits, or pause it",
    "export": "write a training, or a merge, for another library",
    "publish": "publish a policy of a sweep, or its whole front, on the Hub",
    "schedule": "run sweeps by a schedule",
    "doctor": "show what this machine can do, and what a sweep lacks on it",
}
"""Name of a command, which is a module of this package -> its help."""
REFUSING = ("strict", "surrogateescape")
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
    parser = SuggestingParser(prog="gdpo-tune", description=sys.modules["gdpo_tune"].__doc__)
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
    """Run a command's `main` on `words`, by default the process's own; exit with its status."""
    prepare_output()
    bypass_proxies_on_loopback()
    os.environ.setdefault("DO_NOT_TRACK", "1")  # libraries report to their makers otherwise
    try:
        status = command(sys.argv[1:] if words is None else words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        status = ExitCode.PIPE_CLOSED
    except GdpoTuneError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_status
    except OSError as error:
        if not is_disk_full(error):
            raise
        place = Path(str(error.filename)).parent if error.filename else Path()
        reason, fix = explain_no_space(place, error)
        print(f"error: {error}: {reason}\n    fix: {fix} and run it again", file=sys.stderr)
        status = ExitCode.FAILED
    except KeyboardInterrupt as error:
        print("Interrupted. Run the same command to resume.", file=sys.stderr)
        status = error.args[0] if error.args else ExitCode.INTERRUPTED
    sys.exit(status)


def prepare_output() -> None:
    """Let output be written whatever the terminal can show, and even where nobody reads it.

    In a terminal or a log without UTF-8, tables fall back to ASCII.
    """
    codecs.register_error(SPELLED_OUT, _spell_out)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in REFUSING:
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


def outlive_readers() -> None:
    """Let this process go on when nobody reads its output any more; what it prints is lost then.

    For long work: Ctrl-C ends `tee` first, and `head` ends when it has enough.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue  # a notebook, or a test, shows it
        stream.flush()
        raw = _OutlivingFile(stream.fileno(), "w", closefd=False)
        wrapped = io.TextIOWrapper(
            io.BufferedWriter(raw),
            stream.encoding,
            stream.errors,
            line_buffering=stream.line_buffering or name == "stderr",
        )
        setattr(sys, name, wrapped)


class _OutlivingFile(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def parse_directory(text: str) -> Path:
    """Return the value of an argument that names a directory, with `~` expanded."""
    problem = find_path_problem(text) if text else "empty, as a variable is that has no value"
    if problem:
        raise argparse.ArgumentTypeError(f"{text!r}: {problem}")
    return expand_path(text)


SWEEP = "a sweep: its directory, its name under runs/, or its file"
"""Help of an argument that selects a sweep."""


class SuggestingParser(argparse.ArgumentParser):
    """Parser that names the choice which is close to a wrong one, as Python 3.14 can."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action,
                f"unknown value {value!r}: {suggest(value, action.choices)}choose from "
                f"{join_names(action.choices)}",
            )


class Parser(SuggestingParser):
    """Command line of a command, whose module has its name and its help; imports nothing heavy.

    A command that prints how to run it again takes no `abbreviations`: it finds its options by
    their whole names.
    """

    def __init__(self, module: str, *, abbreviations: bool = False) -> None:
        main = sys.modules["__main__"].__spec__ if module == "__main__" else None
        super().__init__(
            prog=f"python -m {main.name if main else module}",
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
        text = "override one key of the file, such as training.length_limit=20; may be repeated"
        options: dict[str, Any] = {"metavar": "KEY=VALUE", "default": [], "help": text}
        self.add_argument("--set", action="append", dest="overrides", **options)

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

    def modes(self, sweep: str) -> None:
        """Add `--modes`, which compares two normalization modes of one sweep."""
        text = f"two normalization modes of {sweep}, such as gdpo grpo"
        self.add_argument("--modes", nargs=2, metavar="MODE", help=text)


def integer(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number within bounds."""

    def number(text: str) -> int:  # argparse says "invalid number value" by this name
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}")
        return value

    return number


@contextmanager
def hold_directory(directory: Path, lock: str) -> Generator[None]:
    """Hold the lease of a command's directory, a file there, during the block.

    Raises:
        UsageError: the directory cannot be written, or another process holds the lease.
    """
    from gdpo_tune.core.locks import Lease

    try:
        lease = Lease(directory / lock)
    except OSError as error:
        reason = f"{directory} cannot be used: {error}; choose another --out"
        raise UsageError(reason) from error
    try:
        yield
    finally:
        lease.release()


@contextmanager
def name_file(file: str) -> Generator[None]:
    """Name the file of a sweep in the errors of its policy, data and machine."""
    try:
        yield
    except (PolicyError, DataError, ResourcesError, EngineError, TaskFileError) as error:
        text = str(error)
        raise type(error)(text if text.startswith(file) else f"{file}: {text}") from error


def find_problems(spec: SweepSpec) -> Iterator[UsageError]:
    """Yield what a sweep lacks on this machine: resources, packages and variables."""
    from gdpo_tune.spec.machine import find_machine_problems, find_unset_webhook

    yield from find_machine_problems(spec)
    yield from find_unset_webhook(spec)


def preflight(spec: SweepSpec, *, tracked: bool = True) -> dict[str, str]:
    """Start what trials need, and describe it; refuse at once what would fail all of them.

    Raises:
        ResourcesError: the policy does not fit into the share of a GPU that a trial gets.
        PolicyError: the policy cannot be read, lacks an end token, or its chat template an
            argument of `model.chat_template_kwargs`.
        DataError: the data is missing, unreadable or unusable, or a split is too small.
        UsageError: a reward function of a task in a file returns what is no reward.
        SandboxUnavailable: the task runs code, and no sandbox for it is available.
        TrackingError: `tracking.required` and the server does not answer.
    """
    from gdpo_tune.core import task_files
    from gdpo_tune.policies.load_policy import check_policy_available
    from gdpo_tune.tasks.dataset import check_data
    from gdpo_tune.tracking.server import check_server

    check_policy_available(spec.policy, spec.model.revision)
    check_trainable(spec)
    check_data(spec.data, spec.training, spec.sandbox.modules)
    with task_files.build_task(
        spec.task, spec.training, spec.sandbox, spec.data, scoring=spec.scoring
    ) as task:
        environment = task.environment()  # starts what the task needs, such as the sandbox
        environment |= check_scoring(spec, task) | check_demonstrations(spec, task)
    if tracked:
        check_server(spec)
    return environment


def check_scoring(spec: SweepSpec, task: Any) -> dict[str, str]:
    """Check what a task calls right before any work, print warnings, and return what was found.

    Errors are those of `preflight` about rewards, prompts and data.
    """
    from gdpo_tune.core import task_files

    if task_files.is_task_file(spec.task):
        from gdpo_tune.policies.prompt_choice import choose_prompt_format, load_local_tokenizer
        from gdpo_tune.tasks.task_process import check_rewards

        turns, found = task.problems("train", 1, 0)[0].turns, dict[str, str]()
        tokenizer = load_local_tokenizer(spec.policy, spec.model.revision) if turns else None
        if tokenizer is not None:
            own = task.instructions, spec.model, task.tool_format
            choose_prompt_format(spec.policy, tokenizer, *own).render(turns)
        if task.tool_format is not None:
            names = join_names(tool.__name__ for tool in task.tools)
            found["tools"] = f"{names}; called between turns, and their tokens have no gradient"
        times, warnings = check_rewards(task)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return {**found, "rewards checked": times}
    if not spec.data.source:
        return {}
    from gdpo_tune.policies.prompt_choice import read_back
    from gdpo_tune.tasks.references import WARN_BELOW, check_references, format_wrong_references

    found = check_references(
        *(spec.data, spec.sandbox, task),
        read_back=lambda texts: read_back(spec.policy, spec.model.revision, texts)[1],
    )
    if found.share < WARN_BELOW:
        share = f"{found.right} of {found.count}"
        print(f"warning: references: {share} earn full {found.reward}", file=sys.stderr)
        print(format_wrong_references(found), file=sys.stderr)
    return {"references": str(found)}


def check_demonstrations(spec: SweepSpec, task: Any) -> dict[str, str]:
    """Collect the demonstrations of a start as it will, and return what was found, for a person.

    Raises:
        DataError: it could not learn from them; see `collect_demonstrations`.
    """
    if spec.start is None:
        return {}
    from gdpo_tune.policies.prompt_choice import choose_prompt_format, load_local_tokenizer
    from gdpo_tune.training.demonstrations import collect_demonstrations

    tokenizer = load_local_tokenizer(spec.policy, spec.model.revision)
    if tokenizer is None:
        return {"demonstrations": "counted once the policy is on this machine"}
    tools = getattr(task, "tool_format", None)
    prompts = choose_prompt_format(spec.policy, tokenizer, task.instructions, spec.model, tools)
    found = collect_demonstrations(spec.build_start_config({}, 0, Path()), task, prompts)
    if found.left_out:
        print(f"warning: demonstrations: {found}", file=sys.stderr)
    return {"demonstrations": str(found)}


def prepare_machine(spec: SweepSpec, processes: int = 1) -> None:
    """Prepare a training of `processes` without a search; see `preflight`."""
    from gdpo_tune.spec.machine import check_resources, list_sandbox_warnings

    set_written_variables(spec)
    limit_devices(spec, processes)
    check_resources(spec)
    for warning in list_sandbox_warnings(spec):
        print(f"warning: {warning}", file=sys.stderr)
    for name, value in preflight(spec, tracked=False).items():
        print(f"{name}: {value}")


def write_figures(sweep: Sweep) -> None:
    """Write the report of a sweep, the figure of its front and its table."""
    # Only now: plotting libraries take a second to import, and a refusal needs none.
    from gdpo_tune.figures.front_png import write_front_png
    from gdpo_tune.figures.report_page import write_report
    from gdpo_tune.results.front_table import write_front_csv

    write_report(sweep)
    write_front_png(sweep)
    write_front_csv(sweep.spec.directory, sweep.front)


def limit_devices(spec: SweepSpec, processes: int = 1) -> None:
    """Let this process see the GPUs of a training of `processes`; call it before torch.

    A training without a GPU must not see one, and TRL takes every one that it sees.
    """
    count = math.ceil(spec.resources.gpus) * processes
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices.split(",")[:count])


def set_written_variables(spec: SweepSpec) -> None:
    """Set the variables in this process whose values the file has: it fetches policies and data."""
    os.environ.update(spec.resources.written_variables)


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written at the end; a `UsageError` names its option."""
    if path and (is_directory(path) or not is_directory(path.absolute().parent)):
        raise UsageError(
            f"{option} {path}: it is a directory, or its directory is missing\n"
            "    fix: name a file in a directory that exists"
        )


def check_trainable(spec: SweepSpec) -> None:
    """Refuse template arguments without effect, useless adapters, and too small a GPU share."""
    from gdpo_tune.core.policy_shapes import find_expert_problem, find_naming_problem
    from gdpo_tune.policies.load_policy import measure_policy
    from gdpo_tune.policies.prompt_choice import check_template_kwargs, read_chat_template
    from gdpo_tune.spec.gpu import may_use_vllm

    template = read_chat_template(spec.policy, spec.model.revision)
    check_template_kwargs(spec.policy, template, spec.model.chat_template_kwargs)
    policy = measure_policy(spec.policy, spec.model.revision)
    if policy and spec.model.lora_rank:
        problem = find_expert_problem(policy.shapes, spec.model.lora_targets)
        if may_use_vllm(spec):
            problem = problem or find_naming_problem(policy.config)
        if problem:
            raise PolicyError(problem)
    if spec.resources.gpus:
        from gdpo_tune.spec import read_device_memory
        from gdpo_tune.spec.gpu import check_gpu_share

        check_gpu_share(spec, policy, read_device_memory())
