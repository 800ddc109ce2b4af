"""A YAML file as plain values that remember their lines, and the problems found in it.

A mapping is a dict and a list a tuple, whose `marks` say where each entry stands. Files that
`extends:` names and `--set` are laid over each other; a value keeps the mark of its own file.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from gdpo_tune.core.errors import SpecError, SpecProblem
from gdpo_tune.core.files import expand_path, find_path_problem, is_directory, is_file, path_exists
from gdpo_tune.core.object_store import SPEC, is_url
from gdpo_tune.core.redaction import HIDDEN, redact_text, redact_values
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.core.text import format_flow, show

KeyPath = tuple[str | int, ...]

EXTENDS = "extends"
MOST_VALUES = 100_000
"""Most values of one file, aliases written out: a few lines can expand to billions."""
DEEPEST = 50
"""Most levels of nesting; the functions that read documents are recursive."""
KINDS = ("range", "log", "choices", "value")
"""Notations of a domain."""
DOMAIN_KEYS = (*KINDS, "step", "when")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters except tabs and line breaks, and halves of surrogate pairs."""
MAX_CHARACTERS = 300
"""Most characters of a value in a message; a long list hides what is wrong with it."""
ABSENT: Any = object()
PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
RESERVED = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that some parser of YAML reads as another value."""
PROJECT = "project"
"""Last key of the file that a sweep keeps: the directory in which the sweep's command ran."""
MAYBE_PATH_KEYS = ("policy", "data.source", "data.validation.source", "data.test.source")
"""Keys whose value may be a path, and may be a name."""
_PARTS = re.compile(r"(?s)(sqlite(?:\+\w+)?:///|)(.*?)((?<=\.py):\w+|)")
"""Beginning of an address, a path, and the class of a task."""


class Place(NamedTuple):
    """File and line of a value, or the command-line option that has it."""

    source: str
    """A file as the user names it, or a command-line option as typed."""
    line: int = 0
    """From 1; 0 where the source has no lines."""
    text: str = ""
    """The value as it is written, of a scalar in a mapping: 1.10 is the number 1.1."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class YamlMap(dict[str, Any]):
    """A mapping of a file; `marks` has the place of each key."""

    def __init__(self, entries: Mapping[str, Any] = {}, marks: Mapping[str, Place] = {}) -> None:
        super().__init__(entries)
        self.marks = dict(marks)

    def put(self, key: str, value: Any, mark: Place) -> None:
        """Set an entry and its place."""
        self[key], self.marks[key] = value, mark


class YamlList(tuple[Any, ...]):
    """A list of a file; `marks` has the place of each element."""

    marks: Sequence[Place]

    def __new__(cls, values: Iterable[Any], marks: Sequence[Place]) -> YamlList:
        """Create a tuple of `values`, each with its mark."""
        result = super().__new__(cls, values)
        result.marks = marks
        return result


def get_map(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping below a key; an empty one if there is none."""
    value = parent.get(key)
    return value if isinstance(value, Mapping) else {}


def walk(value: Any, mark: Place, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Place, Any]]:
    """Yield a value and every value in it, each with its path and place."""
    yield path, mark, value
    if isinstance(value, YamlMap):
        for key, child in value.items():
            yield from walk(child, value.marks[key], (*path, key))
    elif isinstance(value, YamlList):
        for index, child in enumerate(value):
            yield from walk(child, value.marks[index], (*path, index))


def locate(root: Any, mark: Place, path: KeyPath) -> tuple[Place, Any]:
    """Return the value at `path`, a part of which may have dots, and its place.

    Where there is none, it is `ABSENT`, with the closest place above it.
    """
    part: Any
    for key in path:
        for part in key.split(".") if isinstance(key, str) else [key]:
            is_inside = isinstance(root, YamlMap) and part in root
            is_inside |= isinstance(root, YamlList) and part in range(len(root))
            if not is_inside:
                return mark, ABSENT
            root, mark = root[part], root.marks[part]
    return mark, root


def nest(key: str, value: Any, mark: Place) -> YamlMap:
    """Return `a.b: x` as `{a: {b: x}}`."""
    for part in reversed(key.split(".") if all(key.split(".")) else [key]):
        value = YamlMap({part: value}, {part: mark})
    return value


def add_entries(base: YamlMap, more: YamlMap) -> str:
    """Add entries, where `a.b: 1` and `a.c: 2` both add to `a`; return a key with two values."""
    for key, value in more.items():
        if key not in base:
            base.put(key, value, more.marks[key])
        elif not (isinstance(base[key], YamlMap) and isinstance(value, YamlMap)):
            return key
        elif clash := add_entries(base[key], value):
            return f"{key}.{clash}"
    return ""


def merge(base: YamlMap, change: YamlMap, path: tuple[str, ...] = ()) -> YamlMap:
    """Return `change` laid over `base`: mappings merge, anything else is replaced.

    A domain of the space is replaced as a whole: `{log: [1, 2]}` over `{range: [0, 1]}` has no
    range. An empty mapping replaces too, and a key without a value removes the inherited one.
    """
    merged = YamlMap(base, base.marks)
    for key, value in change.items():
        old = merged.get(key)
        if value is None and key in merged:
            del merged[key]
        elif isinstance(old, YamlMap) and isinstance(value, YamlMap) and value:
            is_domain = bool(path) and path[0] == "space" and {*old, *value} & {*DOMAIN_KEYS}
            merged[key] = value if is_domain else merge(old, value, (*path, key))
            merged.marks[key] = (change if is_domain else base).marks[key]
        else:
            merged.put(key, value, change.marks[key])
    return merged


class ReportedError(Exception):
    """A file or a value that cannot be used; the reason is already among the problems."""


@dataclass
class Problems:
    """All problems of one document."""

    origin: Place
    """Place of a problem that has no line of its own."""
    root: YamlMap = field(default_factory=YamlMap)
    records: list[tuple[Place, SpecProblem]] = field(
        default_factory=list[tuple[Place, SpecProblem]]
    )
    empty: set[str] = field(default_factory=set[str])
    """Keys without a value: each is noted once, and problems that follow from it are not."""

    def add(self, mark: Place, key: str, value: object, reason: str, fix: str) -> ReportedError:
        """Note a problem, for the caller to raise or ignore; a `value` of None is not shown."""
        if key not in self.empty:
            name = key.rpartition(".")[2].partition("[")[0]
            shown = "" if value is None else show(redact_values(value, name))
            if len(shown) > MAX_CHARACTERS:
                shown = shown[: MAX_CHARACTERS - 3] + "..."
            self.records.append((mark, SpecProblem(str(mark), key, shown, reason, fix)))
        return ReportedError()

    def note(
        self, path: KeyPath | str, reason: str, fix: str, value: object = None
    ) -> ReportedError:
        """Note a problem with a key of the document; `value` is shown instead of its own."""
        path = (path,) if isinstance(path, str) else path
        mark, own = self.find(path)
        value = own if value is None and own is not ABSENT else value
        return self.add(mark, format_path(path), value, reason, fix)

    def refuse(
        self, path: KeyPath | str, reason: str, fix: str, *inputs: str, value: object = None
    ) -> None:
        """Note a problem, unless the key or one of the keys `inputs` has one already.

        A key with a problem has its default while the rest is checked, so what follows from its
        value cannot be judged.
        """
        key = path if isinstance(path, str) else format_path(path)
        if not any(map(self.has_problem, (key, *inputs))):
            self.note(path, reason, fix, value)

    def find(self, path: KeyPath) -> tuple[Place, Any]:
        """Return the value at a path with its place; see `locate`."""
        return locate(self.root, self.origin, path)

    def has_key(self, path: KeyPath | str) -> bool:
        """Return whether the document has a key."""
        return self.find((path,) if isinstance(path, str) else path)[1] is not ABSENT

    def has_problem(self, key: str) -> bool:
        """Return whether `key`, something in it or something around it has a problem."""
        keys = [problem.key for _, problem in self.records if problem.key]
        pairs = [(key, other) for other in keys] + [(other, key) for other in keys]
        return any(a == b or a.startswith((f"{b}.", f"{b}[")) for a, b in pairs)

    def refuse_unusable(self) -> None:
        """Note every key without a value, and every text with characters that cannot be printed."""
        for path, mark, value in walk(self.root, self.origin):
            key = format_path(path)
            if value is None:
                fix = "give it a value, or remove the key"
                fix = "write a blank after the colon" if ":" in str(path[-1]) else fix
                self.add(mark, key, None, "no value", fix)
                self.empty.add(key)
            elif isinstance(value, str) and UNPRINTABLE.search(value):
                shown = value.encode("unicode_escape").decode()
                reason = "has characters that cannot be printed"
                self.add(mark, key, shown, reason, "write it without them")

    def raise_if_any(self) -> None:
        """Raise `SpecError` with every problem, if there is any."""
        if self.records:
            raise SpecError(self.list_sorted())

    def list_sorted(self) -> tuple[SpecProblem, ...]:
        """Return every problem once, in the order of the lines."""
        sources = list(dict.fromkeys(mark.source for mark, _ in self.records))
        ranked = sorted(self.records, key=lambda p: (sources.index(p[0].source), p[0].line))
        return tuple(dict.fromkeys(problem for _, problem in ranked))


def format_path(path: KeyPath) -> str:
    """Return a key path as a person types it: `enqueue[0].group_size`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def read_document(
    path: Path, overrides: Sequence[str], name: str | None, problems: Problems
) -> YamlMap:
    """Return the file, merged onto the files that it extends, with the overrides on top.

    A malformed override is added to `problems`; the rest is still read.

    Raises:
        SpecError: a file is missing, unreadable, empty, not YAML, or extends itself.
    """
    try:
        document = _read_file(path, problems, ())
    except ReportedError:
        problems.raise_if_any()
        raise
    document = read_overrides(overrides, document, problems)
    if name is not None:
        document = merge(document, nest("name", name, Place(f"--name {name}")))
    return document


def read_overrides(
    overrides: Sequence[str], document: YamlMap | None = None, problems: Problems | None = None
) -> YamlMap:
    """Return overrides laid over a document, without malformed ones: `problems` notes those."""
    document, problems = document or YamlMap(), problems or Problems(Place("--set"))
    for override in overrides:
        with suppress(ReportedError):
            document = merge(document, _read_override(override, problems))
    return document


def _read_file(path: Path, problems: Problems, chain: tuple[Path, ...]) -> YamlMap:
    root = parse_yaml(read_text(path, problems), str(path), problems)
    if not isinstance(root, YamlMap):
        reason = "the file is empty" if root is None else "not a mapping of keys to values"
        fix = "start from search_spaces/code.yaml; a sweep needs task:, objectives: and space:"
        raise problems.add(Place(str(path), 1), "", None, reason, fix)
    if EXTENDS not in root:
        return root
    extends = root.pop(EXTENDS)

    def refuse(reason: str, fix: str) -> ReportedError:
        return problems.add(root.marks[EXTENDS], EXTENDS, extends, reason, fix)

    if not isinstance(extends, str) or not extends:
        fix = "write one file, relative to this one, such as extends: code.yaml"
        raise refuse("not the name of a file", fix)
    if unusable := find_path_problem(extends):
        raise refuse(unusable, "name another file")
    file = Path(os.path.normpath(path.parent / expand_path(extends)))
    chain = (*chain, path.resolve())
    if file.resolve() in chain:
        circle = " -> ".join(each.name for each in (*chain, file))
        raise refuse(f"a circle: {circle}", "remove one of these extends:")
    if not is_file(file):
        fix = suggest_file(file) + "the file is looked for relative to this one"
        raise refuse(f"there is no file {file}", fix)
    base = _read_file(file, problems, chain)
    # A name decides the directory of a sweep: two files never share it by inheritance.
    base.pop("name", None)
    if file.name == SPEC:
        resolve_paths(base, file)
    return merge(base, root)


def expand_address(uri: str) -> str:
    """Return the address of a SQLite file with `~` and variables expanded; any other as it is."""
    before, path, _ = _split(uri)
    return f"{before}{expand_path(path)}" if before else uri


def resolve_paths(root: YamlMap, file: Path) -> dict[str, str]:
    """Let the paths of a stored file hold from the current directory; remove its `project:`.

    A path is looked for in the project where it is now, then where it was, then from the current
    directory. The identity of a sweep counts paths as written.

    Returns:
        Absolute path -> text as written, of what has changed; the project stands for `.`. It is
        empty in the project's own directory.
    """
    was, here = Path(str(root.pop(PROJECT, ""))), Path.cwd()
    # Where the project is now, by the place of a sweep in it.
    sweeps, kept = file.absolute().parent.parent, str(root.get("storage", "/"))
    now = Path(os.path.normpath(sweeps / os.path.relpath(was, was / kept)))
    if os.path.normpath(now / kept) != str(sweeps) or not is_directory(now):
        now = was.absolute()
    changed = {} if now == here else {str(now): "."}

    def resolve(value: Any, mark: Place, path: KeyPath) -> Any:
        if isinstance(value, YamlMap):
            for key, child in value.items():
                value[key] = resolve(child, value.marks[key], (*path, key))
        if isinstance(value, YamlList):
            inner = zip(value, value.marks, strict=True)
            return YamlList(
                [resolve(*each, (*path, i)) for i, each in enumerate(inner)], value.marks
            )
        key, text = ".".join(part for part in path if isinstance(part, str)), str(value)
        if not value or text in POLICIES or mark.source != str(file):
            return value
        before, written, after = _split(text)
        is_certain = {
            "task": is_task_file(text),
            "storage": not is_url(text),
            "tracking.uri": bool(before),
            "search.warm_start": True,
            "start.demonstrations": text != "data",
        }.get(key, False)
        if not is_certain and key not in MAYBE_PATH_KEYS:
            return value
        place = expand_path(written)
        below = place.relative_to(was) if place.is_relative_to(was) else place
        places = [now / below, was / place, here / place]
        found = next(filter(path_exists, places), now / below if is_certain else here / place)
        if found == here / place:
            return value
        new = f"{before}{found}{after}"
        changed[new] = text
        return new

    resolve(root, Place(str(file)), ())
    return changed


def _split(text: str) -> tuple[str, str, str]:
    found = _PARTS.fullmatch(text)
    assert found is not None, "each part may be empty"
    return found[1], found[2], found[3]


def read_text(path: Path, problems: Problems) -> str:
    """Return the text of a file, or note the problem and raise `ReportedError`."""
    fix = "give the path of a readable YAML file"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        from gdpo_tune.spec.starter import list_spaces

        reason, guess = "there is no such file", suggest_file(path)
        fix = f"{guess}give the path of a search space, or write one with gdpo-tune init"
        if (shipped := list_spaces().get(path.stem)) and not guess:
            fix = f"copy the one that ships: {shlex.join(['cp', str(shipped), path.name])}; {fix}"
    except UnicodeDecodeError as error:
        reason, fix = f"not UTF-8 at byte {error.start}", "save the file as UTF-8 text"
    except OSError as error:
        reason = error.strerror or "cannot be read"
    raise problems.add(Place(str(path)), "", None, reason, fix)


def suggest_file(path: Path) -> str:
    """Return `did you mean code.yaml? ` for a file of a similar name, else an empty text."""
    directories = (path.parent, Path("search_spaces"))
    files = [file for each in directories if is_directory(each) for file in each.glob("*.yaml")]
    by_stem = {file.stem: str(file) for file in reversed(files) if is_file(file)}
    close = difflib.get_close_matches(path.stem.lower(), by_stem, n=2)
    return f"did you mean {' or '.join(by_stem[stem] for stem in close)}? " if close else ""


def parse_yaml(text: str, source: str, problems: Problems) -> Any:
    """Return the value of YAML 1.2 text, or note the problem and raise `ReportedError`."""
    return _parse(text, Place(source, 1), problems)[0]


@lru_cache(maxsize=64)
def _read_yaml(text: str) -> tuple[Any, dict[tuple[int, int], str]]:
    """Return what ruamel reads, and each scalar by its line and column, neither to be changed.

    It takes a second for 100 kB, and a command reads the files of a sweep several times.
    """
    yaml: Any = YAML(typ="rt", pure=True)  # the only parser that keeps the line of every key
    yaml.composer.warn_double_anchors = False  # YAML 1.2 allows them
    texts: dict[tuple[int, int], str] = {}
    compose = yaml.composer.compose_scalar_node

    def compose_and_keep_text(anchor: object) -> Any:
        node = compose(anchor)
        texts[node.start_mark.line, node.start_mark.column] = node.value
        return node

    yaml.composer.compose_scalar_node = compose_and_keep_text
    return yaml.load(text), texts


def _parse(text: str, origin: Place, problems: Problems) -> tuple[Any, Place]:
    key, line = "", 0
    try:
        data, texts = _read_yaml(text)
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
        only = next(iter(texts.values()), "")  # of a document that is a scalar
        return _convert(data, origin, problems, texts), origin._replace(text=only)
    raise problems.add(Place(origin.source, line), key, None, reason, fix)


def _convert(
    data: Any, origin: Place, problems: Problems, texts: Mapping[tuple[int, int], str]
) -> Any:
    """Return what ruamel read as plain values with marks; a dotted key becomes nested mappings."""
    count, entry = 0, origin

    def convert(data: Any, mark: Place, above: tuple[int, ...]) -> Any:
        nonlocal count, entry  # `above`: identities of the collections around the value
        entry = mark if len(above) <= 1 else entry
        count += 1
        if id(data) in above:
            reason, fix = "an alias that contains itself", "write the value out"
            raise problems.add(mark, "", None, reason, fix)
        if len(above) > DEEPEST:
            fix = "write it flat: no section of a sweep has more than four"
            raise problems.add(mark, "", None, f"more than {DEEPEST} levels deep", fix)
        if count > MOST_VALUES:
            reason = f"more than {MOST_VALUES:,} values up to here, with every alias written out"
            raise problems.add(entry, "", None, reason, "write fewer values, or fewer aliases")
        if data is None or isinstance(data, bool):
            return data
        if not isinstance(data, CommentedMap | CommentedSeq):
            # ruamel's types remember notations; `true` with an anchor is a ScalarBoolean, an int
            kinds = {ScalarBoolean: bool, int: int, float: float}
            return next((own for kind, own in kinds.items() if isinstance(data, kind)), str)(data)
        inside, lines = (*above, id(data)), data.lc.data or {}

        def find_mark(key: Any) -> Place:  # merged-in entries (`<<`) have no line of their own
            known = origin.line and key in lines
            return Place(origin.source, int(lines[key][0]) + 1) if known else mark

        if isinstance(data, CommentedSeq):
            marks = [find_mark(index) for index in range(len(data))]
            pairs = zip(data, marks, strict=True)
            return YamlList([convert(value, own, inside) for value, own in pairs], marks)
        result = YamlMap()
        for name, value in data.items():
            key, own = str(name), find_mark(name)
            if UNPRINTABLE.search(key):
                shown = key.encode("unicode_escape").decode()
                reason, fix = "a key has characters that cannot be printed", "write it without them"
                raise problems.add(own, shown, None, reason, fix)
            child = convert(value, own, inside + (0,) * key.count("."))  # every dot is a level
            own = own._replace(text=texts.get(tuple(lines.get(name, ())[2:]), ""))
            if clash := add_entries(result, nest(key, child, own)):
                fix = "keep one of the two (a dotted key is the same as nested mappings)"
                problems.add(own, clash, None, "the key is given twice", fix)
        return result

    return convert(data, origin, ())


def read_scalar(text: str) -> object:
    """Return the value that a word of the command line is in YAML; itself if it is no scalar."""
    try:
        value, _ = _parse(text, Place(text), Problems(Place(text)))
    except ReportedError:
        return text
    return text if value is None or isinstance(value, YamlMap | YamlList) else value


def _read_override(override: str, problems: Problems) -> YamlMap:
    mark = Place(f"--set {_hide_override(override)}")
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
        return nest(key, *_parse(text, mark, nested))
    except ReportedError:
        reason, fix = nested.records[0][1].reason, "quote the value for the shell and for YAML"
        shown = None if mark.source.endswith(HIDDEN) else text
        raise problems.add(mark, key, shown, reason, fix) from None


def _hide_override(override: str) -> str:
    """Return an override as a message may repeat it.

    Of one with variables of the environment only the key stays: its text may be no YAML, so that
    names and values in it cannot be told apart.
    """
    if override.lstrip().startswith("resource") and "env" in override:
        return re.split(r"[\s=:]", override.lstrip(), maxsplit=1)[0] + f"={HIDDEN}"
    return redact_text(override)


def dump_yaml(entries: Mapping[str, Any]) -> str:
    """Return a document that any parser reads alike: an entry a line, values in flow style.

    Of a section, entries `a.b` and `a.c` that follow each other are written below `a:`.
    """
    lines: list[str] = []
    for key, value in entries.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{key}:")
            group = ""
            for name, child in value.items():
                prefix, _, leaf = name.rpartition(".")
                lines += [f"  {prefix}:"] if prefix and prefix != group else []
                group = prefix
                lines.append(f"  {'  ' if prefix else ''}{leaf}: {dump_flow(child)}")
        elif isinstance(value, tuple) and value:
            lines += [f"{key}:", *(f"  - {dump_flow(child)}" for child in value)]
        else:
            lines.append(f"{key}: {dump_flow(value)}")
    return "\n".join(lines) + "\n"


def dump_flow(value: object) -> str:
    """Return a value on one line of YAML 1.1 or 1.2."""
    return format_flow(value, _dump_scalar)


def _dump_scalar(value: object) -> str:
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in RESERVED
        return value if plain else json.dumps(value, ensure_ascii=False)
    text = json.dumps(value)
    # Parsers of YAML 1.1 take 3e-05 for a word.
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text
