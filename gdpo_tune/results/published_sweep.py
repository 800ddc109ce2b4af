"""Sweeps that `publish` has put on the Hub, read as any other sweep from a copy on this machine.

A record from the Hub is another person's file. So no key of it may name a database, a server, a
webhook or a file of this machine.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gdpo_tune.core.errors import UsageError, get_first_line
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.hub_address import MANIFEST, RECORD, Repository, parse_hub_address
from gdpo_tune.core.object_store import find_local_copy
from gdpo_tune.core.steps import STEPS_FILE
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.ledger.trial_encoding import TRIALS
from gdpo_tune.spec.model import JOURNAL, SPEC
from gdpo_tune.spec.storage_section import Tracking

RECORDED = re.compile(rf"{SPEC}|{JOURNAL}|{TRIALS}/\d+/{STEPS_FILE}")
"""Files of a record."""
PRIVATE_KEYS = (
    *("extends", "ledger", "notify", "sandbox.url", "rollout.vllm_server", "resources.env"),
    *("search.warm_start", "tracking.uri"),
)
"""Keys that have no value in a published sweep file, or their defaults."""
HARMLESS = (None, "", [], Tracking().uri)
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def download_published_sweep(address: str) -> Path:
    """Copy the record of a published sweep to this machine, and return its directory.

    Without a network an earlier copy is used.

    Raises:
        UsageError: the address names no repository, the repository holds no record or cannot be
            read, or its record names something outside of it.
    """
    repository = parse_hub_address(address)
    source, directory = _fetch(repository), find_local_copy(address)
    names = {
        path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()
    }
    names = {name: path for name, path in names.items() if RECORDED.fullmatch(name)}
    if not {SPEC, JOURNAL} <= names.keys():
        raise UsageError(_explain_missing_record(repository, source.parent / MANIFEST))
    _refuse_outside_names(names[SPEC], address)
    for path in directory.glob(f"{TRIALS}/*/"):
        if f"{TRIALS}/{path.name}/{STEPS_FILE}" not in names:
            shutil.rmtree(path)
    for name, path in names.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / name, path.read_bytes())
    return directory


def _fetch(repository: Repository) -> Path:
    """Return the directory of the record in the cache of the Hub; it may not exist."""
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    options: dict[str, Any] = {
        "repo_id": repository.id,
        "repo_type": repository.kind,
        "allow_patterns": [MANIFEST, f"{RECORD}/*"],
    }
    address = repository.address
    try:
        return Path(HfApi().snapshot_download(**options)) / RECORD
    except LocalEntryNotFoundError as error:
        fix = "try again with a network; this machine has no earlier copy"
        reason = get_first_line(error.__cause__ or error)
    except HfHubHTTPError as error:
        fix, reason = f"check the name; if it is private, {LOG_IN}", get_first_line(error)
    except (OSError, HTTPError) as error:
        fix, reason = "try again with a network", get_first_line(error)
    raise UsageError(f"{address} cannot be read: {reason}\n    fix: {fix}")


def _explain_missing_record(repository: Repository, manifest: Path) -> str:
    """Return an error for a repository without a record, with the address of one if it has that."""
    text = f"{repository.address} holds no record of a sweep"
    try:
        record = json.loads(manifest.read_bytes())["record"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{text}: gdpo-tune publish did not write it\n    fix: check the name"
    return f"{text}: it holds one member of a front\n    fix: read {record}"


def _refuse_outside_names(file: Path, address: str) -> None:
    """Refuse a sweep file that names a database, a server or a file of this machine."""
    try:
        content: Any = YAML(typ="safe").load(file)
        outside = [key for key in PRIVATE_KEYS if _get(content, key) not in HARMLESS]
        task = str(content["task"])
    except (YAMLError, LookupError, TypeError, AttributeError) as error:
        reason = get_first_line(error)
        raise UsageError(
            f"{address}: its {SPEC} cannot be read: {reason}\n    fix: tell its owner"
        ) from error
    outside += ["task"] if is_task_file(task) and "/" in task else []
    if outside:
        raise UsageError(
            f"{address}: its {SPEC} has {', '.join(outside)}, which no published sweep has, so "
            "gdpo-tune publish did not write it\n    fix: do not use it, or tell its owner"
        )


def _get(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = (content or {}).get(part)
    return content
