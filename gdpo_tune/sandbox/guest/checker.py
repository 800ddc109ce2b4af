"""Runs free-form tests in a locked process beside the candidate's, which it calls by message.

The tests are Python that the task's author wrote. A name that they use and that Python does
not define becomes a function that sends its arguments to the candidate's process and returns a
copy of the result. A name that a test does not only call becomes a copy of its value when the
test begins, if that value can cross; but `math.pi` is the standard module's.

An object that cannot cross arrives as a `Handle`, which tests can pass back and call. They reach
into objects that they make by a class's name, as in `Solution().f(1)` or `root.left = Node(2)`, and
not into what a function returns: it could answer any question about itself as it likes.

A list, dict or set that a function changed in place is changed in the test as well, from the
next statement on. Otherwise a function that empties `x` would pass `f(x) == sorted(x)`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import os
import signal
import sys
import types
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

from .grading import FORGED, matches
from .protocol import (
    DECODERS,
    ENCODERS,
    Encoded,
    FrameTooLong,
    Opaque,
    decode,
    dump,
    encode,
    pack_frame,
    parse,
    read_frame,
    write_all,
)
from .supervision import PARTNER_DESCRIPTOR
from .untrusted import ExceptionCapture, describe_exception

_CANDIDATE_DESCRIPTOR = PARTNER_DESCRIPTOR + 1
_APPLY_CHANGES = "apply changes"
"""Not a name that a test can spell."""


class CandidateGone(BaseException):
    """The candidate will not answer again: reason, error and text of the last verdict."""


class Handle(Opaque):
    """An object in the candidate's process; only one that is open has attributes."""

    _label: str | None = None
    """Name by which a test got an open object, or ""; None while it is closed."""

    def __init__(self, candidate: Candidate, payload: Encoded) -> None:
        type_name, reference = payload
        if type(type_name) is not str or type(reference) is not str:
            raise TypeError("an object has two names")
        self.__dict__.update(_type_name=type_name, _candidate=candidate, _reference=reference)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it there; what a class returns is open."""
        result = self._candidate.call_and_decode(self._reference, *arguments, **keywords)
        return _open(result) if (self._label or "")[:1].isupper() else result

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse a copy, which would stand for the same object."""
        raise TypeError(f"a {self._type_name} cannot be copied: it is in the candidate's process")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of an open object."""
        if self._label is None or name.startswith("__"):
            return super().__getattr__(name)
        return _open(self._candidate.call_and_decode("own getattr", self, name), name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of an open object there."""
        if self._label is None:
            super().__getattr__(name)
        self._candidate.call_and_decode("own setattr", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        """Return a handle of its iterator."""
        return self._candidate.call_and_decode("own iter", self)

    def __next__(self) -> Any:
        """Return its next item, one at a time: there may be no end, and the next one may raise."""
        return self._candidate.call_and_decode("own next", self)


def _open(value: Any, label: str = "") -> Any:
    if isinstance(value, Handle):
        value.__dict__["_label"] = label
    return value


def _encode_built_in(value: Any, inner: object) -> Encoded:
    """Return the name of a type or function of Python's own, such as `int`, as an argument."""
    if getattr(builtins, value.__name__, None) is not value:
        raise TypeError(f"{value.__name__} cannot be sent to the sandbox: it is not Python's own")
    return {"name": value.__name__}


class Candidate:
    """The candidate's process, as the tests reach it; it may send `limit` bytes altogether."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.gone: CandidateGone | None = None
        self._changes: list[tuple[Any, Any]] = []

    def call(self, function: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Encoded:
        """Call a function there and return its result, still encoded.

        Raises:
            CandidateGone: the candidate ended, sent too much, or broke the protocol.
            Exception: the exception that the function raised, as tests can catch it.
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
                    if type(argument) in (list, dict, set):
                        changed = self._decode(copy)
                        if type(changed) is not type(argument):
                            self._give_up("malformed")
                        self._changes.append((argument, changed))
                return result
            case ["raise", str() as error, str() as text, str() as kind]:
                if kind == "StopIteration" and function != "own next":
                    # NOTE: it would end a test's `for` over `map(f, inputs)` before any assertion.
                    kind = "RuntimeError"
                raise self._rebuild(error, text, kind)
            case _:
                return self._give_up("malformed")

    def fetch(self, name: str) -> Any:
        """Copy the value of a name there; return an open handle of one that cannot cross.

        Raises:
            CandidateGone: as for `call`.
            NameError: there is no such name.
        """
        match self._exchange(dump([name, None, []])):
            case ["value", encoded]:
                return _open(self._decode(encoded), name)
            case ["raise", *_]:
                raise NameError(name)
            case _:
                return self._give_up("malformed")

    def call_and_decode(self, function: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a function there and rebuild its result here."""
        result = self._decode(self.call(function, arguments, keywords))
        return _open(result) if function[:1].isupper() else result

    def apply_changes(self) -> None:
        """Apply to the tests' values what calls have changed in place."""
        for argument, changed in self._changes:
            argument.clear()
            (argument.extend if type(argument) is list else argument.update)(changed)
        self._changes.clear()

    def _exchange(self, request: bytes) -> Encoded:
        if self.gone is not None:
            raise self.gone
        # NOTE: a candidate that has ended may have sent the reason before.
        with contextlib.suppress(ConnectionError):
            write_all(_CANDIDATE_DESCRIPTOR, pack_frame(request))
        try:
            frame = read_frame(partial(os.read, _CANDIDATE_DESCRIPTOR), self._limit)
        except (EOFError, OSError):
            self._give_up("ended")
        except FrameTooLong:
            self._give_up("output")
        self._limit -= len(frame)
        try:
            answer = parse(frame)
        except FORGED:
            self._give_up("malformed")
        match answer:
            case ["load", str() as error, str() as text]:
                return self._give_up("load", error, text)
            case ["output"]:
                return self._give_up("output")
            case _:
                return answer

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

    def _give_up(self, reason: str, error: str = "", text: str = "") -> NoReturn:
        # NOTE: remembered, because a test with a bare `except` would swallow the exception.
        self.gone = CandidateGone(reason, error, text)
        raise self.gone


def run_tests() -> NoReturn:
    """Read tests from the trainer, report the verdict of each, and end this process.

    The frame has the bytes that the candidate may send altogether, the CPU seconds of this process,
    and tests as in `jobs.encode_tests`.
    """
    limit, seconds, tests = parse(read_frame(partial(os.read, PARTNER_DESCRIPTOR), 1 << 30))
    # NOTE: its signal ends this process.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    sys.set_int_max_str_digits(0)
    candidate = Candidate(limit)
    DECODERS["object"] = partial(Handle, candidate)
    ENCODERS[Handle] = lambda handle, inner: {"name": handle.__dict__["_reference"]}
    ENCODERS.update(dict.fromkeys((type, types.BuiltinFunctionType), _encode_built_in))
    nodes = [node for test in tests if test[0] == "assert" for node in ast.walk(ast.parse(test[1]))]
    borrowed = {name: partial(candidate.call_and_decode, name) for name in _find_free_names(nodes)}
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins, **borrowed}
    names.update(_import_standard_modules(nodes))
    names[_APPLY_CHANGES] = candidate.apply_changes
    for test in tests:
        attempt = ExceptionCapture()
        passed = False
        with attempt:
            passed = _run_test(test, candidate, names, borrowed)
        if candidate.gone is not None:
            _send(["stop", *candidate.gone.args])
            os._exit(0)
        if attempt.error is None:
            _send(["test", "passed" if passed else "failed", "", ""])
        else:
            verdict = "failed" if isinstance(attempt.error, AssertionError) else "error"
            _send(["test", verdict, *describe_exception(attempt.error)])
    os._exit(0)


def _run_test(
    test: list[Encoded], candidate: Candidate, names: dict[str, Any], borrowed: dict[str, Any]
) -> bool:
    if test[0] == "assert":
        tree = ast.parse(test[1])
        nodes = list(ast.walk(tree))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        values = _find_free_names(node for node in nodes if id(node) not in called)
        _borrow_names(values - _find_assigned_names(nodes), candidate, names, borrowed)
        tree = ast.fix_missing_locations(_InsertChanges().visit(tree))
        exec(compile(tree, "<test>", "exec", dont_inherit=True), names)
        return True
    _, function, arguments, expected = test
    result = candidate.call(function, tuple(map(decode, arguments)), {})
    return matches(decode(expected), result)


def _borrow_names(
    values: set[str], candidate: Candidate, names: dict[str, Any], borrowed: dict[str, Any]
) -> None:
    """Replace names that no test has assigned by their values in the candidate's process."""
    for name in values:
        if names.get(name) is not borrowed.get(name):
            continue
        names.pop(name, None)
        borrowed.pop(name, None)
        # NOTE: it may be a name inside of the test, such as an argument of a lambda.
        with contextlib.suppress(NameError):
            names[name] = borrowed[name] = candidate.fetch(name)


def _find_free_names(nodes: Iterable[ast.AST]) -> set[str]:
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return {name for name in names if not hasattr(builtins, name)}


def _find_assigned_names(nodes: Iterable[ast.AST]) -> set[str]:
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _import_standard_modules(nodes: list[ast.AST]) -> Iterator[tuple[str, types.ModuleType]]:
    """Import modules that tests use without an import, as if they had the candidate's imports."""
    offered = sys.stdlib_module_names - _find_assigned_names(nodes)
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name in offered:
                with contextlib.suppress(ImportError):
                    yield name, importlib.import_module(name)
            case _:
                pass


class _InsertChanges(ast.NodeTransformer):
    """Inserts a call of `apply_changes` before each statement."""

    def visit(self, node: ast.AST) -> Any:
        """Return the node, or the call and the node."""
        self.generic_visit(node)
        match node:
            case ast.Expr(value=ast.Constant()) | ast.ImportFrom(module="__future__"):
                # NOTE: these must come first.
                return node
            case ast.stmt():
                call = ast.Call(ast.Name(_APPLY_CHANGES, ast.Load()), [], [])
                return [ast.Expr(call), node]
            case _:
                return node


def _send(frame: list[Encoded]) -> None:
    write_all(PARTNER_DESCRIPTOR, pack_frame(dump(frame)))
