"""What may follow each word of `python -m gdpo_tune.schedule`, and how it is read."""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime
from pathlib import Path

from gdpo_tune.clusters.render.names import NEWEST_KUBERAY, TARGETS

FIRST = datetime(1970, 1, 1, tzinfo=UTC)
"""No run was before."""
EVERY = 30.0
"""Seconds between two ticks of `serve`."""


def instant(text: str) -> datetime:
    """A time of the command line, in UTC.

    Raises:
        argparse.ArgumentTypeError: it is none, or does not say in which zone.
    """
    wrong = argparse.ArgumentTypeError(f"{text!r} is no time: write it like 2026-03-29T02:00:00Z")
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is None:
            raise argparse.ArgumentTypeError(f"{text!r} has no zone: write {text}Z for UTC")
        instant = found.astimezone(UTC).replace(microsecond=0)
    except (ValueError, OverflowError):
        raise wrong from None
    if instant < FIRST:
        raise wrong
    return instant


def seconds(text: str) -> float:
    """A positive number of seconds of the command line."""
    found = float(text)
    if not 0.1 <= found <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: write 0.1 to 86400 seconds")
    return found


def count(text: str) -> int:
    """A positive number of the command line."""
    found = int(text)
    if not 1 <= found <= 1000:
        raise argparse.ArgumentTypeError(f"{text}: write 1 to 1000")
    return found


def version(text: str) -> tuple[int, int]:
    """Major and minor number of a version of the command line."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)(\.\d+)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no version: 1.7")
    return int(found.group(1)), int(found.group(2))


def of_validate(parser: argparse.ArgumentParser) -> None:
    """Arguments of `validate`."""
    what = "look at no storage, variable or backend of this machine"
    parser.add_argument("--files-only", action="store_true", help=what)


def of_next(parser: argparse.ArgumentParser) -> None:
    """Arguments of `next`."""
    parser.add_argument("--count", type=count, default=5, help="times a sweep (default: 5)")


def of_serve(parser: argparse.ArgumentParser) -> None:
    """Arguments of `serve`."""
    what = f"seconds between two ticks (default: {EVERY:g})"
    parser.add_argument("--every", type=seconds, default=EVERY, help=what)


def of_run(parser: argparse.ArgumentParser) -> None:
    """Arguments of `run`."""
    parser.add_argument("name", metavar="NAME", help="which sweep")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--at", type=instant, metavar="TIME", help="the run of that time, with zone")
    which.add_argument("--now", action="store_true", help="a run of this second, always a new one")
    parser.add_argument("--wait", action="store_true", help="stay until it has ended")
    what = "leave a run that failed or was stopped as it is; without this it is taken up again"
    parser.add_argument("--once", action="store_true", help=what)
    _add_here(parser)
    what = "seconds between two looks at it (default: 10)"
    parser.add_argument("--every", type=seconds, default=10.0, help=what)


def of_stop(parser: argparse.ArgumentParser) -> None:
    """Arguments of `stop`."""
    parser.add_argument("name", metavar="NAME", help="which sweep")
    _add_here(parser)


def of_render(parser: argparse.ArgumentParser) -> None:
    """Arguments of `render`."""
    what = "who is to keep the schedule"
    parser.add_argument("--to", choices=TARGETS, required=True, dest="target", help=what)
    what = "folder for the files (default: print them)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=what)
    newest = ".".join(str(number) for number in NEWEST_KUBERAY)
    what = f"the operator's version, for kuberay and rayjob (default: {newest})"
    parser.add_argument("--kuberay", type=version, metavar="VERSION", help=what)
    what = "with kuberay: a RayCronJob (alpha) instead of a CronJob"
    parser.add_argument("--ray-cron-job", action="store_true", help=what)


def _add_here(parser: argparse.ArgumentParser) -> None:
    what = "as a process of this machine, which another scheduler gave to the run"
    parser.add_argument("--here", action="store_true", help=what)
