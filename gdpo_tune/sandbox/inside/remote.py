"""Runner of one candidate on a service's machine, which gets this file as text with its imports.

Calls are answered in lines on standard output: the job's nonce, a space, and a frame as
`zygote.py` writes it. A program answers with what it prints. Before either comes one line with

    ["begin"]  the interpreter works, and the code is about to be loaded

None of this is trusted: a forged line only carries values. The service's Python is 3.10 or newer.
"""

from __future__ import annotations

import os
import random
import sys
import threading

from .encoding import dump, parse
from .untrusted import PrintedBytes, load, run_calls

_THREAD_STACK = 8 << 20


def main(job: str) -> None:
    """Run a job: nonce, code, seed, most printed bytes, and calls or None."""
    nonce, code, seed, printable, calls = parse(job.encode())
    channel = _Channel(nonce)
    channel.send(dump(["begin"]))
    random.seed(seed)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    # NOTE: a service that limits stacks to the whole memory leaves no room for a thread's own.
    threading.stack_size(_THREAD_STACK)
    if calls is None:
        _, error = load(code, "__main__")
        if error is not None:
            raise error
        return
    # NOTE: what a candidate writes to the descriptors is dropped, and not counted.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    printed = PrintedBytes(channel.send)
    printed.left = printable
    printed.replace_streams()
    run_calls(code, calls, channel.send)
    os._exit(0)


class _Channel:
    """Standard output as it was at the start, whatever a candidate does to it later."""

    def __init__(self, nonce: str) -> None:
        self._prefix = nonce.encode() + b" "
        self._stream = os.fdopen(os.dup(1), "wb")

    def send(self, frame: bytes) -> None:
        self._stream.write(self._prefix + frame + b"\n")
        self._stream.flush()
