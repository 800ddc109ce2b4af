"""What every run of a candidate's code shares: calls, what it raises, what it prints."""

from __future__ import annotations

import builtins
import io
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

from .encoding import Encoded, decode, dump, encode

MODULE = "solution"
"""What a candidate whose functions are called is named."""
_MAX_TEXT = 200
_CATCHABLE = frozenset(
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not ExceptionGroup
)


class Attempt:
    """A context that keeps whatever its body raises, exits included, instead of passing it on."""

    error: BaseException | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True


def describe(error: BaseException) -> list[str]:
    """Type and text of an exception; the text is empty if making it fails."""
    text = ""
    with Attempt():
        text = str(error)[:_MAX_TEXT]
    return [type(error).__name__, text]


def load(code: str, name: str) -> tuple[dict[str, Any], BaseException | None]:
    """Run a candidate's code as a fresh module; its names, and what the code raised."""
    names = fresh_names(name)
    loading = Attempt()
    with loading:
        exec(compile(code, f"<{name}>", "exec", dont_inherit=True), names)
    return names, loading.error


def load_solution(code: str, send: Callable[[bytes], None]) -> dict[str, Any] | None:
    """Load the code whose functions will be called; if that fails, None and a frame with why."""
    names, error = load(code, MODULE)
    if error is None:
        return names
    send(dump(["load", *describe(error)]))
    return None


def run_calls(code: str, calls: list[Encoded], send: Callable[[bytes], None]) -> None:
    """Load the code, make every call, and send what came of each."""
    names = load_solution(code, send)
    if names is None:
        return
    for function, arguments in calls:
        send(call_function(names, function, arguments, {}, with_arguments=False))


def fresh_names(module: str) -> dict[str, Any]:
    """The names of a new module, which takes the place of any other that is called so."""
    # NOTE: a real module, because dataclasses and typing look up a class's module by its name.
    made = types.ModuleType(module)
    names = made.__dict__
    names["__builtins__"] = builtins
    sys.modules[module] = made
    return names


def call_function(
    names: dict[str, Any],
    function: str,
    arguments: list[Encoded],
    keywords: dict[str, Any],
    *,
    with_arguments: bool,
) -> bytes:
    """Call one of the candidate's functions; the frame that tells what came of it.

    Args:
        names: the candidate's module.
        function: name of the function.
        arguments: encoded; each call has copies of its own.
        keywords: arguments by name.
        with_arguments: whether the frame also holds the arguments as they are afterwards.
    """

    def call() -> list[Encoded]:
        # NOTE: a test of one call means the candidate's own `sum` where there is one.
        known = names if function in names else builtins.__dict__
        target: Callable[..., object] = known[function]
        copies = [decode(argument) for argument in arguments]
        result = target(*copies, **keywords)
        value = encode(result)
        if not with_arguments:
            return ["value", value]
        if type(value) is dict and "opaque" in value and isinstance(result, Iterable):
            value = _keep_items(names, cast("Iterable[object]", result))
        return ["value", value, [encode(copy) for copy in copies]]

    return _answer(call)


def _keep_items(names: dict[str, Any], items: Iterable[object]) -> Encoded:
    """Keep what cannot cross under a name that, when called, gives the next of its items."""
    following = iter(items).__next__
    # NOTE: no name that code can spell.
    name = f"items {id(following)}"
    names[name] = following
    return {"items": name}


def read_name(names: dict[str, Any], name: str) -> bytes:
    """The frame that tells what one of the candidate's names stands for."""
    return _answer(lambda: ["value", encode(names[name])])


def _answer(make: Callable[[], list[Encoded]]) -> bytes:
    attempt = Attempt()
    frame = b""
    with attempt:
        frame = dump(make())
    if attempt.error is not None:
        return dump(["raise", *describe(attempt.error), _built_in(attempt.error)])
    return frame


def _built_in(error: BaseException) -> str:
    """What a test can catch this exception as."""
    kinds = (kind for kind in type(error).__mro__ if kind in _CATCHABLE)
    return next(kinds, Exception).__name__


class PrintedBytes(io.RawIOBase):
    """Standard output and error of a candidate: counted, then forgotten."""

    def __init__(self, at_limit: Callable[[], NoReturn]) -> None:
        super().__init__()
        self.left = 0
        self._at_limit = at_limit

    def writable(self) -> bool:
        """It is a stream to write to."""
        return True

    def write(self, data: Any, /) -> int:
        """Count, and end the process at the limit."""
        size = memoryview(data).nbytes
        self.left -= size
        if self.left < 0:
            self._at_limit()
        return size

    def as_text(self) -> io.TextIOWrapper:
        """A text stream that ends here."""
        return io.TextIOWrapper(io.BufferedWriter(self), "utf-8", "backslashreplace")
