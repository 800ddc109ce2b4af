"""Runner of a candidate as a program: once per test, as `__main__`, on real descriptors 0 and 1.

Both are files in memory that the zygote opened. Each test's input is appended to the first.
Its output is whatever was appended to the second. So nothing is ever truncated, and a program
finds the right size of its first input. The kernel ends a process whose output reaches
the limit of file sizes. Standard error is dropped. Answers are those of `zygote`, and

    > and bytes                    printed output of a program that ended normally

A locked process may have no threads. When a program starts one, its target runs at once in the
caller, which is enough for the usual recipe for a deeper stack.
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
from .frames import PRINTED, write_all
from .modules import seed_generators
from .supervision import PARTNER_DESCRIPTOR
from .untrusted import ExceptionCapture, create_module, describe_error

_INPUT, _OUTPUT = PARTNER_DESCRIPTOR + 1, PARTNER_DESCRIPTOR + 2
_RECURSION_LIMIT = sys.getrecursionlimit()
_builtins_before: dict[str, Any] = {}
"""Contents of `builtins` before any program."""


def prepare() -> None:
    """Do once in the zygote what every program would have to do."""
    _builtins_before.update(builtins.__dict__)
    atexit.unregister(logging.shutdown)


def run(
    code: str,
    seed: int,
    printable: int,
    inputs: list[str],
    send: Callable[[bytes], None],
    start_clock: Callable[[], object],
) -> NoReturn:
    """Run the program on every input, answer each time, and end this process.

    It may print `printable` bytes altogether. Its generators are seeded again, and a clock
    is started, for each input.
    """
    loading = ExceptionCapture()
    program = None
    with loading:
        program = compile(code, "<solution>", "exec", dont_inherit=True)
    if program is None:
        assert loading.error is not None
        send(dump(["load", *describe_error(loading.error)]))
        os._exit(0)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _replace_threads()
    _replace_fstat()
    for number, text in enumerate(inputs):
        _reset(seed, is_first=number == 0)
        start = _connect_streams(text)
        start_clock()
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


def _connect_streams(text: str) -> int:
    """Connect descriptors and streams to the input; return the offset of the output."""
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
        builtins.__dict__.update(_builtins_before)
    sys.argv = ["solution"]
    sys.setrecursionlimit(_RECURSION_LIMIT)
    gc.enable()
    seed_generators(seed)


def _run_once(program: types.CodeType) -> list[str] | None:
    """Run until nothing of the program is left; return type and text of its error, if any."""
    stdin, stdout, stderr = sys.stdin, sys.stdout, sys.stderr
    names = create_module("__main__")
    names["__file__"] = sys.argv[0]
    running = ExceptionCapture()
    with running:
        exec(program, names)
    with ExceptionCapture():
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]: `register` has no other end
    with ExceptionCapture():
        sys.stdout.flush()
    has_failed = not (isinstance(running.error, SystemExit) and running.error.code in (None, 0))
    error = describe_error(running.error) if running.error is not None and has_failed else None
    # NOTE: its frames hold the program's objects.
    running.error = None
    # NOTE: an unclosed file writes its buffer, or closes its descriptor, when it is collected;
    # that must not be the next test's descriptor.
    names.clear()
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    gc.collect()
    with ExceptionCapture():
        stdout.flush()
    return error


def _replace_fstat() -> None:
    """Let programs read the size of their input, as fast readers do."""
    original = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        # NOTE: the C library may ask by way of a path, which the filter cannot tell from a stat.
        with contextlib.suppress(PermissionError):
            return original(descriptor)
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        size = os.lseek(descriptor, 0, os.SEEK_END)
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.stat_result((stat.S_IFREG | 0o600, 0, 0, 1, 0, 0, size, 0, 0, 0))

    os.fstat = fstat


def _replace_threads() -> None:
    """Let `start` run a thread's target in the caller, so that it has ended when it returns."""
    threading.Thread.start = _run_in_caller
    threading.Thread.join = lambda self, timeout=None: None
    threading.Thread.is_alive = lambda self: False


def _run_in_caller(self: threading.Thread) -> None:
    running = ExceptionCapture()
    with running:
        self.run()
    # NOTE: an exit ends a thread alone. Anything else is reported as the program's error.
    if running.error is not None and not isinstance(running.error, SystemExit):
        raise running.error
