"""What zygote and judge share: getting locked in, reporting it, and serving the trainer."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Callable

from .enclosure import OPEN_FILES, Enclosure, StepFailed, enclose, stay_open
from .frames import pack, read_exactly
from .modules import preload
from .supervision import TrainerGone

CONTROL_DESCRIPTOR = OPEN_FILES - 1
"""The last one, so that the first one is free for what a request brings."""


def receive_with_descriptor(control: socket.socket, size: int) -> tuple[bytes, int]:
    """Receive `size` bytes and the descriptor that comes with the first of them.

    Raises:
        EOFError: the trainer has closed the socket.
    """
    head, descriptors, _, _ = socket.recv_fds(control, size, 1)
    if not head:
        raise EOFError
    return head + read_exactly(control.recv, size - len(head)), descriptors[0]


def serve(
    descriptor: int,
    parent: int,
    isolated: bool,
    modules: list[str],
    answer: Callable[[socket.socket, Enclosure], None],
    prepare: Callable[[], None],
) -> None:
    """Lock this process in, say so, and answer requests until the trainer has gone.

    The first message is a JSON object: `layers`, or `failed` with the step and the reason.

    Args:
        descriptor: socket to the trainer.
        parent: process id of the trainer.
        isolated: False locks nothing in and takes limits alone.
        modules: names of modules to load, each followed by the folder of its top package.
        answer: handles one request; raises EOFError when there will be no more.
        prepare: called once, before anything is locked.
    """
    if descriptor != CONTROL_DESCRIPTOR:
        os.dup2(descriptor, CONTROL_DESCRIPTOR)
        os.close(descriptor)
    control = socket.socket(fileno=CONTROL_DESCRIPTOR)
    step = "modules"
    try:
        preload(modules)
        # NOTE: after the modules, of which some print when they are loaded.
        step = "prepare"
        prepare()
        os.environ.clear()
        sys.argv[:] = ["sandbox"]
        step = "enclosure"
        enclosure = enclose(control, parent) if isolated else stay_open(parent)
    except StepFailed as failure:
        _report_failure(control, str(failure))
        return
    except Exception as error:
        # Nobody foresaw it, and its traceback has nowhere to go.
        _report_failure(control, f"{step}: {error!r}")
        raise
    control.sendall(pack(json.dumps({"layers": enclosure.layers}).encode()))
    # NOTE: frozen objects are not touched by a child's collector, so their pages stay shared.
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        while True:
            answer(control, enclosure)
    except (EOFError, ConnectionError, TrainerGone):
        return


def _report_failure(control: socket.socket, reason: str) -> None:
    control.sendall(pack(json.dumps({"failed": reason}).encode()))
