"""Runs free-form tests in a locked fork of the judge and asks the candidate by message.

The tests are Python that the task's author wrote. A name that they use and that Python does
not know becomes a function that sends its arguments to the candidate's process and brings
back a copy of the result. A name that a test does not only call becomes a copy of what it
stands for when the test begins, if that is a value that can cross; but `math.pi` is the standard
module's. So tests can call functions and read constants; they cannot reach into a candidate's
classes or pass functions to it.

A list, dict or set that a function changed in place is changed in the test as well, from the
next statement on: else `f(x) == sorted(x)` would be passed by a function that empties `x`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from .comparison import matches
from .encoding import Encoded, Opaque, Tagged, decode, dump, encode, parse
from .frames import FrameTooLong, pack, read_frame, write_all
from .report import FORGED
from .supervision import PARTNER_DESCRIPTOR
from .untrusted import Attempt, describe

_CANDIDATE_DESCRIPTOR = PARTNER_DESCRIPTOR + 1
_SETTLE = "settle changes"
"""No name that a test can spell."""


class CandidateGone(BaseException):
    """The candidate will not answer any more; the message is the reason in a judge's report."""


class Candidate:
    """The candidate's process, as seen from the tests."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.gone: CandidateGone | None = None
        self.error = ""
        self.text = ""
        self._changes: list[tuple[Any, Any]] = []

    def call(self, function: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Encoded:
        """Call a function there; the result is still encoded.

        Raises:
            CandidateGone: it ended, flooded us, or broke the protocol.
            Exception: the exception that it raised, as what tests can catch it as.
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
                    self._note_change(argument, copy)
                return result
            case ["raise", str() as error, str() as text, str() as kind]:
                raise self._rebuild(error, text, kind)
            case other:
                return self._stop(other)

    def fetch(self, name: str) -> Any:
        """A copy of what a name there stands for; for what cannot cross, a function that calls it.

        Raises:
            CandidateGone: as for `call`.
            NameError: there is no such name.
        """
        match self._exchange(dump([name, None, []])):
            case ["value", encoded]:
                value = self._decode(encoded)
                return partial(self.value, name) if isinstance(value, Opaque) else value
            case ["raise", *_]:
                raise NameError(name)
            case other:
                return self._stop(other)

    def value(self, function: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a function there and rebuild its result here."""
        result = self.call(function, arguments, keywords)
        match result:
            case Tagged(tag="items", payload=str() as following):
                return self._go_through(following)
            case _:
                return self._decode(result)

    def settle(self) -> None:
        """Let the tests see what calls have changed in place."""
        for argument, changed in self._changes:
            argument.clear()
            (argument.extend if type(argument) is list else argument.update)(changed)
        self._changes.clear()

    def _go_through(self, following: str) -> Iterator[Any]:
        # NOTE: one by one, because there may be no end, and what comes next may raise.
        while True:
            try:
                item = self.value(following)
            except StopIteration:
                return
            yield item

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
        except FORGED:
            self._give_up("malformed")

    def _stop(self, frame: Encoded) -> NoReturn:
        match frame:
            case ["load", str() as error, str() as text]:
                self.error, self.text = error, text
                self._give_up("load")
            case ["output"]:
                self._give_up("output")
            case _:
                self._give_up("malformed")

    def _note_change(self, argument: Any, copy: Encoded) -> None:
        if type(argument) not in (list, dict, set):
            return
        changed = self._decode(copy)
        if type(changed) is not type(argument):
            self._give_up("malformed")
        self._changes.append((argument, changed))

    def _rebuild(self, error: str, text: str, kind: str) -> Exception:
        base = getattr(builtins, kind, None)
        if not (isinstance(base, type) and issubclass(base, Exception)):
            self._give_up("malformed")

        def show(self: Exception) -> str:
            return text

        try:
            # NOTE: a class of its own, because some built-in ones need more than a text.
            return type(error, (base,), {"__init__": Exception.__init__, "__str__": show})(text)
        except FORGED:
            self._give_up("malformed")

    def _decode(self, encoded: Encoded) -> Any:
        try:
            return decode(encoded)
        except FORGED:
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
    borrowed = {name: partial(candidate.value, name) for name in _free_names(sources)}
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins, **borrowed}
    names.update(_standard_modules(sources))
    names[_SETTLE] = candidate.settle
    for test in tests:
        attempt = Attempt()
        failed = False
        with attempt:
            failed = not _run_test(test, candidate, names, borrowed)
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


def _run_test(
    test: list[Encoded], candidate: Candidate, names: dict[str, Any], borrowed: dict[str, Any]
) -> bool:
    if test[0] == "assert":
        tree = ast.parse(test[1])
        _borrow(_names_not_called(tree), candidate, names, borrowed)
        _settle_between(tree)
        exec(compile(tree, "<test>", "exec", dont_inherit=True), names)
        return True
    _, function, arguments, expected = test
    result = candidate.call(function, tuple(map(decode, arguments)), {})
    return matches(decode(expected), result)


def _free_names(sources: list[ast.Module]) -> Iterator[str]:
    for source in sources:
        for node in ast.walk(source):
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
                yield node.id


def _borrow(
    wanted: set[str], candidate: Candidate, names: dict[str, Any], borrowed: dict[str, Any]
) -> None:
    """Replace names that no test has made its own by what they stand for now."""
    for name in wanted:
        if names.get(name) is not borrowed.get(name):
            continue
        names.pop(name, None)
        borrowed.pop(name, None)
        # NOTE: it may be a name inside of the test, such as an argument of a lambda.
        with contextlib.suppress(NameError):
            names[name] = borrowed[name] = candidate.fetch(name)


def _names_not_called(source: ast.Module) -> set[str]:
    nodes = list(ast.walk(source))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = [node for node in nodes if isinstance(node, ast.Name) and id(node) not in called]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} & set(_free_names([source])) - own


def _standard_modules(sources: list[ast.Module]) -> Iterator[tuple[str, types.ModuleType]]:
    """Modules that tests use without an import, as if the candidate's imports were theirs."""
    nodes = [node for source in sources for node in ast.walk(source)]
    own = {node.id for node in nodes if isinstance(node, ast.Name) and _is_set(node)}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name in sys.stdlib_module_names - own:
                with contextlib.suppress(ImportError):
                    yield name, importlib.import_module(name)
            case _:
                pass


def _is_set(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _settle_between(tree: ast.Module) -> None:
    """Let changes in place be seen from each statement on."""
    settle = ast.Expr(ast.Call(ast.Name(_SETTLE, ast.Load()), [], []))
    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                statements[:] = list(_with_before_each(settle, statements))
    ast.fix_missing_locations(tree)


def _with_before_each(settle: ast.stmt, statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.ImportFrom(module="__future__"):
                # NOTE: these must come first.
                pass
            case _:
                yield settle
        yield statement


def _send(frame: list[Encoded]) -> None:
    write_all(PARTNER_DESCRIPTOR, pack(dump(frame)))
