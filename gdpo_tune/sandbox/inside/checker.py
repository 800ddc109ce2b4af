"""Runs free-form tests in a locked fork of the judge and asks the candidate by message.

The tests are Python that the task's author wrote. A name that they use and that Python does
not know becomes a function that sends its arguments to the candidate's process and brings
back a copy of the result, and of lists, dicts and sets that it changed in place. So tests can
call functions; they cannot reach into a candidate's classes or pass functions to it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from .candidate import Attempt, describe
from .comparison import matches
from .encoding import Encoded, decode, dump, encode, parse
from .frames import FrameTooLong, pack, read_frame, write_all
from .supervision import JOB_DESCRIPTOR

_CANDIDATE_DESCRIPTOR = JOB_DESCRIPTOR + 1
_FORGED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)


class CandidateGone(BaseException):
    """The candidate will not answer any more; the message is the reason in a judge's report."""


class CandidateError(Exception):
    """The candidate raised an exception of its own making."""


class Candidate:
    """The candidate's process, as seen from the tests."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.gone: CandidateGone | None = None
        self.error = ""
        self.text = ""

    def call(self, function: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Encoded:
        """Call a function there; the result is still encoded.

        Raises:
            CandidateGone: it ended, flooded us, or broke the protocol.
            Exception: the built-in exception that it raised, or `CandidateError`.
        """
        request = dump(
            [
                function,
                [encode(argument, strict=True) for argument in arguments],
                [[name, encode(value, strict=True)] for name, value in keywords.items()],
            ]
        )
        match self._exchange(request):
            case ["value", result, list() as copies] if len(copies) == len(arguments):
                for argument, copy in zip(arguments, copies, strict=True):
                    self._bring_back(argument, copy)
                return result
            case ["raise", str() as error, str() as text]:
                raise _rebuild(error)(text)
            case ["load", str() as error, str() as text]:
                self.error, self.text = error, text
                reason = "load"
            case ["output"]:
                reason = "output"
            case _:
                reason = "malformed"
        return self._give_up(reason)

    def value(self, function: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a function there and rebuild its result here."""
        return self._decode(self.call(function, arguments, keywords))

    def _exchange(self, request: bytes) -> Encoded:
        if self.gone is not None:
            raise self.gone
        # NOTE: one that has ended may have said why before.
        with contextlib.suppress(ConnectionError):
            write_all(_CANDIDATE_DESCRIPTOR, pack(request))
        try:
            frame = read_frame(partial(os.read, _CANDIDATE_DESCRIPTOR), self._limit)
        except (EOFError, OSError):
            self._give_up("ended")
        except FrameTooLong:
            self._give_up("output")
        self._limit -= len(frame)
        try:
            return parse(frame)
        except _FORGED:
            self._give_up("malformed")

    def _bring_back(self, argument: Any, copy: Encoded) -> None:
        if type(argument) not in (list, dict, set):
            return
        changed = self._decode(copy)
        if type(changed) is not type(argument):
            self._give_up("malformed")
        argument.clear()
        (argument.extend if type(argument) is list else argument.update)(changed)

    def _decode(self, encoded: Encoded) -> Any:
        try:
            return decode(encoded)
        except _FORGED:
            self._give_up("malformed")

    def _give_up(self, reason: str) -> NoReturn:
        # NOTE: remembered, because a test with a bare `except` would swallow the exception.
        self.gone = CandidateGone(reason)
        raise self.gone


def run(tests: list[Encoded], limit: int) -> NoReturn:
    """Run the tests in order, report each, and end this process.

    Args:
        tests: `["assert", source]`, or `["call", function, arguments, expected]`, encoded.
        limit: bytes that the candidate may send altogether.
    """
    candidate = Candidate(limit)
    sources = [ast.parse(test[1]) for test in tests if test[0] == "assert"]
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    for name in _free_names(sources):
        names[name] = partial(candidate.value, name)
    for test in tests:
        attempt = Attempt()
        failed = False
        with attempt:
            failed = not _run_test(test, candidate, names)
        if candidate.gone is not None:
            _send(["stop", str(candidate.gone), candidate.error, candidate.text])
            os._exit(0)
        if attempt.error is None:
            _send(["test", "failed" if failed else "passed", "", ""])
        elif isinstance(attempt.error, AssertionError):
            _send(["test", "failed", *describe(attempt.error)])
        else:
            _send(["test", "error", *describe(attempt.error)])
    _send(["end"])
    os._exit(0)


def _run_test(test: list[Encoded], candidate: Candidate, names: dict[str, Any]) -> bool:
    if test[0] == "assert":
        exec(compile(test[1], "<test>", "exec", dont_inherit=True), names)
        return True
    _, function, arguments, expected = test
    result = candidate.call(function, tuple(map(decode, arguments)), {})
    return matches(decode(expected), result)


def _free_names(sources: list[ast.Module]) -> Iterator[str]:
    for source in sources:
        for node in ast.walk(source):
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
                yield node.id


def _rebuild(error: str) -> Callable[[str], Exception]:
    kind = getattr(builtins, error, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind
    return CandidateError


def _send(frame: list[Encoded]) -> None:
    write_all(JOB_DESCRIPTOR, pack(dump(frame)))
