"""Runs one candidate in a locked fork; descriptor 3 is its only connection.

The job comes as one frame: code, seed, the allowance of printed bytes, and either every call
at once, or none, which means that a checker will ask call by call. Answers are frames too:

    ["value", encoded]             what a call returned
    ["value", encoded, arguments]  the same for a checker, with the arguments as they are now
    ["raise", type, text]          what it raised instead
    ["load", type, text]           the code itself raised; the last frame
    ["output"]                     it printed more than allowed; the last frame

None of this is trusted. A candidate can forge every frame, but a frame only carries values,
and what they should be is nowhere in this process.
"""

from __future__ import annotations

import builtins
import gc
import io
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from .encoding import Encoded, decode, dump, encode, parse
from .frames import pack, read_frame, write_all
from .supervision import JOB_DESCRIPTOR

MODULE = "solution"
_MAX_JOB_BYTES = 1 << 30
_MAX_TEXT = 200


class PrintedBytes(io.RawIOBase):
    """Standard output and error of a candidate: counted, then forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def writable(self) -> bool:
        """It is a stream to write to."""
        return True

    def write(self, data: Any, /) -> int:
        """Count, and end the process at the limit."""
        size = memoryview(data).nbytes
        self.left -= size
        if self.left < 0:
            _send(dump(["output"]))
            os._exit(0)
        return size


_printed = PrintedBytes()


def prepare() -> None:
    """Give the zygote the standard streams of a candidate, and its empty main module."""
    stream = io.TextIOWrapper(io.BufferedWriter(_printed), "utf-8", "backslashreplace")
    sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = stream
    sys.stdin = sys.__stdin__ = io.StringIO("")


class Attempt:
    """A context that keeps whatever its body raises, exits included, instead of passing it on."""

    error: BaseException | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True


def run() -> NoReturn:
    """Read the job, run it, answer, and end this process."""
    gc.enable()
    code, seed, printable, calls = parse(read_frame(_receive, _MAX_JOB_BYTES))
    random.seed(seed)
    _printed.left = printable
    # NOTE: a real module, because dataclasses and typing look up a class's module by its name.
    module = types.ModuleType(MODULE)
    module.__dict__["__builtins__"] = builtins
    sys.modules[MODULE] = module
    loading = Attempt()
    with loading:
        exec(compile(code, "<solution>", "exec", dont_inherit=True), module.__dict__)
    if loading.error is not None:
        _send(dump(["load", *describe(loading.error)]))
    elif calls is None:
        _serve(module.__dict__)
    else:
        for function, arguments in calls:
            _send(_call(module.__dict__, function, arguments, {}, with_arguments=False))
    os._exit(0)


def _serve(names: dict[str, Any]) -> None:
    while True:
        try:
            function, arguments, keywords = parse(read_frame(_receive, _MAX_JOB_BYTES))
        except EOFError:
            return
        options = {name: decode(value) for name, value in keywords}
        _send(_call(names, function, arguments, options, with_arguments=True))


def _call(
    names: dict[str, Any],
    function: str,
    arguments: list[Encoded],
    keywords: dict[str, Any],
    *,
    with_arguments: bool,
) -> bytes:
    attempt = Attempt()
    frame = b""
    with attempt:
        target: Callable[..., object] = names[function]
        copies = [decode(argument) for argument in arguments]
        answer: list[Encoded] = ["value", encode(target(*copies, **keywords))]
        if with_arguments:
            answer.append([encode(copy) for copy in copies])
        frame = dump(answer)
    if attempt.error is not None:
        return dump(["raise", *describe(attempt.error)])
    return frame


def describe(error: BaseException) -> list[str]:
    """Type and text of an exception; the text is empty if making it fails."""
    text = ""
    with Attempt():
        text = str(error)[:_MAX_TEXT]
    return [type(error).__name__, text]


def _send(frame: bytes) -> None:
    write_all(JOB_DESCRIPTOR, pack(frame))


def _receive(at_most: int) -> bytes:
    return os.read(JOB_DESCRIPTOR, at_most)
