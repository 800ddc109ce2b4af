"""Runs a candidate as a program: once a test, as `__main__`, on real descriptors 0 and 1.

Both are files in memory that the zygote opened. Each test's input is appended to the one, and
its output is whatever has been appended to the other, so that nothing is ever truncated and a
program finds the right size of its first input. The kernel ends a process whose output reaches
the limit of file sizes. Standard error goes nowhere. Answers are those of `candidate`, and

    > and bytes                    what the program printed before it ended as programs should

A locked process may have no threads. A program that starts one finds that its target runs at
once and in the caller, which is all that the usual way to a deeper stack needs.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import logging
import os
import signal
import stat
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from .encoding import dump
from .frames import write_all
from .modules import seed_generators
from .supervision import PARTNER_DESCRIPTOR
from .untrusted import Attempt, describe, fresh_names

PRINTED = b">"
"""First byte of a frame of printed bytes; every other frame is JSON."""
_INPUT, _OUTPUT = PARTNER_DESCRIPTOR + 1, PARTNER_DESCRIPTOR + 2
_RECURSION_LIMIT = sys.getrecursionlimit()
_known: dict[str, Any] = {}
"""What belongs into `builtins`."""


def prepare() -> None:
    """Let the zygote do once what every program would have to."""
    _known.update(builtins.__dict__)
    atexit.unregister(logging.shutdown)


def run(
    code: str, seed: int, printable: int, inputs: list[str], send: Callable[[bytes], None]
) -> NoReturn:
    """Run the program on every input, answer each time, and end this process.

    Args:
        code: the program.
        seed: seed of its generators, anew for each input.
        printable: bytes that it may print altogether.
        inputs: one a test.
        send: takes a frame's payload.
    """
    loading = Attempt()
    program = None
    with loading:
        program = compile(code, "<solution>", "exec", dont_inherit=True)
    if program is None:
        assert loading.error is not None
        send(dump(["load", *describe(loading.error)]))
        os._exit(0)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _run_threads_in_their_caller()
    _look_at_open_files()
    for number, text in enumerate(inputs):
        _reset(seed, is_first=number == 0)
        start = _begin(text)
        error = _run_once(program)
        size = os.lseek(_OUTPUT, 0, os.SEEK_END)
        if size > printable:
            send(dump(["output"]))
            break
        if error is None:
            send(PRINTED + os.pread(_OUTPUT, size - start, start))
        else:
            send(dump(["raise", *error]))
    os._exit(0)


def _begin(text: str) -> int:
    """Connect descriptors and streams; where the output will start."""
    position = os.lseek(_INPUT, 0, os.SEEK_END)
    write_all(_INPUT, text.encode())
    os.lseek(_INPUT, position, os.SEEK_SET)
    start = os.lseek(_OUTPUT, 0, os.SEEK_END)
    os.dup2(_INPUT, 0)
    os.dup2(_OUTPUT, 1)
    text_stream = partial(open, encoding="utf-8", closefd=False)
    sys.stdin = sys.__stdin__ = text_stream(0)
    sys.stdout = sys.__stdout__ = text_stream(1, "w")
    sys.stderr = sys.__stderr__ = text_stream(2, "w", errors="backslashreplace")
    return start


def _reset(seed: int, *, is_first: bool) -> None:
    """Undo what an honest program may have changed."""
    if not is_first:
        # NOTE: not free, because it writes to the pages of every built-in object.
        builtins.__dict__.clear()
        builtins.__dict__.update(_known)
    sys.argv = ["solution"]
    sys.setrecursionlimit(_RECURSION_LIMIT)
    gc.enable()
    seed_generators(seed)


def _run_once(program: types.CodeType) -> list[str] | None:
    """Run until nothing of the program is left; what it raised, if that is an error."""
    stdin, stdout, stderr = sys.stdin, sys.stdout, sys.stderr
    names = fresh_names("__main__")
    names["__file__"] = sys.argv[0]
    running = Attempt()
    with running:
        exec(program, names)
    with Attempt():
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]: `register` has no other end
    with Attempt():
        sys.stdout.flush()
    error = _read_error(running.error)
    # NOTE: its frames hold the program's objects.
    running.error = None
    # NOTE: a file that nobody closed writes what it has buffered, or closes its descriptor,
    # which must not be the next test's.
    names.clear()
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    gc.collect()
    with Attempt():
        stdout.flush()
    return error


def _read_error(error: BaseException | None) -> list[str] | None:
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    return describe(error)


def _look_at_open_files() -> None:
    """Let programs ask for the size of their input, as fast readers do."""
    refused = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        # NOTE: the C library may ask by way of a path, which the filter cannot tell from a stat.
        with contextlib.suppress(PermissionError):
            return refused(descriptor)
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        size = os.lseek(descriptor, 0, os.SEEK_END)
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.stat_result((stat.S_IFREG | 0o600, 0, 0, 1, 0, 0, size, 0, 0, 0))

    os.fstat = fstat


def _run_threads_in_their_caller() -> None:
    """Every thread has ended when `start` returns."""
    threading.Thread.start = _run_here
    threading.Thread.join = _return_at_once
    threading.Thread.is_alive = _is_never_alive


def _run_here(self: threading.Thread) -> None:
    running = Attempt()
    with running:
        self.run()
    # NOTE: an exit ends a thread alone. Anything else is reported as the program's error.
    if running.error is not None and not isinstance(running.error, SystemExit):
        raise running.error


def _return_at_once(self: threading.Thread, timeout: float | None = None) -> None:
    pass


def _is_never_alive(self: threading.Thread) -> bool:
    return False
