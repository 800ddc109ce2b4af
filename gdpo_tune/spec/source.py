"""YAML with the line of every value, and with `extends:` and `--set` resolved."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from gdpo_tune.core.files import expand_path, find_path_problem, is_directory, is_file
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.redaction import HIDDEN
from gdpo_tune.spec.paths import resolve_paths
from gdpo_tune.spec.problems import (
    UNPRINTABLE,
    Problems,
    SourceMark,
    UnreadableNodeError,
    YamlNode,
    hide_in_text,
)
from gdpo_tune.spec.yaml_nodes import DEEPEST, NodeBuilder, merge, nest

EXTENDS = "extends"


def read_yaml(
    path: Path, overrides: Sequence[str], name: str | None, problems: Problems
) -> YamlNode:
    """Return the file, merged onto the files that it extends, with the overrides on top.

    A malformed override is added to `problems`; the rest is still read.

    Raises:
        SpecError: a file is missing, unreadable, empty, not YAML, or extends itself.
    """
    try:
        node = _read_file(path, problems, ())
    except UnreadableNodeError:
        problems.raise_if_any()
        raise
    node = _merge_overrides(node, overrides, problems)
    if name is not None:
        mark = SourceMark(f"--name {name}")
        node = merge(node, YamlNode(mark, entries={"name": YamlNode(mark, name)}))
    return node


def read_overrides(overrides: Sequence[str]) -> YamlNode:
    """Return the overrides as one document, without those that `load_spec` refuses as malformed."""
    mark = SourceMark("--set")
    return _merge_overrides(YamlNode(mark, entries={}), overrides, Problems(mark))


def _merge_overrides(node: YamlNode, overrides: Sequence[str], problems: Problems) -> YamlNode:
    for override in overrides:
        with suppress(UnreadableNodeError):
            node = merge(node, _read_override(override, problems))
    return node


def _read_file(path: Path, problems: Problems, chain: tuple[Path, ...]) -> YamlNode:
    root = parse_yaml(read_text(path, problems), str(path), problems)
    if root.entries is None:
        reason = "the file is empty" if root.is_empty() else "not a mapping of keys to values"
        fix = "start from search_spaces/code.yaml; a sweep needs task:, objectives: and space:"
        raise problems.add(SourceMark(str(path), 1), "", None, reason, fix)
    own = dict(root.entries)
    extends = own.pop(EXTENDS, None)
    if extends is None:
        return root
    if not isinstance(extends.value, str) or not extends.value:
        fix = "write one file, relative to this one, such as extends: code.yaml"
        raise problems.add_value(extends, (EXTENDS,), "not the name of a file", fix)
    unusable = find_path_problem(extends.value)
    if unusable:
        raise problems.add_value(extends, (EXTENDS,), unusable, "name another file")
    file = Path(os.path.normpath(path.parent / expand_path(extends.value)))
    chain = (*chain, path.resolve())
    if file.resolve() in chain:
        reason = f"a circle: {' -> '.join(each.name for each in (*chain, file))}"
        raise problems.add_value(extends, (EXTENDS,), reason, "remove one of these extends:")
    if not is_file(file):
        fix = suggest_file(file) + "the file is looked for relative to this one"
        raise problems.add_value(extends, (EXTENDS,), f"there is no file {file}", fix)
    base = _read_file(file, problems, chain)
    if file.name == SPEC:
        resolve_paths(base, file)
    # A name decides the directory of a sweep: two files never share it by inheritance.
    inherited = {key: node for key, node in (base.entries or {}).items() if key != "name"}
    return merge(YamlNode(root.mark, entries=inherited), YamlNode(root.mark, entries=own))


def read_text(path: Path, problems: Problems) -> str:
    """Return the text of a file, or note the problem and raise `UnreadableNodeError`."""
    fix = "give the path of a readable YAML file"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        reason, example = "there is no such file", "search_spaces/code.yaml"
        fix = f"{suggest_file(path)}give the path of a search space, such as {example}"
    except UnicodeDecodeError as error:
        reason, fix = f"not UTF-8 at byte {error.start}", "save the file as UTF-8 text"
    except OSError as error:
        reason = error.strerror or "cannot be read"
    raise problems.add(SourceMark(str(path)), "", None, reason, fix)


def suggest_file(path: Path) -> str:
    """Return `did you mean code.yaml? ` for a file of a similar name, else an empty text."""
    directories = (path.parent, Path("search_spaces"))
    files = [file for each in directories if is_directory(each) for file in each.glob("*.yaml")]
    files = [file for file in files if is_file(file)]  # no broken links
    by_stem = {file.stem: str(file) for file in reversed(files)}
    close = difflib.get_close_matches(path.stem.lower(), by_stem, n=2)
    return f"did you mean {' or '.join(by_stem[stem] for stem in close)}? " if close else ""


def parse_yaml(text: str, source: str, problems: Problems, first_line: int = 1) -> YamlNode:
    """Return YAML 1.2 text as nodes; `first_line` is 0 for a source without lines.

    Raises:
        UnreadableNodeError: it is not YAML, or holds too many values; the problem is noted.
    """
    yaml: Any = YAML(typ="rt", pure=True)  # the only parser that keeps the line of every key
    yaml.composer.warn_double_anchors = False  # YAML 1.2 allows them
    texts: dict[tuple[int, int], str] = {}
    compose = yaml.composer.compose_scalar_node

    def keep_text(anchor: object) -> Any:
        node = compose(anchor)
        texts[node.start_mark.line, node.start_mark.column] = node.value
        return node

    yaml.composer.compose_scalar_node = keep_text
    key, line = "", 0
    try:
        data = yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = int(mark.line) + 1 if mark else 0
        reason = f"not YAML: {error.problem or error.context or 'cannot be parsed'}"
        fix = "look for a missing colon, bracket or quote here or just above"
        if isinstance(error, DuplicateKeyError):
            key = str(error.problem).split('"')[1]
            reason, fix = "the key is given twice", "keep one of the two"
        elif "\t" in "".join(text.splitlines()[line - 1 : line]):
            reason, fix = "not YAML: a tab, which cannot indent", "indent with spaces"
    except YAMLError as error:
        reason = "not YAML: " + " ".join(str(error).split())
        fix = "remove characters that are not text"
    except (TypeError, ValueError, RecursionError) as error:
        # A mapping as a key, a date without such a day, deep brackets: the line is unknown.
        reason = f"not a sweep: {str(error) or type(error).__name__}"
        fix = "keep to words, numbers, lists and mappings"
    else:
        mark = SourceMark(source, first_line)
        only = next(iter(texts.values()), None)  # of a document that is a scalar
        return replace(NodeBuilder(mark, problems, texts).build(data, mark), text=only)
    raise problems.add(SourceMark(source, line), key, None, reason, fix)


def read_scalar(text: str) -> object:
    """Return the value that a word of the command line is in YAML; itself if it is no scalar."""
    try:
        node = parse_yaml(text, text, Problems(SourceMark(text)), first_line=0)
    except UnreadableNodeError:
        return text
    return text if node.value is None else node.value


def _read_override(override: str, problems: Problems) -> YamlNode:
    mark = SourceMark(f"--set {_hide_override(override)}")
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")) or key.count(".") > DEEPEST or UNPRINTABLE.search(key):
        fix = "write --set KEY=VALUE, such as --set training.steps=100"
        raise problems.add(mark, "", None, "not of the form KEY=VALUE", fix)
    if key == EXTENDS:
        fix = "write extends: in the file, or give the other file"
        raise problems.add(mark, EXTENDS, None, "works only in files", fix)
    nested = Problems(mark)
    try:
        value = parse_yaml(text, mark.source, nested, first_line=0)
    except UnreadableNodeError:
        reason, fix = nested.records[0][1].reason, "quote the value for the shell and for YAML"
        shown = None if mark.source.endswith(HIDDEN) else text
        raise problems.add(mark, key, shown, reason, fix) from None
    first, node = nest(key, value)
    return YamlNode(mark, entries={first: node})


def _hide_override(override: str) -> str:
    """Return an override as a message may repeat it.

    Of one with variables of the environment only the key stays: its text may be no YAML, so that
    names and values in it cannot be told apart.
    """
    if override.lstrip().startswith("resource") and "env" in override:
        return re.split(r"[\s=:]", override.lstrip(), maxsplit=1)[0] + f"={HIDDEN}"
    return hide_in_text(override)
