"""Options and refusals of the commands that measure a GPU; imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gdpo_tune.core.errors import GdpoTuneError, ResourcesError
from gdpo_tune.spec.machine import count_visible_gpus


def require_gpu() -> None:
    """Refuse a machine that does not have exactly one visible GPU.

    Raises:
        ResourcesError: there is not exactly one GPU that may be used.
    """
    gpus = count_visible_gpus(os.environ)
    if gpus != 1:
        raise ResourcesError(
            f"this machine has {gpus} GPUs that may be used, and the benchmark measures one\n"
            "    fix: CUDA_VISIBLE_DEVICES=0 where there are several, --small on a CPU"
        )


def hide_other_gpus() -> tuple[str, ...]:
    """Hide all visible GPUs but the first from this process, and return all of their names.

    Raises:
        ResourcesError: there is no GPU that may be used.
    """
    count = count_visible_gpus(os.environ)
    if not count:
        raise ResourcesError(
            "this machine has 0 GPUs that may be used, and the check needs one\n"
            "    fix: --small on a CPU"
        )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = tuple(name.strip() for name in listed.split(",")[:count])
    os.environ["CUDA_VISIBLE_DEVICES"] = names[0]
    return names


def build_integer_type(lowest: int) -> Callable[[str], int]:
    """Build the type of a command line option: whole numbers from `lowest` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {lowest} on")
        return int(text)

    return parse


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command with message and exit status of an error that is meant for the user."""
    try:
        yield
    except GdpoTuneError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from error
