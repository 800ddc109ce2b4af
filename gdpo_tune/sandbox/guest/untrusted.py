"""Common part of every run of a candidate's code: calls, exceptions, printed bytes."""

from __future__ import annotations

import builtins
import io
import math
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from .protocol import Encoded, decode, dump, encode

_CATCHABLE = frozenset(
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__name__ != "ExceptionGroup"
)


class ExceptionCapture:
    """A context that keeps whatever its body raises, exits included, instead of passing it on."""

    error: BaseException | None = None

    def __enter__(self) -> ExceptionCapture:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True


def describe_exception(error: BaseException) -> list[str]:
    """Return type and text of an exception; the text is empty if making it fails."""
    text = ""
    with ExceptionCapture():
        text = str(error)[:200]
    return [type(error).__name__, text]


def load_code(code: str, name: str) -> tuple[dict[str, Any], BaseException | None]:
    """Run a candidate's code as a fresh module; return its names and the exception, if any."""
    names = create_module(name)
    loading = ExceptionCapture()
    with loading:
        exec(compile(code, f"<{name}>", "exec", dont_inherit=True), names)
    return names, loading.error


def load_solution(code: str, send: Callable[[bytes], None]) -> dict[str, Any] | None:
    """Load code whose functions will be called; if that fails, send the reason, return None."""
    names, error = load_code(code, "solution")
    if error is None:
        return names
    send(dump(["load", *describe_exception(error)]))
    return None


def run_calls(
    code: str,
    calls: list[Encoded],
    send: Callable[[bytes], None],
    start_clock: Callable[[], object] = lambda: None,
) -> None:
    """Load the code, make every call, and send the frame of each; start a clock before each."""
    start_clock()
    names = load_solution(code, send)
    if names is None:
        return
    for function, arguments in calls:
        start_clock()
        send(call_function(names, function, arguments, {}, with_arguments=False))


def create_module(name: str) -> dict[str, Any]:
    """Create a module, which replaces any other of that name, and return its names."""
    # NOTE: a real module, because dataclasses and typing look up a class's module by its name.
    module = types.ModuleType(name)
    names = module.__dict__
    names["__builtins__"] = builtins
    sys.modules[name] = module
    return names


def call_function(
    names: dict[str, Any],
    function: str,
    arguments: list[Encoded],
    keywords: dict[str, Any],
    *,
    with_arguments: bool,
) -> bytes:
    """Call one of the candidate's functions with copies of the arguments; return the frame for it.

    `with_arguments`, for a checker, adds the arguments after the call to the frame, and keeps
    objects that cannot cross.
    """

    def call() -> list[Encoded]:
        # NOTE: a test of one call means the candidate's own `sum` where it defines one.
        namespace = names if function in names else builtins.__dict__
        target: Callable[..., object] = namespace[function]
        copies = [decode(argument) for argument in arguments]
        result = target(*copies, **keywords)
        if not with_arguments:
            return ["value", encode(result)]
        keep = partial(_keep_object, names)
        return ["value", encode(result, keep=keep), [encode(copy, keep=keep) for copy in copies]]

    return _build_frame(call)


def _keep_object(names: dict[str, Any], value: object) -> dict[str, list[str]]:
    """Keep an object that cannot cross under a name by which a checker can refer to it."""
    # NOTE: not a name that code can spell.
    name = f"object {id(value)}"
    names[name] = value
    return {"object": [str(type(value).__name__)[:80], name]}


def read_value(names: dict[str, Any], name: str) -> bytes:
    """Return the frame for the value of one of the candidate's names."""
    return _build_frame(lambda: ["value", encode(names[name], keep=partial(_keep_object, names))])


def _build_frame(make: Callable[[], list[Encoded]]) -> bytes:
    attempt = ExceptionCapture()
    frame = b""
    with attempt:
        frame = dump(make())
    if attempt.error is not None:
        # NOTE: the built-in class as which a test can catch this exception.
        kinds = (kind for kind in type(attempt.error).__mro__ if kind in _CATCHABLE)
        built_in = next(kinds, Exception).__name__
        return dump(["raise", *describe_exception(attempt.error), built_in])
    return frame


class PrintedBytes(io.RawIOBase):
    """Standard output and error of a candidate: counted, then dropped."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self.left = math.inf
        self._send = send

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Count the bytes; at the limit, send the reason and end the process."""
        size = memoryview(data).nbytes
        self.left -= size
        if self.left < 0:
            self._send(dump(["output"]))
            os._exit(0)
        return size

    def replace_streams(self) -> None:
        """Give the process this standard output and error, and an empty input."""
        text = io.TextIOWrapper(io.BufferedWriter(self), "utf-8", "backslashreplace")
        sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = text
        sys.stdin = sys.__stdin__ = io.StringIO("")
