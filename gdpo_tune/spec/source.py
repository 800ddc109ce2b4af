"""YAML with the line of every value; `extends:` and `--set` are resolved here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from gdpo_tune.spec.problems import Mark, Node, Problems, did_you_mean

DOMAIN_KEYS = ("range", "log", "choices", "value", "step", "when")
EXTENDS = "extends"


def read(path: Path, overrides: Sequence[str], name: str | None, problems: Problems) -> Node:
    """The whole document: the file, what it extends, and the overrides on top.

    A malformed override is added to `problems`; the rest is still read.

    Raises:
        SpecError: a file is missing, unreadable, empty, not YAML, or extends itself.
    """
    try:
        node = read_file(path, problems, ())
    except Unreadable:
        problems.raise_if_any()
        raise
    for override in overrides:
        change = read_override(override, problems)
        if change is not None:
            node = merge(node, change, ())
    if name is not None:
        mark = Mark(f"--name {name}")
        node = merge(node, Node({"name": Node(name, mark)}, mark), ())
    return node


class Unreadable(Exception):
    """A file cannot be used at all; why is already among the problems."""


def read_file(path: Path, problems: Problems, chain: tuple[Path, ...]) -> Node:
    """One file, merged onto the one that it extends."""
    text = read_text(path, problems)
    root = parse(text, str(path), problems)
    entries = root.mapping()
    if entries is None:
        reason = "the file is empty" if root.value is None else "not a mapping of keys to values"
        fix = "start from search_spaces/code.yaml; a sweep needs task:, objectives: and space:"
        problems.add(Mark(str(path), 1), "", None, reason, fix)
        raise Unreadable
    extends = entries.pop(EXTENDS, None)
    own = Node(entries, root.mark)
    if extends is None:
        return own
    base = read_base(path, extends, problems, (*chain, path.resolve()))
    inherited = dict(base.mapping() or {})
    # A name decides where a sweep lives: two files never share it by inheritance.
    inherited.pop("name", None)
    return merge(Node(inherited, root.mark), own, ())


def read_base(path: Path, extends: Node, problems: Problems, chain: tuple[Path, ...]) -> Node:
    """The file that `path` extends."""
    if not isinstance(extends.value, str) or not extends.value:
        fix = "write one file, relative to this one, such as extends: code.yaml"
        problems.at(extends, (EXTENDS,), "not the name of a file", fix)
        raise Unreadable
    base = Path(os.path.normpath(path.parent / extends.value))
    if base.resolve() in chain:
        names = " -> ".join(file.name for file in (*chain, base))
        problems.at(extends, (EXTENDS,), f"a circle: {names}", "remove one of these extends:")
        raise Unreadable
    if not base.is_file():
        fix = missing_file_fix(base) + "the file is looked for relative to this one"
        problems.at(extends, (EXTENDS,), f"there is no file {base}", fix)
        raise Unreadable
    return read_file(base, problems, chain)


def read_text(path: Path, problems: Problems) -> str:
    """The file's text."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        fix = (
            missing_file_fix(path)
            + "give the path of a search space, such as search_spaces/code.yaml"
        )
        problems.add(Mark(str(path)), "", None, "there is no such file", fix)
    except UnicodeDecodeError as error:
        fix = "save the file as UTF-8 text"
        problems.add(Mark(str(path)), "", None, f"not UTF-8 at byte {error.start}", fix)
    except OSError as error:
        fix = "give the path of a readable YAML file"
        problems.add(Mark(str(path)), "", None, error.strerror or "cannot be read", fix)
    raise Unreadable


def missing_file_fix(path: Path) -> str:
    """A file of a similar name beside the missing one or in `search_spaces/`, if there is any."""
    folders = [path.parent, Path("search_spaces")]
    files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.yaml")]
    by_stem = {file.stem: str(file) for file in reversed(files)}
    suggestion = did_you_mean(path.stem, by_stem)
    for stem, file in by_stem.items():
        suggestion = suggestion.replace(repr(stem), file)
    return suggestion


def parse(text: str, source: str, problems: Problems) -> Node:
    """YAML 1.2 text as nodes (`3e-5` is a number, `on` and `yes` are words)."""
    try:
        data = YAML(typ="rt", pure=True).load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        key = str(error.problem).partition('"')[2].partition('"')[0]
        fix = "keep one of the two"
        problems.add(Mark(source, line), key, None, "the key is given twice", fix)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        problems.add(Mark(source, line), "", None, *syntax_reason(error, text, line))
    except YAMLError as error:
        reason = "not YAML: " + " ".join(str(error).split())
        problems.add(Mark(source), "", None, reason, "remove characters that are not text")
    else:
        return to_node(data, Mark(source, 1), problems, ())
    raise Unreadable


def syntax_reason(error: MarkedYAMLError, text: str, line: int) -> tuple[str, str]:
    """Reason and fix of a syntax error."""
    lines = text.splitlines()
    if 0 < line <= len(lines) and "\t" in lines[line - 1]:
        return "not YAML: a tab, which cannot indent", "indent with spaces"
    what = str(error.problem or error.context or "cannot be parsed")
    return f"not YAML: {what}", "look for a missing colon, bracket or quote here or just above"


def to_node(data: object, mark: Mark, problems: Problems, above: tuple[int, ...]) -> Node:
    """Plain values with marks; a dotted key becomes nested mappings."""
    if id(data) in above:
        problems.add(mark, "", None, "an alias that contains itself", "write the value out")
        return Node(None, mark)
    inside = (*above, id(data))
    if isinstance(data, CommentedMap):
        node = Node({}, mark)
        for key, value in data.items():
            where = Mark(mark.source, line_of(data, key, mark.line))
            child = to_node(value, where, problems, inside)
            addition = nest(str(key), child)
            clash = first_clash(node, addition, ())
            if clash is not None:
                fix = "keep one of the two (a dotted key is the same as nested mappings)"
                problems.add(where, clash, None, "the key is given twice", fix)
            node = merge(node, addition, None)
        return node
    if isinstance(data, CommentedSeq):
        lines = [line_of(data, index, mark.line) for index in range(len(data))]
        children = [
            to_node(value, Mark(mark.source, line), problems, inside)
            for value, line in zip(data, lines, strict=True)
        ]
        return Node(children, mark)
    return Node(plain_scalar(data), mark)


def line_of(data: CommentedMap | CommentedSeq, key: object, default: int) -> int:
    """Line of an entry, from 1; merged-in entries (`<<`) have none of their own."""
    position = data.lc.data.get(key) if data.lc.data else None
    return position[0] + 1 if position else default


def plain_scalar(data: object) -> object:
    """Built-in types instead of the parser's own, which remember their notation."""
    if isinstance(data, ScalarBoolean):  # an int, unlike bool: `true` with an anchor
        return bool(data)
    for kind in (bool, int, float, str):
        if isinstance(data, kind):
            return kind(data)
    return data if data is None else str(data)


def read_override(override: str, problems: Problems) -> Node | None:
    """`training.steps=100` as a document of its own."""
    mark = Mark(f"--set {override}")
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        fix = "write --set KEY=VALUE, such as --set training.steps=100"
        problems.add(mark, "", None, "not of the form KEY=VALUE", fix)
        return None
    if key.strip() == EXTENDS:
        fix = "write extends: in the file, or give the other file"
        problems.add(mark, EXTENDS, None, "works in files alone", fix)
        return None
    nested = Problems(mark)
    try:
        value = parse(text, mark.source, nested)
    except Unreadable:
        reason = nested.found[0][1].reason
        problems.add(mark, key.strip(), text, reason, "quote the value for the shell and for YAML")
        return None
    return nest(key.strip(), at_mark(value, mark))


def at_mark(node: Node, mark: Mark) -> Node:
    """The same values, all written at `mark`."""
    entries, elements = node.mapping(), node.items()
    if entries is not None:
        return Node({key: at_mark(child, mark) for key, child in entries.items()}, mark)
    if elements is not None:
        return Node([at_mark(child, mark) for child in elements], mark)
    return Node(node.value, mark)


def nest(key: str, node: Node) -> Node:
    """`a.b: x` as `{a: {b: x}}`."""
    parts = key.split(".")
    if not all(parts):
        parts = [key]
    for part in reversed(parts):
        node = Node({part: node}, node.mark)
    return node


def first_clash(first: Node, second: Node, path: tuple[str, ...]) -> str | None:
    """The dotted key that both give a value to, if any."""
    ours, theirs = first.mapping(), second.mapping()
    if ours is None or theirs is None:
        return ".".join(path)
    for key in ours.keys() & theirs.keys():
        clash = first_clash(ours[key], theirs[key], (*path, key))
        if clash is not None:
            return clash
    return None


def merge(base: Node, change: Node, path: tuple[str, ...] | None) -> Node:
    """`change` on top of `base`: mappings merge, anything else is replaced.

    A domain of the space is replaced as a whole, because `{log: [1, 2]}` over `{range: [0, 1]}`
    means the former alone. A null removes what was inherited. With `path` None neither rule
    holds: the two are halves of one mapping.
    """
    ours, theirs = base.mapping(), change.mapping()
    if ours is None or theirs is None or (path is not None and is_domain(path, ours, theirs)):
        return change
    merged = dict(ours)
    for key, child in theirs.items():
        if path is not None and child.value is None and key in merged:
            del merged[key]
        elif key in merged:
            merged[key] = merge(merged[key], child, None if path is None else (*path, key))
        else:
            merged[key] = child
    return Node(merged, base.mark)


def is_domain(path: tuple[str, ...], ours: dict[str, Node], theirs: dict[str, Node]) -> bool:
    """Whether one of two mappings at `path` is the domain of a parameter."""
    inside_space = len(path) > 1 and path[0] == "space"
    return inside_space and any(key in DOMAIN_KEYS for key in (*ours, *theirs))
