"""Sweeps that `publish` has put on the Hub, read as any other sweep from a copy on this machine.

A record from the Hub is another person's file. So no key of it may name a database, a server, a
webhook or a file of this machine, or let code of a policy run without isolation.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gdpo_tune.core.addresses import MANIFEST, RECORD, Repository, is_hub_address, parse_hub_address
from gdpo_tune.core.errors import UsageError, get_first_line
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.object_store import JOURNAL, SPEC, find_local_copy
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.core.trial_files import STEPS_FILE, TRIALS
from gdpo_tune.spec.model import Tracking

RECORDED = re.compile(rf"{SPEC}|{JOURNAL}|{TRIALS}/\d+/{STEPS_FILE}")
"""Files of a record."""
PRIVATE_KEYS = (
    *("extends", "project", "notify", "rollout.vllm_server"),
    *("resources.env", "search.warm_start", "tracking.uri"),
)
"""Keys that have no value in a published sweep file, or their defaults."""
HARMLESS = (None, "", [], Tracking().uri)
PLACES = ("policy", "data.source", "data.validation.source", "data.test.source")
"""Keys whose value may be a name, and no path."""
PATH = re.compile(r"[/~.$]|.*/.*/|.*/\.\.$", re.DOTALL)
"""A path rather than a name, which has at most one slash."""
UNSAFE = "sandbox.type: unsafe_no_isolation"
"""Setting under which a person has to agree that code of a policy runs on this machine."""
PATTERNS = [MANIFEST, *(f"{RECORD}/{name}" for name in (SPEC, JOURNAL, f"{TRIALS}/*/{STEPS_FILE}"))]
"""Files that are downloaded."""
MAX_SPEC, MAX_RECORD = 10**6, 2 * 10**9
"""Most bytes of a sweep file, and of a record: sweeps have kilobytes a trial."""
DISTRUST = "do not use it, or tell its owner"
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def download_published_sweep(address: str) -> Path:
    """Copy the record of a published sweep to this machine, and return its directory.

    Without a network an earlier copy is used. A UsageError says why there is no usable record.
    """
    repository = parse_hub_address(address)
    source, directory = _fetch(repository), find_local_copy(address)
    names = {
        path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()
    }
    names = {name: path for name, path in names.items() if RECORDED.fullmatch(name)}
    if not {SPEC, JOURNAL} <= names.keys():
        text = f"{repository.address} holds no record of a sweep"
        try:
            record = json.loads((source.parent / MANIFEST).read_bytes())["record"]
        except (OSError, ValueError, KeyError, TypeError):
            text += ": gdpo-tune publish did not write it\n    fix: check the name"
            raise UsageError(text) from None
        raise UsageError(f"{text}: it holds one member of a front\n    fix: read {record}")
    _refuse_outside_names(names[SPEC], address)
    for path in directory.glob(f"{TRIALS}/*/"):
        if f"{TRIALS}/{path.name}/{STEPS_FILE}" not in names:
            shutil.rmtree(path)
    for name, path in names.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / name, path.read_bytes())
    return directory


@contextmanager
def explain_foreign_ledger(address: str) -> Generator[None]:
    """Turn any failure to read the ledger of a published sweep into a UsageError.

    Records of another person need not be what a sweep writes. For a sweep of this machine such a
    failure is a fault of this package, and is raised as it is.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        if not is_hub_address(address):
            raise
        raise UsageError(
            f"{address}: its {JOURNAL} cannot be read: {get_first_line(error)}\n    fix: {DISTRUST}"
        ) from error


def _fetch(repository: Repository) -> Path:
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    options: dict[str, Any] = {
        "repo_id": repository.id,
        "repo_type": repository.kind,
        "allow_patterns": PATTERNS,
    }
    address, api = repository.address, HfApi()
    try:
        _refuse_large_record(api, repository)
        return Path(api.snapshot_download(**options)) / RECORD
    except LocalEntryNotFoundError as error:
        fix = "try again with a network; this machine has no earlier copy"
        reason = get_first_line(error.__cause__ or error)
    except HfHubHTTPError as error:
        fix, reason = f"check the name; if it is private, {LOG_IN}", get_first_line(error)
    except (OSError, HTTPError) as error:
        fix, reason = "try again with a network", get_first_line(error)
    except ValueError as error:  # names of files that no directory can have
        fix, reason = DISTRUST, get_first_line(error)
    raise UsageError(f"{address} cannot be read: {reason}\n    fix: {fix}")


def _refuse_large_record(api: Any, repository: Repository) -> None:
    """Refuse a record that would fill the disk or the memory; no answer is no reason."""
    from httpx import HTTPError
    from huggingface_hub.utils import filter_repo_objects

    try:
        info = api.repo_info(repository.id, repo_type=repository.kind, files_metadata=True)
    except (OSError, HTTPError):  # the download explains it, or does without
        return
    files = filter_repo_objects(
        info.siblings or (), allow_patterns=PATTERNS, key=lambda file: file.rfilename
    )
    size = sum(file.size or 0 for file in files)
    if size > MAX_RECORD:
        raise UsageError(
            f"{repository.address}: its record has {size / 1e9:,.0f} GB, and no sweep needs more "
            f"than {MAX_RECORD / 1e9:.0f}\n    fix: {DISTRUST}"
        )


def _refuse_outside_names(file: Path, address: str) -> None:
    try:
        if file.stat().st_size > MAX_SPEC:
            raise ValueError(f"it has more than {MAX_SPEC / 1e6:.0f} MB")
        content: Any = YAML(typ="safe").load(file)
        task = str(content["task"])
    except (YAMLError, LookupError, TypeError, ValueError, RecursionError) as error:
        reason = get_first_line(error)
        raise UsageError(
            f"{address}: its {SPEC} cannot be read: {reason}\n    fix: tell its owner"
        ) from error
    outside = [
        *(key for key in PRIVATE_KEYS for value in _find(content, key) if value not in HARMLESS),
        *(key for key in PLACES for value in _find(content, key) if PATH.match(str(value))),
        *(["task"] if is_task_file(task) and "/" in task else []),
        *(UNSAFE for value in _find(content, "sandbox.type") if f"sandbox.type: {value}" == UNSAFE),
    ]
    if outside:
        raise UsageError(
            f"{address}: its {SPEC} has {', '.join(outside)}, which no published sweep has, so "
            f"gdpo-tune publish did not write it\n    fix: {DISTRUST}"
        )


def _find(content: Any, key: str) -> Iterator[Any]:
    if not isinstance(content, Mapping):
        return
    for name, value in cast("Mapping[Any, Any]", content).items():
        if name == key or str(name).startswith(f"{key}."):
            yield value
        elif key.startswith(f"{name}."):
            yield from _find(value, key.removeprefix(f"{name}."))
