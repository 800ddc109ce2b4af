"""YAML with the line of every value; `extends:` and `--set` are resolved here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from gdpo_tune.core.files import is_file
from gdpo_tune.spec.dump import without_password
from gdpo_tune.spec.merge import at_mark, merge, nest
from gdpo_tune.spec.problems import Mark, Node, Problems, Unreadable, did_you_mean
from gdpo_tune.spec.yaml_nodes import DEEPEST, Expansion

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
            node = merge(node, change)
    if name is not None:
        mark = Mark(f"--name {name}")
        node = merge(node, Node(mark, entries={"name": Node(mark, name)}))
    return node


def read_file(path: Path, problems: Problems, chain: tuple[Path, ...]) -> Node:
    """One file, merged onto the one that it extends."""
    text = read_text(path, problems)
    root = parse(text, str(path), problems)
    if root.entries is None:
        reason = "the file is empty" if root.is_empty() else "not a mapping of keys to values"
        fix = "start from search_spaces/code.yaml; a sweep needs task:, objectives: and space:"
        problems.add(Mark(str(path), 1), "", None, reason, fix)
        raise Unreadable
    own = dict(root.entries)
    extends = own.pop(EXTENDS, None)
    if extends is None:
        return root
    base = read_base(path, extends, problems, (*chain, path.resolve()))
    inherited = dict(base.entries or {})
    # A name decides where a sweep lives: two files never share it by inheritance.
    inherited.pop("name", None)
    return merge(Node(root.mark, entries=inherited), Node(root.mark, entries=own))


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
    files = [file for file in files if is_file(file)]  # a link that leads nowhere is none
    by_stem = {file.stem: str(file) for file in reversed(files)}
    suggestion = did_you_mean(path.stem, by_stem)
    for stem, file in by_stem.items():
        suggestion = suggestion.replace(repr(stem), file)
    return suggestion


def parse(text: str, source: str, problems: Problems) -> Node:
    """YAML 1.2 text as nodes (`3e-5` is a number, `on` and `yes` are words).

    Raises:
        Unreadable: it is not YAML, or means more than any sweep does.
    """
    try:
        data = parser().load(text)
    except DuplicateKeyError as error:
        key = str(getattr(error, "problem", "")).partition('"')[2].partition('"')[0]
        mark = Mark(source, line_of_error(error))
        problems.add(mark, key, None, "the key is given twice", "keep one of the two")
    except MarkedYAMLError as error:
        mark = Mark(source, line_of_error(error))
        problems.add(mark, "", None, *syntax_reason(error, text, mark.line))
    except YAMLError as error:
        reason = "not YAML: " + " ".join(str(error).split())
        problems.add(Mark(source), "", None, reason, "remove characters that are not text")
    except (TypeError, ValueError, RecursionError) as error:
        # The parser lets these through: a mapping as a key, a date without such a day, a thousand
        # brackets. It does not say where.
        reason = f"not a sweep: {str(error) or type(error).__name__}"
        problems.add(Mark(source), "", None, reason, "keep to words, numbers, lists and mappings")
    else:
        return Expansion(problems).node(data, Mark(source, 1))
    raise Unreadable


def parser() -> Any:
    """A round-trip parser: the only one that keeps the line of every key."""
    yaml: Any = YAML(typ="rt", pure=True)
    yaml.composer.warn_double_anchors = False  # YAML 1.2 allows them
    return yaml


def line_of_error(error: MarkedYAMLError) -> int:
    """Line of a syntax error, from 1; 0 if the parser does not say."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return int(mark.line) + 1 if mark else 0


def syntax_reason(error: MarkedYAMLError, text: str, line: int) -> tuple[str, str]:
    """Reason and fix of a syntax error."""
    lines = text.splitlines()
    if 0 < line <= len(lines) and "\t" in lines[line - 1]:
        return "not YAML: a tab, which cannot indent", "indent with spaces"
    what = getattr(error, "problem", None) or getattr(error, "context", None) or "cannot be parsed"
    return f"not YAML: {what}", "look for a missing colon, bracket or quote here or just above"


def read_override(override: str, problems: Problems) -> Node | None:
    """`training.steps=100` as a document of its own."""
    mark = Mark(f"--set {without_password(override)}")
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")) or key.count(".") > DEEPEST:
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
