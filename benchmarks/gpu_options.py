"""What the commands that measure a GPU take and refuse, before they import anything heavy."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gdpo_tune.core.errors import GdpoTuneError, ResourcesError
from gdpo_tune.spec.machine import count_visible_gpus


def require_gpu() -> None:
    """Refuse a machine without a GPU, or with several of which one would be measured.

    Raises:
        ResourcesError: there is not exactly one that may be used.
    """
    gpus = count_visible_gpus(os.environ)
    if gpus != 1:
        raise ResourcesError(
            f"this machine has {gpus} GPUs that may be used, and one is measured\n"
            "    fix: CUDA_VISIBLE_DEVICES=0 where there are several, --small on a CPU"
        )


def build_integer_type(lowest: int) -> Callable[[str], int]:
    """The type of a command line option."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {lowest} on")
        return int(text)

    return number


@contextmanager
def exit_on_error() -> Iterator[None]:
    """An error that is meant for a person ends the command with its words and exit status."""
    try:
        yield
    except GdpoTuneError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from error
