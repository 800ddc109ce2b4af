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
from gdpo_tune.spec.problems import Mark, Node, Problems, Unreadable, did_you_mean, without_password
from gdpo_tune.spec.yaml_nodes import DEEPEST, NodeBuilder, merge, nest

EXTENDS = "extends"


def read_document(
    path: Path, overrides: Sequence[str], name: str | None, problems: Problems
) -> Node:
    """Return the file, merged onto the files that it extends, with the overrides on top.

    A malformed override is added to `problems`; the rest is still read.

    Raises:
        SpecError: a file is missing, unreadable, empty, not YAML, or extends itself.
    """
    try:
        node = _read_file(path, problems, ())
    except Unreadable:
        problems.raise_if_any()
        raise
    for override in overrides:
        change = _read_override(override, problems)
        if change is not None:
            node = merge(node, change)
    if name is not None:
        mark = Mark(f"--name {name}")
        node = merge(node, Node(mark, entries={"name": Node(mark, name)}))
    return node


def _read_file(path: Path, problems: Problems, chain: tuple[Path, ...]) -> Node:
    """Return one file, merged onto the one that it extends."""
    root = parse(read_text(path, problems), str(path), problems)
    if root.entries is None:
        reason = "the file is empty" if root.is_empty() else "not a mapping of keys to values"
        fix = "start from search_spaces/code.yaml; a sweep needs task:, objectives: and space:"
        problems.add(Mark(str(path), 1), "", None, reason, fix)
        raise Unreadable
    own = dict(root.entries)
    extends = own.pop(EXTENDS, None)
    if extends is None:
        return root
    base = _read_base(path, extends, problems, (*chain, path.resolve()))
    # A name decides where a sweep lives: two files never share it by inheritance.
    inherited = {key: node for key, node in (base.entries or {}).items() if key != "name"}
    return merge(Node(root.mark, entries=inherited), Node(root.mark, entries=own))


def _read_base(path: Path, extends: Node, problems: Problems, chain: tuple[Path, ...]) -> Node:
    """Return the file that `path` extends."""
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
    return _read_file(base, problems, chain)


def read_text(path: Path, problems: Problems) -> str:
    """Return the text of a file.

    Raises:
        Unreadable: there is no such file, or it is not text; the problem is noted.
    """
    fix = "give the path of a readable YAML file"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        reason, example = "there is no such file", "search_spaces/code.yaml"
        fix = f"{missing_file_fix(path)}give the path of a search space, such as {example}"
    except UnicodeDecodeError as error:
        reason, fix = f"not UTF-8 at byte {error.start}", "save the file as UTF-8 text"
    except OSError as error:
        reason = error.strerror or "cannot be read"
    problems.add(Mark(str(path)), "", None, reason, fix)
    raise Unreadable


def missing_file_fix(path: Path) -> str:
    """Return the question whether a file of a similar name is meant; empty if there is none."""
    directories = (path.parent, Path("search_spaces"))
    files = [file for each in directories if each.is_dir() for file in each.glob("*.yaml")]
    files = [file for file in files if is_file(file)]  # no link that leads nowhere
    by_stem = {file.stem: str(file) for file in reversed(files)}
    suggestion = did_you_mean(path.stem, by_stem)
    for stem, file in by_stem.items():
        suggestion = suggestion.replace(repr(stem), file)
    return suggestion


def parse(text: str, source: str, problems: Problems, first_line: int = 1) -> Node:
    """Return YAML 1.2 text as nodes; `first_line` is 0 for a source without lines.

    Raises:
        Unreadable: it is not YAML, or means more than any sweep does; the problem is noted.
    """
    yaml: Any = YAML(typ="rt", pure=True)  # the only parser that keeps the line of every key
    yaml.composer.warn_double_anchors = False  # YAML 1.2 allows them
    key, line = "", 0
    try:
        data = yaml.load(text)
    except MarkedYAMLError as error:
        what, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        mark = mark or getattr(error, "context_mark", None)
        line = int(mark.line) + 1 if mark else 0
        reason = f"not YAML: {what or getattr(error, 'context', None) or 'cannot be parsed'}"
        fix = "look for a missing colon, bracket or quote here or just above"
        if isinstance(error, DuplicateKeyError):
            key = str(what).partition('"')[2].partition('"')[0]
            reason, fix = "the key is given twice", "keep one of the two"
        elif "\t" in "".join(text.splitlines()[line - 1 : line]):
            reason, fix = "not YAML: a tab, which cannot indent", "indent with spaces"
    except YAMLError as error:
        reason = "not YAML: " + " ".join(str(error).split())
        fix = "remove characters that are not text"
    except (TypeError, ValueError, RecursionError) as error:
        # The parser lets these through: a mapping as a key, a date without such a day, a thousand
        # brackets. It does not say where.
        reason = f"not a sweep: {str(error) or type(error).__name__}"
        fix = "keep to words, numbers, lists and mappings"
    else:
        mark = Mark(source, first_line)
        return NodeBuilder(mark, problems).build(data, mark)
    problems.add(Mark(source, line), key, None, reason, fix)
    raise Unreadable


def _read_override(override: str, problems: Problems) -> Node | None:
    """Return `training.steps=100` as a document of its own."""
    mark = Mark(f"--set {without_password(override)}")
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")) or key.count(".") > DEEPEST:
        fix = "write --set KEY=VALUE, such as --set training.steps=100"
        problems.add(mark, "", None, "not of the form KEY=VALUE", fix)
        return None
    if key == EXTENDS:
        fix = "write extends: in the file, or give the other file"
        problems.add(mark, EXTENDS, None, "works in files alone", fix)
        return None
    nested = Problems(mark)
    try:
        value = parse(text, mark.source, nested, first_line=0)
    except Unreadable:
        reason, fix = nested.found[0][1].reason, "quote the value for the shell and for YAML"
        problems.add(mark, key, text, reason, fix)
        return None
    first, node = nest(key, value)
    return Node(mark, entries={first: node})
