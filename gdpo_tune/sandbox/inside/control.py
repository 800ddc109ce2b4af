"""What zygote and judge share: getting locked in, reporting it, and serving the trainer."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Callable

from .enclosure import Enclosure, StepFailed, enclose
from .frames import pack, read_exactly
from .modules import preload
from .supervision import TrainerGone

CONTROL_DESCRIPTOR = 3


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
    answer: Callable[[socket.socket, Enclosure], None],
    prepare: Callable[[], None],
) -> None:
    """Lock this process in, say so, and answer requests until the trainer has gone.

    The first message is a JSON object: `layers`, or `failed` with the step and the reason.

    Args:
        descriptor: socket to the trainer.
        parent: process id of the trainer.
        answer: handles one request; raises EOFError when there will be no more.
        prepare: called once, before anything is locked.
    """
    if descriptor != CONTROL_DESCRIPTOR:
        os.dup2(descriptor, CONTROL_DESCRIPTOR)
        os.close(descriptor)
    control = socket.socket(fileno=CONTROL_DESCRIPTOR)
    prepare()
    preload()
    os.environ.clear()
    sys.argv[:] = ["sandbox"]
    try:
        enclosure = enclose(control, parent)
    except StepFailed as failure:
        control.sendall(pack(json.dumps({"failed": str(failure)}).encode()))
        return
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
