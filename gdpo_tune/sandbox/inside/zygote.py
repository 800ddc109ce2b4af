"""The warm process that forks one locked child per candidate, and the work of that child.

The zygote never reads a job: the trainer sends it one end of a socket, and only the child reads
from it. So nothing that a candidate sends, and no expected value, is ever in this process, whose
memory every candidate inherits.

In the child, descriptor 3 is the only connection. The job comes as one frame: code, seed, most
printed bytes, then the calls, then the inputs of a program, see `streams`; perhaps CPU
and wall seconds of each test. Without calls and
inputs, a checker sends one call after the other. Answers are frames too:

    ["value", encoded]             result of a call, or value of a name
    ["value", encoded, arguments]  the same for a checker, with the arguments after the call
    ["raise", type, text, kind]    exception of a call, and the built-in class behind it
    ["load", type, text]           the code itself raised; the last frame
    ["output"]                     more was printed than allowed; the last frame

None of this is trusted. A candidate can forge every frame, but a frame only carries values,
and no expected value is in this process.
"""

from __future__ import annotations

import builtins
import gc
import os
import signal
import socket
import sys
from functools import partial
from typing import Any, NoReturn

from . import streams
from .control import receive_with_descriptor
from .enclosure import Enclosure
from .encoding import DECODERS, decode, parse
from .frames import Allowance, Ending, pack, read_frame, write_all
from .modules import seed_generators
from .supervision import PARTNER_DESCRIPTOR, fork_with_limits, supervise
from .untrusted import PrintedBytes, call_function, load_solution, read_name, run_calls

_MAX_JOB_BYTES = 1 << 30


def answer(control: socket.socket, enclosure: Enclosure) -> None:
    """Fork one candidate, supervise it, and send its ending."""
    request, job = receive_with_descriptor(control, Allowance.FORMAT.size)
    allowance = Allowance(*Allowance.FORMAT.unpack(request))
    files = [os.memfd_create("input"), os.memfd_create("output")] if allowance.file_bytes else []
    child = fork_with_limits(allowance, enclosure.seccomp, [job, *files], _run_candidate)
    for file in files:
        os.close(file)
    ending = supervise(child, allowance, control.fileno())
    # NOTE: not only closed: the judge must see the end even where the trainer has been forked.
    with socket.socket(fileno=job) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    write_all(control.fileno(), Ending.FORMAT.pack(*ending))


def _send(frame: bytes) -> None:
    write_all(PARTNER_DESCRIPTOR, pack(frame))


_printed = PrintedBytes(_send)


def prepare() -> None:
    """Give the zygote the standard streams of a candidate, and the built-ins of programs."""
    _printed.replace_streams()
    # NOTE: `site`, which is not loaded, would have defined these.
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    # NOTE: large numbers may be printed; the limits of CPU time end what takes too long.
    sys.set_int_max_str_digits(0)
    streams.prepare()


def _run_candidate() -> NoReturn:
    """Read the job, run it, answer, and end this process."""
    gc.enable()
    code, seed, printable, calls, inputs, *clocks = parse(read_frame(_receive, _MAX_JOB_BYTES))
    start_clock = partial(_start_clocks, clocks)
    if inputs is not None:
        streams.run(code, seed, printable, inputs, _send, start_clock)
    seed_generators(seed)
    _printed.left = printable
    if calls is not None:
        run_calls(code, calls, _send, start_clock)
    elif (names := load_solution(code, _send)) is not None:
        _serve(names)
    os._exit(0)


def _start_clocks(clocks: list[float]) -> None:
    """Give the next test its CPU and wall seconds, after which a signal ends this process.

    A candidate can stop these clocks, but not those of the whole job.
    """
    for timer, seconds in zip((signal.ITIMER_PROF, signal.ITIMER_REAL), clocks, strict=False):
        signal.setitimer(timer, seconds)


def _serve(names: dict[str, Any]) -> None:
    """Answer a checker until it ends."""
    # NOTE: under names that code cannot spell, because a candidate may define its own `next`.
    names.update({f"own {each.__name__}": each for each in (getattr, setattr, iter, next)})
    DECODERS["name"] = lambda name: (names if " " in name else builtins.__dict__)[name]
    while True:
        try:
            function, arguments, keywords = parse(read_frame(_receive, _MAX_JOB_BYTES))
        except EOFError:
            return
        if arguments is None:
            _send(read_name(names, function))
            continue
        options = {name: decode(value) for name, value in keywords}
        _send(call_function(names, function, arguments, options, with_arguments=True))


def _receive(at_most: int) -> bytes:
    return os.read(PARTNER_DESCRIPTOR, at_most)
