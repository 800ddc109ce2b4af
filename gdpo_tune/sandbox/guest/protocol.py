"""Messages between the processes of the sandbox, and the values in them.

Most messages are frames: a length of four bytes, then the payload. A zygote's requests and answers
have a fixed size instead.

Values are tagged JSON. A list, a string, a boolean, None, an integer below 2^53 and a finite float
are themselves; every other value is an object with one key, its tag. Only exact built-in types
cross, so no method of a candidate, `__eq__` included, ever runs outside of its own process. Reading
never builds a table from foreign keys, whose collisions could stall the reader.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

HEADER = struct.Struct("=I")
READY = HEADER.pack(0)
"""The empty frame: a fork sends it once it is locked, before it reads its job."""
PRINTED = b">"
"""First byte of a frame of printed bytes; every other frame is JSON."""


class Allowance(NamedTuple):
    """Limits of one fork; as a message, the request for it."""

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    file_bytes: int = 0
    """Most bytes of a file; with 0 the fork has no files."""

    FORMAT = struct.Struct("=ddQQ")


class ExitStatus(NamedTuple):
    """How the process of a candidate, or of its tests, ended; the answer to a request."""

    signal: int
    """The signal that ended it, by Linux's numbers; 0 after an exit."""
    timed_out: bool
    """True if it was killed at a limit of its clocks."""
    cpu_seconds: float
    peak_bytes: int

    FORMAT = struct.Struct("=i?dQ")


class FrameTooLong(Exception):
    """A header that announces more than the receiver takes."""


def pack_frame(payload: bytes) -> bytes:
    """Put the length in front of a payload."""
    return HEADER.pack(len(payload)) + payload


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, however many calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_exactly(receive: Callable[[int], bytes], count: int) -> bytes:
    """Call `receive(at_most)` until `count` bytes have arrived; raise EOFError before that."""
    chunks: list[bytes] = []
    while count:
        chunk = receive(count)
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def read_frame(receive: Callable[[int], bytes], limit: int) -> bytes:
    """Read one frame and return its payload.

    Raises:
        EOFError: the sender has closed.
        FrameTooLong: the payload is longer than `limit` bytes; it is not read.
    """
    (length,) = HEADER.unpack(read_exactly(receive, HEADER.size))
    if length > limit:
        raise FrameTooLong
    return read_exactly(receive, length)


MAX_DEPTH = 100
_EXACT_IN_JSON = 2**53

Encoded: TypeAlias = Any
"""Nested lists and scalars as `json` writes and reads them, with objects as `Tagged`."""


class Tagged(NamedTuple):
    """An object of tagged JSON, as `parse` returns it."""

    tag: str
    payload: Any


class Opaque:
    """Replacement of a value that cannot cross: equal to nothing, itself included."""

    _type_name = "value"

    def __init__(self, type_name: str) -> None:
        self._type_name = type_name

    def __eq__(self, other: object) -> bool:
        """Return False, because this process cannot know."""
        return False

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        """Refuse with the reason why a test finds no attribute."""
        reason = "which stays in the candidate's process: tests get built-in values alone"
        raise AttributeError(f"{name!r} of a {self._type_name}, {reason}")


def encode(
    value: object,
    *,
    strict: bool = False,
    depth: int = 0,
    keep: Callable[[object], Encoded] | None = None,
) -> Encoded:
    """Encode one value for `json.dumps`.

    Instances of a subclass of a built-in type become the built-in value; unless `strict`, numpy's
    scalars and arrays become numbers and lists. Any other value is refused if `strict`, else
    encoded by `keep`, or else opaque. `depth` counts the containers around it.

    Raises:
        ValueError: containers nested more than `MAX_DEPTH` deep, or in a circle.
        TypeError: `strict`, and the value has no encoding.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if depth > MAX_DEPTH:
        raise ValueError(f"containers nested more than {MAX_DEPTH} deep")
    encoder = ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, lambda item: encode(item, strict=strict, depth=depth + 1, keep=keep))
    for base in _BASES:
        if isinstance(value, base):
            return encode(base(value), strict=strict, depth=depth, keep=keep)
    if strict:
        raise TypeError(f"a value of type {kind.__name__} cannot be sent to the sandbox")
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        plain = cast("Any", value).tolist()
        # NOTE: a longdouble has no Python form and stays as it is.
        if type(plain) is not kind:
            return encode(plain, depth=depth, keep=keep)
    return keep(value) if keep else {"opaque": str(kind.__name__)[:80]}


def dump(encoded: Encoded) -> bytes:
    """Return the bytes of an encoded value, or of a list that holds some."""
    return _ENCODER.encode(encoded).encode()


def parse(data: bytes) -> Encoded:
    """Read the bytes that `dump` returns; every object becomes `Tagged`.

    Raises:
        ValueError, RecursionError: this is not tagged JSON, or nested too deeply.
    """
    return _DECODER.decode(data.decode("ascii"))


def decode(encoded: Encoded) -> Any:
    """Rebuild a value; only for data of a trusted sender, or in a locked process.

    Raises:
        ValueError, TypeError: this is not an encoded value.
    """
    if isinstance(encoded, Tagged):
        decoder = DECODERS.get(encoded.tag)
        if decoder is None:
            raise ValueError(f"no tag {encoded.tag!r}")
        return decoder(encoded.payload)
    if isinstance(encoded, list):
        return [decode(item) for item in encoded]
    return encoded


def decode_parts(payload: Encoded) -> tuple[Any, Any]:
    """Return the two numbers of a complex number or a fraction; refuse anything else."""
    first, second = payload
    for part in (first, second):
        # NOTE: checked before it is decoded, because a set in its place would be built.
        if type(part) not in (int, float) and not (
            type(part) is Tagged and part.tag in ("int", "float")
        ):
            raise TypeError(f"a number is made of numbers, not of a {type(part).__name__}")
    return decode(first), decode(second)


_Inner: TypeAlias = Callable[[object], Encoded]


def _encode_set(values: Iterable[object], inner: _Inner) -> list[Encoded]:
    # NOTE: sorted, so that the receiver's set does not depend on the sender's hash seed.
    return sorted((inner(value) for value in values), key=repr)


ENCODERS: dict[type, Callable[[Any, _Inner], Encoded]] = {
    # NOTE: hexadecimal takes linear time to read; decimal digits take quadratic time.
    int: lambda value, inner: value if abs(value) < _EXACT_IN_JSON else {"int": hex(value)},
    float: lambda value, inner: value if math.isfinite(value) else {"float": repr(value)},
    list: lambda value, inner: [inner(item) for item in value],
    tuple: lambda value, inner: {"tuple": [inner(item) for item in value]},
    dict: lambda value, inner: {"dict": [[inner(k), inner(v)] for k, v in value.items()]},
    set: lambda value, inner: {"set": _encode_set(value, inner)},
    frozenset: lambda value, inner: {"frozenset": _encode_set(value, inner)},
    bytes: lambda value, inner: {"bytes": value.hex()},
    bytearray: lambda value, inner: {"bytes": value.hex()},
    complex: lambda value, inner: {"complex": [inner(value.real), inner(value.imag)]},
    Decimal: lambda value, inner: {"decimal": str(value)},
    Fraction: lambda value, inner: {"fraction": [inner(value.numerator), inner(value.denominator)]},
    datetime.datetime: lambda value, inner: {"datetime": value.isoformat()},
    datetime.date: lambda value, inner: {"date": value.isoformat()},
    datetime.timedelta: lambda value, inner: {
        "timedelta": [value.days, value.seconds, value.microseconds]
    },
}
_BASES: tuple[type[Any], ...] = (
    int, float, str, list, tuple, dict, set, frozenset, bytes, bytearray, complex,
)  # fmt: skip


DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda payload: int(payload, 16),
    "float": float,
    "tuple": lambda payload: tuple(decode(item) for item in payload),
    "dict": lambda payload: {decode(key): decode(value) for key, value in payload},
    "set": lambda payload: {decode(item) for item in payload},
    "frozenset": lambda payload: frozenset(decode(item) for item in payload),
    "bytes": bytes.fromhex,
    "complex": lambda payload: complex(*decode_parts(payload)),
    "decimal": Decimal,
    "fraction": lambda payload: Fraction(*decode_parts(payload)),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "timedelta": lambda payload: datetime.timedelta(*payload),
    "opaque": Opaque,
}


def _build_tagged(pairs: list[tuple[str, Any]]) -> Tagged:
    if len(pairs) != 1:
        raise ValueError("an object of tagged JSON has one key")
    return Tagged(*pairs[0])


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a value of tagged JSON")


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_build_tagged, parse_constant=_refuse_constant)
