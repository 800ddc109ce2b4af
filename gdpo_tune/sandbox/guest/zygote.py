"""The warm process that forks one locked child per candidate, and the work of that child.

The zygote never reads a job: the trainer sends it one end of a socket, and only the child reads
from it. So nothing that a candidate sends, and no expected value, is ever in this process, whose
memory every candidate inherits.

Free-form tests run in a second locked child, a checker. It gets them from the trainer over a
connection of its own, and calls the candidate over the other end of the candidate's connection.

In a candidate, descriptor 3 is the only connection. The job comes as one frame: code, seed, most
printed bytes, then the calls, then the inputs of a program; perhaps CPU and wall seconds of each
test. Without calls and inputs, a checker sends one call after the other. Answers are frames too:

    ["value", encoded]             result of a call, or value of a name
    ["value", encoded, arguments]  the same for a checker, with the arguments after the call
    ["raise", type, text, kind]    exception of a call, and the built-in class behind it
    ["load", type, text]           the code itself raised; the last frame
    ["output"]                     more was printed than allowed; the last frame
    > and bytes                    printed output of a program that ended normally

A program runs once per test, as `__main__`, on real descriptors 0 and 1. Both are files in memory
that the zygote opened. Each test's input is appended to the first. Its output is whatever was
appended to the second. So nothing is ever truncated, and a program finds the right size of its
first input. The kernel ends a process whose output reaches the limit of file sizes. Standard error
is dropped. When a program starts a thread, which a locked process may not have, its target runs at
once in the caller, which is enough for the usual recipe for a deeper stack.

None of this is trusted. A candidate can forge every frame, but a frame only carries values,
and no expected value is in this process.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import stat
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from . import checker
from .lockdown import OPEN_FILES, Isolation, LockdownError, lock_process
from .modules import preload, seed_generators
from .protocol import (
    DECODERS,
    PRINTED,
    Allowance,
    ExitStatus,
    decode,
    dump,
    pack_frame,
    parse,
    read_exactly,
    read_frame,
    write_all,
)
from .supervision import PARTNER_DESCRIPTOR, TrainerGone, fork_with_limits, supervise_fork
from .untrusted import (
    ExceptionCapture,
    PrintedBytes,
    call_function,
    create_module,
    describe_exception,
    load_solution,
    read_value,
    run_calls,
)

CONTROL_DESCRIPTOR = OPEN_FILES - 1
"""The last one, so that the first one is free for the descriptor of a request."""
_MAX_JOB_BYTES = 1 << 30
_INPUT, _OUTPUT = PARTNER_DESCRIPTOR + 1, PARTNER_DESCRIPTOR + 2
_RECURSION_LIMIT = sys.getrecursionlimit()
_builtins_before: dict[str, Any] = {}
"""Contents of `builtins` before any program."""


def serve_trainer(descriptor: int, parent: int, isolated: bool, modules: list[str]) -> None:
    """Lock this process, report that, and answer requests until the trainer has gone.

    The first message is a JSON object: `layers`, or `failed` with the step and the reason.
    `modules` are names to import, each followed by the directory of its top package.
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
        _prepare()
        os.environ.clear()
        sys.argv[:] = ["sandbox"]
        step = "lockdown"
        isolation = lock_process(control, parent, isolated)
    except LockdownError as failure:
        _send_json(control, {"failed": str(failure)})
        return
    except Exception as error:
        # NOTE: an unforeseen error, whose traceback has nowhere to go.
        _send_json(control, {"failed": f"{step}: {error!r}"})
        raise
    _send_json(control, {"layers": isolation.layers})
    # NOTE: frozen objects are not touched by a child's collector, so their pages stay shared.
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        while True:
            _answer(control, isolation)
    except (EOFError, ConnectionError, TrainerGone):
        return


def _send_json(control: socket.socket, message: dict[str, object]) -> None:
    control.sendall(pack_frame(json.dumps(message).encode()))


def _answer(control: socket.socket, isolation: Isolation) -> None:
    size = Allowance.FORMAT.size
    head, descriptors, _, _ = socket.recv_fds(control, size, 3)
    if not head:
        raise EOFError
    job, *checking = descriptors
    request = head + read_exactly(control.recv, size - len(head))
    allowance = Allowance(*Allowance.FORMAT.unpack(request))
    files = [os.memfd_create("input"), os.memfd_create("output")] if allowance.file_bytes else []
    forks = [fork_with_limits(allowance, isolation.seccomp, [job, *files], _run_candidate)]
    if checking:
        program = checker.run_tests
        forks.append(fork_with_limits(allowance, isolation.seccomp, checking, program))
    for file in (*files, *checking):
        os.close(file)
    endings = [supervise_fork(forks[0], allowance, control.fileno())]
    # NOTE: not only closed: the trainer must see the end even where it has been forked.
    with socket.socket(fileno=job) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    endings += [supervise_fork(fork, allowance, control.fileno()) for fork in forks[1:]]
    for ending in endings:
        write_all(control.fileno(), ExitStatus.FORMAT.pack(*ending))


def _send(frame: bytes) -> None:
    write_all(PARTNER_DESCRIPTOR, pack_frame(frame))


_printed = PrintedBytes(_send)


def _prepare() -> None:
    """Give the zygote the standard streams of a candidate, and the built-ins of programs."""
    _printed.replace_streams()
    # NOTE: `site`, which is not loaded, would have defined these.
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    # NOTE: large numbers may be printed; the limits of CPU time end what takes too long.
    sys.set_int_max_str_digits(0)
    _builtins_before.update(builtins.__dict__)
    atexit.unregister(logging.shutdown)


def _run_candidate() -> NoReturn:
    gc.enable()
    code, seed, printable, calls, inputs, *clocks = parse(read_frame(_receive, _MAX_JOB_BYTES))
    start_clock = partial(_start_clocks, clocks)
    if inputs is not None:
        _run_program(code, seed, printable, inputs, start_clock)
    seed_generators(seed)
    _printed.left = printable
    if calls is not None:
        run_calls(code, calls, _send, start_clock)
    elif (names := load_solution(code, _send)) is not None:
        _serve(names)  # a checker, until it ends
    os._exit(0)


def _start_clocks(clocks: list[float]) -> None:
    # NOTE: a signal ends this process; a candidate can stop these clocks, not those of the job.
    for timer, seconds in zip((signal.ITIMER_PROF, signal.ITIMER_REAL), clocks, strict=False):
        signal.setitimer(timer, seconds)


def _serve(names: dict[str, Any]) -> None:
    # NOTE: under names that code cannot spell, because a candidate may define its own `next`.
    names.update({f"own {each.__name__}": each for each in (getattr, setattr, iter, next)})
    DECODERS["name"] = lambda name: (names if " " in name else builtins.__dict__)[name]
    while True:
        try:
            function, arguments, keywords = parse(read_frame(_receive, _MAX_JOB_BYTES))
        except EOFError:
            return
        if arguments is None:
            _send(read_value(names, function))
            continue
        options = {name: decode(value) for name, value in keywords}
        _send(call_function(names, function, arguments, options, with_arguments=True))


def _receive(at_most: int) -> bytes:
    return os.read(PARTNER_DESCRIPTOR, at_most)


def _run_program(
    code: str, seed: int, printable: int, inputs: list[str], start_clock: Callable[[], object]
) -> NoReturn:
    """Run the program on every input, answer each time, and end this process."""
    loading = ExceptionCapture()
    program = None
    with loading:
        program = compile(code, "<solution>", "exec", dont_inherit=True)
    if program is None:
        assert loading.error is not None
        _send(dump(["load", *describe_exception(loading.error)]))
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
            _send(dump(["output"]))
            break
        if error is None:
            _send(PRINTED + os.pread(_OUTPUT, size - start, start))
        else:
            _send(dump(["raise", *error]))
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
    error = describe_exception(running.error) if running.error is not None and has_failed else None
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

    def run_in_caller(self: threading.Thread) -> None:
        running = ExceptionCapture()
        with running:
            self.run()
        # NOTE: an exit ends a thread alone. Anything else is reported as the program's error.
        if running.error is not None and not isinstance(running.error, SystemExit):
            raise running.error

    threading.Thread.start = run_in_caller
    threading.Thread.join = lambda self, timeout=None: None
    threading.Thread.is_alive = lambda self: False
