"""Random damage to YAML files: their values, types, keys, lines and bytes."""

import random
import re
from collections.abc import Callable

VALUES = (
    *("", "null", "true", "-1", "0", "1", "2", "7.5", "1e400", ".nan", ".inf", "-0.0", "1_0"),
    *("0x1f", "1e-320", "1000000000", "99999999999999999999", "2024-01-01", "2024-13-41", "1:2:3"),
    *("x", "embeded", "gdpo", "''", "' '", "a/b", "a/b--c", "../..", "/", "~", "~nouser/x", "./x"),
    *("/proc/1/mem", "/dev/null", "x.py:A", "s3://bucket/x", "http://[::1", "sqlite:///", "file:x"),
    *('"\\0"', '"\\ud800"', '"\\a"', "é" * 200, "a" * 5000, "a/" * 3000, "9" * 5000, "*a", "&a"),
    *("[]", "{}", "[[]]", "[null]", "{a: 1}", "{a: {b: {c: 1}}}", "[1, x, true]", "[4, 4]"),
    *(
        "{log: [0, 1]}",
        "{range: [1, 0]}",
        "{range: [0, 1], step: 0}",
        "{choices: []}",
        "{when: {}}",
    ),
    *("{value: 1, when: {beta: 0}}", "{type: asha}", "{type: x}", "{kind: x}", "!t x", "!!int x"),
    *("{? [a] : 2}", "{<<: 1}", "|", ">", "@", "%", "]", "}", "'", '"', "- a", ": b", "[" * 300),
)
"""Texts that take the place of a value."""
VALUE = re.compile(r"(?<=: )[^#\n{\[]+?(?=\s*(?:#|\n))|(?<=[\[ ])[\w./+-]+(?=[,\]}])", re.MULTILINE)
"""A scalar after its key, or within brackets."""
COLLECTION = re.compile(r"\{[^{}\n]*\}|\[[^\[\]\n]*\]")
NAME = re.compile(
    r"(?<=policy: )(?!\{).*|(?<=extends: ).*|(?<=task: ).*|(?<=storage: ).*|(?<=space: ).*"
    r"|(?<=source: )[^,\n]*|(?<=uri: )[^,\n]*"
)
"""A scalar that may be the path of a file or directory."""
NAMES = (
    *("a" * 5000, "a/" * 3000, "é" * 200, "~nouser/x", "~", "/", ".", "..", "./x", "/dev/null"),
    *("/proc/1/mem", '"\0"', "x.py:A", f"{'a' * 5000}.py:A", "~nouser/x.py:A", "a/b--c", "a/b"),
    *("embeded", "../embedded", f"sqlite:///{'a' * 5000}", f"s3://{'a' * 5000}/x", "' '", "x\ty"),
)
KEY = re.compile(r"[A-Za-z_]\w*(?=:(?: |\n))")


def damage(text: str, rng: random.Random) -> bytes:
    """Return a file with one to three random faults."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        text = rng.choice(OPERATIONS)(text, rng)
    data = bytearray(text, "utf-8", "surrogatepass")
    for _ in range(rng.randint(1, 4) if data and not rng.randrange(5) else 0):
        position = rng.randrange(len(data))
        data[position : position + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return bytes(data[: rng.randrange(len(data))] if data and not rng.randrange(25) else data)


def _replace(text: str, pattern: re.Pattern[str], rng: random.Random, new: str) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return text
    match = rng.choice(found)
    return text[: match.start()] + new + text[match.end() :]


def _change_value(text: str, rng: random.Random) -> str:
    return _replace(text, VALUE, rng, rng.choice(VALUES))


def _change_name(text: str, rng: random.Random) -> str:
    return _replace(text, NAME, rng, rng.choice(NAMES))


def _change_type(text: str, rng: random.Random) -> str:
    return _replace(text, COLLECTION, rng, rng.choice(VALUES))


def _change_key(text: str, rng: random.Random) -> str:
    names = [match[0] for match in KEY.finditer(text)]
    name = rng.choice(names)
    position = rng.randrange(len(name))
    misspelt = name[:position] + rng.choice("aeiou_.0- ") + name[position + rng.randint(0, 1) :]
    new = rng.choice([misspelt, rng.choice(names), rng.choice(VALUES)])
    return _replace(text, re.compile(rf"\b{name}(?=:)"), rng, new)


def _empty_section(text: str, rng: random.Random) -> str:
    """Replace a key and everything below it by the key with another value."""
    below = re.compile(r"(?<=:)(?: *#[^\n]*)?\n(?:(?P<indent>[ ]+)[^\n]*\n)+")
    return _replace(text, below, rng, f" {rng.choice(VALUES)}\n")


def _change_lines(text: str, rng: random.Random) -> str:
    """Remove, repeat, move or indent a line."""
    lines = text.splitlines(keepends=True)
    line = lines.pop(rng.randrange(len(lines))) if lines else ""
    kept = rng.choice([[], [line, line], [line], [" " * rng.randint(1, 5) + line], ["\t" + line]])
    position = rng.randrange(len(lines) + 1)
    return "".join([*lines[:position], *kept, *lines[position:]])


OPERATIONS: tuple[Callable[[str, random.Random], str], ...] = (
    _change_value,
    _change_value,
    _change_name,
    _change_type,
    _change_key,
    _empty_section,
    _change_lines,
)
