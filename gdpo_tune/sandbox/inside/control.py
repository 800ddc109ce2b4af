"""Common part of zygote and judge: lock the process, report it, and serve the trainer."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Callable

from .enclosure import OPEN_FILES, Enclosure, LockdownError, enclose
from .frames import pack, read_exactly
from .modules import preload
from .supervision import TrainerGone

CONTROL_DESCRIPTOR = OPEN_FILES - 1
"""The last one, so that the first one is free for the descriptor of a request."""


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
    """Lock this process, report that, and answer requests until the trainer has gone.

    The first message is a JSON object: `layers`, or `failed` with the step and the reason.

    Args:
        descriptor: socket to the trainer.
        parent: see `enclose`.
        isolated: see `enclose`.
        modules: names of modules to load, each followed by the directory of its top package.
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
        # NOTE: after the modules, some of which print when they are loaded.
        step = "prepare"
        prepare()
        os.environ.clear()
        sys.argv[:] = ["sandbox"]
        step = "enclosure"
        enclosure = enclose(control, parent, isolated)
    except LockdownError as failure:
        _send_json(control, {"failed": str(failure)})
        return
    except Exception as error:
        # NOTE: an unforeseen error, whose traceback has nowhere to go.
        _send_json(control, {"failed": f"{step}: {error!r}"})
        raise
    _send_json(control, {"layers": enclosure.layers})
    # NOTE: frozen objects are not touched by a child's collector, so their pages stay shared.
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        while True:
            answer(control, enclosure)
    except (EOFError, ConnectionError, TrainerGone):
        return


def _send_json(control: socket.socket, message: dict[str, object]) -> None:
    control.sendall(pack(json.dumps(message).encode()))
