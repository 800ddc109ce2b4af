"""Content that decides results: files and versions as digests, which a later start compares.

A fact has a name of two words, its kind and what it is about:

    task mine.py               the task's file, or a module that it imports
    file rows.jsonl            a file that the code of the task names, such as its rows
    data train.jsonl           a file of `data.source`
    start rows.jsonl           demonstrations, or a file of the policy that was trained on them
    policy model.safetensors   a file of a local policy: weights, tokenizer, template, settings
    hub org/name               commit of a policy or data set in the local cache of the Hub
    version torch              version of a package that changes numbers, or that the task imports

Modules are found by reading `import` statements, those inside of functions too. What code computes,
such as the name of a module or of a file that no text in it states, cannot be found.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import IdentityError
from gdpo_tune.core.files import (
    DATA_FILES,
    HUB_ID,
    expand_path,
    is_local_source,
    list_data_files,
    write_atomically,
)
from gdpo_tune.core.object_store import find_cache_directory
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.task_files import is_task_file, split_task_file
from gdpo_tune.core.text import join_first
from gdpo_tune.core.trial_files import MARKER, TRAINER_STATE_FILE

PACKAGE = __name__.partition(".")[0]
PACKAGES = ("torch", "transformers", "trl", "tokenizers")
"""Packages whose feature releases may change numbers; a patch release is no difference."""
RECORDED = ("gdpo-tune", "torch", "transformers", "trl", "vllm", "ray", "optuna", "numpy")
"""Packages whose versions a session of a sweep records, and which may be published."""
CACHED_FROM = 8 * 2**20
"""Bytes from which on the digest of a file is kept in the cache; a smaller one is read again."""
_RACY_SECONDS = 2.0
"""A file that was written so lately may change again within one tick of its file system's clock."""
_POLICY_FILES = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_LEFT_BY_TRAINING = (
    MARKER,
    TRAINER_STATE_FILE,
    "training_args.bin",
    "initial_policy.json",
    "measured.json",
)
"""Files in a policy's directory that no training from it reads."""
_NAMED_FILES = (*DATA_FILES, ".tsv", ".txt")
"""Files of a directory that the code of a task names, unless it holds a model."""
_WRITERS = ("write_text", "write_bytes", "touch", "mkdir", "FileHandler", "to_csv", "to_json")
_WRITE_MODE = re.compile(r"[rbt]*[wax+][rbt+]*")


@dataclass(frozen=True)
class Fact:
    """Digest of a file, a commit or a version."""

    digest: str
    file: Path | None = None


def measure_content(settings: Any, start: str = "") -> dict[str, Fact]:
    """Return name -> fact for all that can be known here.

    `settings` has task, policy, model, data and rollout, as a sweep file or a trial does. `start`
    is a file of demonstrations, or the directory of the policy after its supervised start.
    A policy or data set on the Hub has a fact only if the local cache knows its commit. A file that
    cannot be read raises its `OSError`.
    """
    task, policy, data = settings.task, settings.policy, settings.data
    facts = {"version python": Fact(".".join(platform.python_version_tuple()[:2]))}
    files: list[tuple[str, Path]] = []
    packages: set[str] = set()
    if is_task_file(task):
        source = Path(split_task_file(task)[0])
        modules, packages = find_modules(source)
        texts, named = _find_named_files(modules)
        files += [(f"task {os.path.relpath(file, source.parent)}", file) for file in modules]
        files += [(f"file {os.path.relpath(file, source.parent)}", file) for file in named]
        for text in texts:
            _add_hub_commit(facts, text, "main")
    engine, judge = settings.rollout.engine == "vllm", task == "math"
    by_feature = (*PACKAGES, *["vllm"] * engine, *["math-verify"] * judge)
    for name in dict.fromkeys((*by_feature, PACKAGE, *sorted(packages))):
        with suppress(PackageNotFoundError):  # a checkout, or a module of another name
            exact = version(name)
            feature = ".".join(exact.split(".")[:2])
            facts[f"version {name}"] = Fact(feature if name in by_feature else exact)
    sources = {"": data.source, "validation ": data.validation.source, "test ": data.test.source}
    for part, source in sources.items():
        place = expand_path(source)
        if source and is_local_source(source):
            for file in list_data_files(place):
                name = file.name if file == place else file.relative_to(place)
                files.append((f"data {part}{name}", file))
        elif source:
            _add_hub_commit(facts, source, "main")
    if start:
        place = expand_path(start)
        below = list_policy_files(place) if place.is_dir() else [place]
        files += [(f"start {file.name}", file) for file in below if file.exists()]
    directory = POLICIES.get(policy) or expand_path(policy)
    if directory.is_dir():
        below = ((file.relative_to(directory), file) for file in list_policy_files(directory))
        files += [(f"policy {name}", file) for name, file in below]
    else:
        _add_hub_commit(facts, policy, settings.model.revision or "main")
    digests = hash_files(file for _, file in files)
    return facts | {name: Fact(digests[file], file) for name, file in files}


def list_changes(
    recorded: Mapping[str, str], current: Mapping[str, Fact], without: Collection[str] = ()
) -> dict[str, str]:
    """Return name -> difference for a person; `recorded`: name -> digest of an earlier start.

    Facts of the kinds in `without` are left out. A commit or version that is known on one side
    alone is no difference, nor is a file that appeared under a name in the task's code: the task
    may have written it.
    """
    changes: dict[str, str] = {}
    for name in sorted({*recorded, *current}):
        kind, _, what = name.partition(" ")
        before, fact = recorded.get(name), current.get(name)
        if kind in without or before == (fact and fact.digest):
            continue
        if fact is None or before is None:
            is_known = kind in ("task", "data", "start", "policy") or (
                kind == "file" and fact is None
            )
            is_known &= any(each.startswith(f"{kind} ") for each in recorded)
            if is_known:
                changes[name] = f"{kind} {what} is {'new' if fact else 'gone'}"
            continue
        changes[name] = f"{kind} {what}: {before[:12]}, now {fact.digest[:12]}"
        if fact.file is not None:
            changes[name] += f" (written {format_time(fact.file.stat().st_mtime)})"
    return changes


def compare_starts(
    starts: Sequence[Mapping[str, Any]],
    current: Mapping[str, Fact],
    place: object,
    ways: str,
    *,
    accept: bool,
) -> list[Mapping[str, Any]]:
    """Return the record of the content at each start that changed it, with that of now.

    An entry has its `time` in Unix seconds, `digests`, and the names of `changes`. What becomes
    known later, such as a commit on the Hub, is compared from then on. `place` has the record;
    `ways` says how to go on.

    Raises:
        IdentityError: something has changed, and `accept` is false.
    """
    digests = {name: fact.digest for name, fact in current.items()}
    changes = list_changes(starts[-1]["digests"], current) if starts else {}
    if changes and not accept:
        described = describe_changes(changes, place, starts[-1]["time"])
        raise IdentityError(f"{described}\n    fix: restore it, {ways}")
    if starts and not changes:
        return [*starts[:-1], {**starts[-1], "digests": starts[-1]["digests"] | digests}]
    return [*starts, {"time": time.time(), "digests": digests, "changes": [*changes]}]


def describe_changes(changes: Mapping[str, str], place: object, recorded: float) -> str:
    """Return what changed in one line; `recorded`: when `place` was written, in Unix seconds."""
    when = f"in {place} on {format_time(recorded)}"
    return f"what decides results is not what it was {when}: {join_first([*changes.values()])}"


def format_time(seconds: float) -> str:
    """Return Unix seconds as a local time for a person."""
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"


def hash_files(files: Iterable[Path]) -> dict[Path, str]:
    """Return file -> digest of its content, the first 128 bits of its BLAKE2b.

    Digests of large files are kept in the user's cache, by path, size, inode and times of change.
    """
    known: dict[str, list[int | str]] = read_cache("digests.json")
    digests: dict[Path, str] = {}
    is_new = False
    for file in files:
        stat, path = file.stat(), str(file.resolve())
        # `touch -r` and `cp -p` set the time of writing, but never that of change.
        key = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
        if stat.st_size >= CACHED_FROM and known.get(path, [])[:-1] == key:
            digests[file] = str(known[path][-1])
            continue
        with file.open("rb") as stream:
            digests[file] = hashlib.file_digest(stream, "blake2b").hexdigest()[:32]
        if stat.st_size >= CACHED_FROM and time.time() - stat.st_ctime > _RACY_SECONDS:
            known[path], is_new = [*key, digests[file]], True
    if is_new:
        write_cache("digests.json", {k: v for k, v in known.items() if Path(k).exists()})
    return digests


def read_cache(name: str) -> dict[str, Any]:
    """Return a mapping that an earlier command left in the user's cache; empty without one."""
    with suppress(OSError, ValueError):  # there is none yet, or a full disk has cut it
        return json.loads((find_cache_directory() / name).read_text(encoding="utf-8"))
    return {}


def write_cache(name: str, content: Mapping[str, Any]) -> None:
    """Leave a mapping in the user's cache, if that can be written."""
    file = find_cache_directory() / name
    with suppress(OSError):  # a home that cannot be written costs time, not correctness
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content))


def _add_hub_commit(facts: dict[str, Fact], name: str, revision: str) -> None:
    if not HUB_ID.fullmatch(name):
        return
    from huggingface_hub.constants import HF_HUB_CACHE

    for kind in ("models", "datasets"):
        reference = Path(HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}", "refs", revision)
        with suppress(OSError):  # nothing of it was downloaded yet
            facts[f"hub {name}"] = Fact(reference.read_text(encoding="utf-8").strip())


def list_policy_files(directory: Path) -> list[Path]:
    """Return the files of a policy's directory that a training from it reads, sorted."""
    return sorted(
        file
        for pattern in ("*", "additional_chat_templates/*")
        for file in directory.glob(pattern)
        if file.suffix in _POLICY_FILES
        and file.is_file()
        and file.name not in _LEFT_BY_TRAINING
        and not file.name.startswith(("README", "LICENSE", "optimizer", "scheduler"))
    )


def find_modules(source: Path) -> tuple[dict[Path, ast.Module], set[str]]:
    """Return a task's file and the modules that it imports, parsed; and packages, by name.

    Modules are those beside the file, in the current directory or on Python's path; installed ones
    are packages, which have a version.
    """
    importlib.invalidate_caches()
    places = [str(source.parent), str(Path.cwd()), *sys.path]
    modules: dict[Path, ast.Module] = {}
    packages: set[str] = set()
    waiting = [source]
    while waiting:
        file = waiting.pop()
        if file in modules:
            continue
        modules[file] = tree = ast.Module([], [])
        with suppress(SyntaxError, ValueError):  # a compiled module has no imports to read
            if file.suffix == ".py":
                modules[file] = tree = ast.parse(file.read_bytes())
        for name, level in _list_imports(tree):
            parts = name.split(".")
            if not level and (parts[0] in sys.stdlib_module_names or parts[0] == PACKAGE):
                continue
            within: Iterable[str] | None = [str(file.parents[level - 1])] if level else places
            for part in parts:
                spec = PathFinder.find_spec(part, list(within or ()))
                if spec is None:
                    break
                locations = list(spec.submodule_search_locations or ())
                origin = Path(spec.origin or next(iter(locations), ""))
                if {"site-packages", "dist-packages"}.intersection(origin.parts):
                    packages.add(parts[0])
                    break
                if origin.is_file():
                    waiting.append(origin)
                within = locations
    return modules, packages


def _list_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield dotted names, and their levels in relative imports; some name no module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((alias.name, 0) for alias in node.names)
            case ast.ImportFrom():
                base = f"{node.module}." if node.module else ""
                yield from ((base + alias.name, node.level) for alias in node.names)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                if _get_name(node.func) in ("import_module", "__import__"):
                    yield name.lstrip("."), len(name) - len(name.lstrip("."))
            case _:
                pass


def _find_named_files(modules: Mapping[Path, ast.Module]) -> tuple[set[str], list[Path]]:
    """Return the texts in the code, and the files that they name; those it writes are left out.

    A path may be in parts, as in `Path("data") / "rows.jsonl"`, and is beside the module, above it
    or in the current directory. A text that names a directory stands for the data or model in it.
    """
    texts: set[str] = set()
    for tree in modules.values():
        written: set[int] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            words = [str(each.value) for each in given if isinstance(each, ast.Constant)]
            name = _get_name(node.func)
            is_open = name == "open" and any(_WRITE_MODE.fullmatch(word) for word in words)
            if name in _WRITERS or is_open:
                written |= {id(below) for below in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = os.path.expanduser(node.value)
                if id(node) not in written and text.strip("./") and text.isprintable():
                    texts |= {text, text.lstrip("/")}  # an f-string may begin before its slash
    roots = {Path.cwd(), *(above for file in modules for above in file.resolve().parents[:2])}
    files: set[Path] = set()
    places, waiting = set(roots), list(roots)
    while waiting:
        place = waiting.pop()
        for path in (place / text for text in texts):
            if os.path.isfile(path) and os.access(path, os.R_OK):
                files.add(path.resolve())
            elif os.path.isdir(path) and os.access(path, os.R_OK | os.X_OK):
                inner = path.resolve()
                waiting += [inner] * (inner not in places)
                places.add(inner)
    for place in places - roots - {file.parent for file in files}:
        if (place / "config.json").exists():
            files.update(list_policy_files(place))
        elif not roots.isdisjoint(place.parents):  # not the like of /tmp
            files.update(file for file in place.iterdir() if file.suffix in _NAMED_FILES)
    return texts, sorted(files - {file.resolve() for file in modules})


def _get_name(function: ast.expr) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")
