"""Values of the command line of `python -m gdpo_tune.schedule`."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from datetime import UTC, datetime


def parse_time(text: str) -> datetime:
    """Return a time since 1970 in UTC."""
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise ArgumentTypeError(f"{text!r} has no zone: write {text}Z for UTC")
        time = time.astimezone(UTC).replace(microsecond=0)
    except (ValueError, OverflowError):
        time = None
    if time is None or time.year < 1970:
        raise ArgumentTypeError(f"{text!r} is not a time: write it like 2026-03-29T02:00:00Z")
    return time


def parse_seconds(text: str) -> float:
    """Return a positive number of seconds."""
    if not 0.1 <= float(text) <= 86_400:
        raise ArgumentTypeError(f"{text}: write 0.1 to 86400 seconds")
    return float(text)


def parse_version(text: str) -> tuple[int, int]:
    """Return major and minor number of a version."""
    match = re.fullmatch(r"v?(\d+)\.(\d+)(\.\d+)?", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a version: write it like 1.7")
    return int(match.group(1)), int(match.group(2))
