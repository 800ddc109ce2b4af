"""The warm process that forks one locked child per candidate.

It never reads a job: the trainer sends it one end of a socket, and only the child reads from it.
So nothing that a candidate sends, and no expected value, is ever in this process, whose memory
every candidate inherits.
"""

from __future__ import annotations

import os
import socket

from . import candidate
from .control import receive_with_descriptor, serve
from .enclosure import Enclosure
from .frames import Allowance, Ending, write_all
from .supervision import fork_with_limits, supervise


def main(descriptor: int, parent: int, isolated: bool, modules: list[str]) -> None:
    """Fork for one request after the other until the trainer closes the socket."""
    serve(descriptor, parent, isolated, modules, _answer, candidate.prepare)


def _answer(control: socket.socket, enclosure: Enclosure) -> None:
    request, job = receive_with_descriptor(control, Allowance.FORMAT.size)
    allowance = Allowance(*Allowance.FORMAT.unpack(request))
    files = [os.memfd_create("input"), os.memfd_create("output")] if allowance.file_bytes else []
    child = fork_with_limits(allowance, enclosure.seccomp, [job, *files], candidate.run)
    for file in files:
        os.close(file)
    ending = supervise(child, allowance, control.fileno())
    # NOTE: not only closed: the judge must see the end even where the trainer has been forked.
    with socket.socket(fileno=job) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    write_all(control.fileno(), Ending.FORMAT.pack(*ending))
