"""Run sweeps by a schedule: the files of `sweeps/` say when and where.

    python -m gdpo_tune.schedule sweeps/ validate          every problem of files and machine
    python -m gdpo_tune.schedule sweeps/ next              when runs are due
    python -m gdpo_tune.schedule sweeps/ tick              do what is due; call it now and then
    python -m gdpo_tune.schedule sweeps/ serve             tick again and again
    python -m gdpo_tune.schedule sweeps/ run NAME --wait   one run, now
    python -m gdpo_tune.schedule sweeps/ status            the state of runs
    python -m gdpo_tune.schedule sweeps/ stop NAME         end the active run; it can be resumed
    python -m gdpo_tune.schedule sweeps/ render --to ...   files that let another scheduler tick

Exit status 0: done. 1: something broke, or the run failed. 2: a file, the storage or a backend is
wrong. 3: the run was skipped. 4: it was skipped because its budget is spent. 5: it was stopped. 6:
a backend does not answer. 130: stopped by Ctrl-C (143: SIGTERM); the active run keeps running.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.clusters import TARGETS
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.files import explain_write_errors, write_atomically
from gdpo_tune.core.system import stop_on_signals

if TYPE_CHECKING:
    from gdpo_tune.clusters.load_schedules import LoadedSweeps, ScheduledSweep
    from gdpo_tune.clusters.scheduler import SweepScheduler


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    parser.add_argument("sweeps", metavar="SWEEPS", help="a directory of scheduled sweeps, or one")
    words = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=cli.SuggestingParser
    )
    for word, (summary, _) in COMMANDS.items():
        command = words.add_parser(word, help=summary, allow_abbrev=False)
        add = command.add_argument
        if word in ("run", "stop"):
            add("name", metavar="NAME", help="name of the sweep")
        if word in ("serve", "run"):
            default, text = 30.0 if word == "serve" else 10.0, "seconds between polls"
            add("--every", type=_parse_seconds, default=default, help=text)
        if word == "validate":
            add("--files-only", action="store_true", help="check the files, not this machine")
        elif word == "next":
            number = cli.integer(1, 1000)
            add("--count", type=number, default=5, help="times of each (default: 5)")
        elif word == "run":
            which = command.add_mutually_exclusive_group()
            text = "the run of that time, with zone (default: the schedule's last one)"
            which.add_argument("--at", type=_parse_time, metavar="TIME", help=text)
            which.add_argument("--now", action="store_true", help="a new run, of this second")
            add("--wait", action="store_true", help="stay until it has ended")
        elif word == "render":
            add("--to", choices=TARGETS, required=True, dest="target", help="other scheduler")
            text = "directory for the files (default: print them)"
            add("--out", type=Path, metavar="DIRECTORY", help=text)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Do what `arguments` ask for and return the exit status."""
    options = build_parser().parse_args(arguments)
    return COMMANDS[options.command][1](options)


def read_clock() -> datetime:
    """Return the time in UTC."""
    return datetime.now(UTC)


def _validate(options: argparse.Namespace) -> int:
    from gdpo_tune.clusters.console import ConsolePrinter, find_errors, find_notes, find_warnings
    from gdpo_tune.core.text import align_columns
    from gdpo_tune.spec.dry_run import describe_time

    loaded, errors = _load(options), list["tuple[ScheduledSweep, GdpoTuneError]"]()
    for sweep in loaded.sweeps:
        for warning in find_warnings(sweep):
            print(f"warning: {warning}", file=sys.stderr)
        for error in [] if options.files_only else find_errors(sweep):
            if sweep.settings.enabled:
                errors.append((sweep, error))
                continue
            reason = str(error).splitlines()[0][:100]
            print(f"{sweep.file}: disabled; it could not run here: {reason}", file=sys.stderr)
    for note in [] if options.files_only else find_notes(loaded.sweeps):
        print(f"note: {note}", file=sys.stderr)
    status = ConsolePrinter().print_errors(loaded, errors)
    if not status:
        print(f"{len(loaded.sweeps)} valid; how long a run takes:")
        rows = [(f"  {sweep.name}", describe_time(sweep.spec)) for sweep in loaded.sweeps]
        print(*align_columns(rows), sep="\n")
    return status


def _show_next(options: argparse.Namespace) -> int:
    from gdpo_tune.clusters.console import ConsolePrinter, print_next

    loaded = _load(options)
    print_next(loaded.sweeps, read_clock(), options.count)
    return ConsolePrinter().print_errors(loaded)


def _tick(options: argparse.Namespace) -> int:
    from gdpo_tune.clusters.console import ConsolePrinter, tick_sweeps

    return tick_sweeps(options.sweeps, read_clock, ConsolePrinter())


def _serve(options: argparse.Namespace) -> int:
    from gdpo_tune.clusters.console import ConsolePrinter, tick_sweeps

    ended, printer = threading.Event(), ConsolePrinter()
    with stop_on_signals(lambda _: ended.set()):
        while not ended.is_set():
            tick_sweeps(options.sweeps, read_clock, printer)
            ended.wait(options.every)
    return 0


def _run(options: argparse.Namespace) -> int:
    from gdpo_tune.clusters.console import ConsolePrinter

    context = open_named(options)
    due, report = context.choose_due_time(options.at, now=options.now), ConsolePrinter().print_news
    return context.run(due, report=report, wait=options.wait, every=options.every)


def _show_status(options: argparse.Namespace) -> int:
    from gdpo_tune.clusters.console import ConsolePrinter, print_status
    from gdpo_tune.clusters.scheduler import SweepScheduler

    loaded, errors = _load(options), list["tuple[ScheduledSweep, GdpoTuneError]"]()
    for sweep in loaded.sweeps:
        try:
            print_status(SweepScheduler.open(sweep, read_clock))
        except GdpoTuneError as error:
            errors.append((sweep, error))
    return ConsolePrinter().print_errors(loaded, errors)


def _stop(options: argparse.Namespace) -> int:
    from gdpo_tune.clusters.console import print_events

    context = open_named(options)
    if not context.stop():
        print(f"no run of {context.sweep.name} is active")
    elif not context.events and context.state.active is not None:
        print(f"{context.state.active.name} was asked to stop already, and has not ended yet")
    print_events(context)
    if context.backend_errors:
        raise context.backend_errors[0]
    return 0


def _render(options: argparse.Namespace) -> int:
    from gdpo_tune.clusters.console import find_notes
    from gdpo_tune.clusters.render import render_ticker

    loaded = _load(options)
    if loaded.error is not None:
        raise loaded.error
    texts = render_ticker(loaded.sweeps, options.sweeps, options.target)
    if options.out is None:
        print("\n".join(texts.values()), end="")
    else:
        with explain_write_errors(f"--out {options.out}"):
            options.out.mkdir(parents=True, exist_ok=True)
            for file, text in texts.items():
                write_atomically(options.out / file, text)
                print(options.out / file)
    for note in find_notes(loaded.sweeps):
        print(f"note: {note}", file=sys.stderr)
    return 0


def _parse_time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise argparse.ArgumentTypeError(f"{text!r} has no zone: write {text}Z for UTC")
        time = time.astimezone(UTC).replace(microsecond=0)
    except (ValueError, OverflowError):
        time = None
    if time is None or time.year < 1970:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write it like 2026-03-29T02:00:00Z"
        )
    return time


def _parse_seconds(text: str) -> float:
    if not 0.1 <= float(text) <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: write 0.1 to 86400 seconds")
    return float(text)


def _load(options: argparse.Namespace) -> LoadedSweeps:
    from gdpo_tune.clusters.load_schedules import load_sweeps

    return load_sweeps(options.sweeps)


def open_named(options: argparse.Namespace) -> SweepScheduler:
    """Open the schedule of a name."""
    from gdpo_tune.clusters.scheduler import SweepScheduler

    return SweepScheduler.open(_load(options).find(options.name), read_clock)


COMMANDS: dict[str, tuple[str, Callable[[argparse.Namespace], int]]] = {
    "validate": ("check every file, and this machine", _validate),
    "next": ("print when runs are due", _show_next),
    "tick": ("do what is due, once", _tick),
    "serve": ("tick again and again", _serve),
    "run": ("run one sweep, now or for a time", _run),
    "status": ("print the state of runs", _show_status),
    "stop": ("end the run of a sweep", _stop),
    "render": ("write files that let another scheduler tick", _render),
}
"""Word -> its help, and what it does."""


if __name__ == "__main__":
    cli.run_command(main)
