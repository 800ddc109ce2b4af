"""Run sweeps by a schedule: the files of `sweeps/` say when and where.

    python -m gdpo_tune.schedule sweeps/ validate          every problem of files and machine
    python -m gdpo_tune.schedule sweeps/ next              when runs are due
    python -m gdpo_tune.schedule sweeps/ tick              do what is due; call it now and then
    python -m gdpo_tune.schedule sweeps/ serve             tick again and again
    python -m gdpo_tune.schedule sweeps/ run NAME --wait   one run, for another scheduler
    python -m gdpo_tune.schedule sweeps/ status            how runs stand
    python -m gdpo_tune.schedule sweeps/ stop NAME         end the run under way; it can go on
    python -m gdpo_tune.schedule sweeps/ render --to ...   the schedule for another scheduler

Exit status 0: done. 1: something broke, or the run failed. 2: a file, the storage or a backend is
wrong. 3: the run was skipped. 4: it was skipped because its budget is spent. 5: it was stopped. 6:
a backend does not answer. 130: stopped by Ctrl-C; what runs goes on.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune import cli
from gdpo_tune.clusters import arguments

if TYPE_CHECKING:
    from gdpo_tune.clusters.load_schedules import Loaded, ScheduledSweep
    from gdpo_tune.clusters.tick import Desk
    from gdpo_tune.core.errors import GdpoTuneError


@dataclass(frozen=True)
class Command:
    """One word after the folder."""

    main: Callable[[argparse.Namespace], int]
    what: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda _: None


def parser() -> argparse.ArgumentParser:
    """The command line, without importing anything heavy: `--help` answers at once."""
    parser = argparse.ArgumentParser(
        prog="python -m gdpo_tune.schedule",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("sweeps", metavar="SWEEPS", help="a folder of scheduled sweeps, or one")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.what, allow_abbrev=False))
    return parser


def main(arguments: Sequence[str]) -> int:
    """Do what `arguments` ask for and return the exit status."""
    options = parser().parse_args(arguments)
    return COMMANDS[options.command].main(options)


def clock() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


def validate(options: argparse.Namespace) -> int:
    """Print every problem of the files, and unless told otherwise those of this machine."""
    from gdpo_tune.clusters import reach

    loaded = load(options)
    found = [] if options.files_only else reach.problems(loaded.sweeps)
    for doubt in [doubt for sweep in loaded.sweeps for doubt in reach.doubts(sweep)]:
        print(f"warning: {doubt}", file=sys.stderr)
    waiting = [(sweep, error) for sweep, error in found if not sweep.settings.enabled]
    for sweep, error in waiting:
        why = textwrap.shorten(str(error).splitlines()[0], 100, placeholder=" ...")
        print(f"{sweep.file}: disabled; here it could not run: {why}", file=sys.stderr)
    status = status_of(loaded, [each for each in found if each not in waiting])
    if not status:
        names = ", ".join(sweep.name for sweep in loaded.sweeps)
        print(f"{len(loaded.sweeps)} sound: {names}")
    return status


def show_next(options: argparse.Namespace) -> int:
    """Print the next times of every schedule."""
    from gdpo_tune.clusters.console import print_next

    loaded = load(options)
    print_next(loaded.sweeps, clock(), options.count)
    return status_of(loaded)


def tick(options: argparse.Namespace) -> int:
    """Do everything that is due; files that are wrong keep none of the others from running."""
    from gdpo_tune.clusters.rounds import Rounds

    return Rounds(options.sweeps, clock).once()


def serve(options: argparse.Namespace) -> int:
    """Tick until a signal comes. Files are read again each time."""
    from gdpo_tune.clusters.rounds import Rounds
    from gdpo_tune.core.signals import on_signals

    ended, rounds = threading.Event(), Rounds(options.sweeps, clock)
    with on_signals(ended.set):
        while not ended.is_set():
            rounds.once()
            ended.wait(options.every)
    return 0


def run(options: argparse.Namespace) -> int:
    """Run one sweep now, for a time, or for the last time of its schedule."""
    from gdpo_tune.clusters import asking
    from gdpo_tune.clusters.console import print_events
    from gdpo_tune.core.signals import on_signals

    desk = desk_of(options)
    tick = asking.time_asked_for(desk, options.at, now=options.now)
    said: set[str] = set()

    def tell(desk: Desk) -> None:
        print_events(desk.sweep.name, desk.added)
        for error in desk.trouble:
            if str(error) not in said:
                print(f"warning: {error}", file=sys.stderr, flush=True)
            said.add(str(error))
        desk.added.clear()
        desk.trouble.clear()

    ended = threading.Event()

    def sleep(seconds: float) -> None:
        if ended.wait(seconds):
            asking.hand_back(desk)
            raise KeyboardInterrupt

    # whoever gave the machine takes it back by a signal; elsewhere the run goes on without us
    with on_signals(ended.set) if options.here else nullcontext():
        return asking.run(
            desk,
            tick,
            wait=options.wait,
            once=options.once,
            every=options.every,
            tell=tell,
            sleep=sleep,
        )


def desk_of(options: argparse.Namespace) -> Desk:
    """The schedule that a name means; with `--here` for a machine that runs it itself."""
    from gdpo_tune.clusters.backends import local
    from gdpo_tune.clusters.tick import open_desk

    desk = open_desk(load(options).named(options.name), clock)
    if options.here:
        desk.make_backend = local.here
    return desk


def show_status(options: argparse.Namespace) -> int:
    """Print how runs stand, as far as the last tick knows."""
    from gdpo_tune.clusters.console import print_status
    from gdpo_tune.clusters.load_schedules import ScheduledSweep
    from gdpo_tune.clusters.tick import open_desk
    from gdpo_tune.core.errors import GdpoTuneError

    loaded, found = load(options), list[tuple[ScheduledSweep, GdpoTuneError]]()
    for sweep in loaded.sweeps:
        try:
            desk = open_desk(sweep, clock, read_only=True)
        except GdpoTuneError as error:
            found.append((sweep, error))
        else:
            print_status(sweep, desk.book, clock())
    return status_of(loaded, found)


def stop(options: argparse.Namespace) -> int:
    """Ask the run under way to end. The tick that sees its end writes it down."""
    from gdpo_tune.clusters import asking
    from gdpo_tune.clusters.console import print_events

    desk = desk_of(options)
    if not asking.stop(desk):
        print(f"no run of {desk.sweep.name} is under way")
    elif not desk.added and desk.book.active is not None:
        print(f"{desk.book.active.id} was asked to stop already, and has not ended yet")
    print_events(desk.sweep.name, desk.added)
    if desk.trouble:
        raise desk.trouble[0]
    return 0


def render(options: argparse.Namespace) -> int:
    """Write the schedules for another scheduler, and tell what that cannot express."""
    from gdpo_tune.clusters.render.names import NEWEST_KUBERAY, TARGETS
    from gdpo_tune.clusters.render.targets import render_all
    from gdpo_tune.core.files import write_whole, writing

    refuse_idle(options)
    loaded = load(options)
    if loaded.error is not None:
        raise loaded.error
    rendered = render_all(
        loaded.sweeps,
        options.target,
        python=sys.executable,
        folder=options.out or Path.cwd(),
        now=clock(),
        kuberay=options.kuberay or NEWEST_KUBERAY,
        ray_cron_job=options.ray_cron_job,
    )
    texts = {file: text for each in rendered for file, text in each.files.items()}
    if options.out is None:
        print(TARGETS[options.target].between.join(texts.values()), end="")
    else:
        with writing(f"--out {options.out}"):
            options.out.mkdir(parents=True, exist_ok=True)
            for file, text in texts.items():
                write_whole(options.out / file, text)
        for file in texts:
            print(options.out / file)
    for sweep, each in zip(loaded.sweeps, rendered, strict=True):
        for what in each.left_out:
            print(f"{sweep.name}: left out: {what}", file=sys.stderr)
    return 0


def refuse_idle(options: argparse.Namespace) -> None:
    """Refuse options that the target would not heed.

    Raises:
        UsageError: there is one.
    """
    from gdpo_tune.core.errors import UsageError

    heeded = {"--ray-cron-job": ("kuberay",), "--kuberay": ("kuberay", "rayjob")}
    given = {"--ray-cron-job": options.ray_cron_job, "--kuberay": options.kuberay}
    for option, targets in heeded.items():
        if given[option] and options.target not in targets:
            raise UsageError(
                f"{option} is for --to {' and '.join(targets)}, not for --to {options.target}\n"
                "    fix: leave it out"
            )


def load(options: argparse.Namespace) -> Loaded:
    """The sweeps of the folder."""
    from gdpo_tune.clusters.load_schedules import load_sweeps

    return load_sweeps(options.sweeps)


def status_of(loaded: Loaded, found: Sequence[tuple[ScheduledSweep, GdpoTuneError]] = ()) -> int:
    """Print what is wrong with sweeps, and with files that are none; return the exit status."""
    from gdpo_tune.clusters.rounds import worst

    for sweep, error in found:
        print(f"error: {sweep.file}: {error}", file=sys.stderr)
    errors = [error for _, error in found]
    if loaded.error is not None:
        print(f"error: {loaded.error}", file=sys.stderr)
        errors.append(loaded.error)
    return worst(errors)


COMMANDS: dict[str, Command] = {
    "validate": Command(validate, "check every file, and this machine", arguments.of_validate),
    "next": Command(show_next, "print when runs are due", arguments.of_next),
    "tick": Command(tick, "do what is due, once"),
    "serve": Command(serve, "tick again and again", arguments.of_serve),
    "run": Command(run, "run one sweep, now or for a time", arguments.of_run),
    "status": Command(show_status, "print how runs stand"),
    "stop": Command(stop, "end the run of a sweep", arguments.of_stop),
    "render": Command(render, "write it for another scheduler", arguments.of_render),
}
"""Word -> what it does."""


if __name__ == "__main__":
    cli.run(main)
