"""`name:`, `tracking:`, `storage:` and `ledger:`: files, ledger and MLflow of a sweep."""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen

from gdpo_tune.core.addresses import is_hub_address
from gdpo_tune.core.files import expand_path, find_path_problem, is_file
from gdpo_tune.core.object_store import is_url
from gdpo_tune.spec.problems import Problems, SourceMark, YamlNode, hide_passwords
from gdpo_tune.spec.sections import Section, build_refusal, require_pattern

LONGEST_NAME = 100
"""Most characters of a sweep's name; the names of directories and pages append to it."""
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")
TRACKING_URI = require_pattern(
    r"(sqlite(\+\w+)?:///|(https?|(postgresql|mysql|mssql)(\+\w+)?)://).(?s:.*)|databricks(://.*)?",
    "not the address of a tracking server or database",
    "write sqlite:///mlflow.db, http://HOST:PORT, or the URL of a database",
)
LEDGER = re.compile(
    r"postgresql(\+psycopg2?)?://(?=[^/])([^/\s]*@)?(\[[0-9a-fA-F:.]+\]|[^/\s:@\[\]]*)(:\d{1,5})?/[^/\s]+"
)
SECRET = re.compile(r"://[^/@]*:[^/@]*@|\?")
"""Secret in the address of a store."""
TRACKING_VARIABLES = {"uri": "MLFLOW_TRACKING_URI", "experiment": "MLFLOW_EXPERIMENT_NAME"}
"""Key of `tracking` -> variable of MLflow that stands in where a file does not have the key."""


class Tracking(Section):
    """MLflow server and experiment that show the sweep."""

    uri: Annotated[str, MinLen(1), TRACKING_URI] = "sqlite:///mlflow.db"
    """MLflow tracking URI; without the key, `MLFLOW_TRACKING_URI` comes before the default."""
    experiment: str = ""
    """MLflow experiment; default: `MLFLOW_EXPERIMENT_NAME`, or the sweep's name."""
    required: bool = False
    """True to stop if MLflow takes no test run; else warn, and keep everything to send later."""
    private: bool = False
    """True to send no free text, path, host or user: the same texts leave as in `publish`."""

    @cached_property
    def origins(self) -> dict[str, str]:
        """Key -> its file and line, option or variable; a default has none. No part of equality."""
        return {}


def expand_storage(storage: str) -> str:
    """Return a directory with `~` and variables expanded, and an address as it is."""
    return storage if is_url(storage) else str(expand_path(storage))


def check_name(name: object, problems: Problems) -> str:
    """Return the sweep's name; refuse one that no directory can have."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    reason = (
        "not a name that a directory can have (letters, digits, '.', '_', '-'; at most "
        f"{LONGEST_NAME} of them)"
    )
    proposal = re.sub(r"[^A-Za-z0-9._-]+", "-", str(name)).strip("-.")[:LONGEST_NAME]
    proposal = proposal or "my-sweep" if isinstance(name, str) else f'"{proposal}"'
    problems.refuse("name", reason, f"write name: {proposal}", value=name)
    return "sweep"


def check_storage(storage: str, ledger: str, workers: int, problems: Problems) -> None:
    """Refuse a storage that is not a directory, or an object store without a `ledger`."""
    key = "storage"
    if not is_url(storage):
        if is_file(Path(storage)):
            problems.refuse(key, "is a file, not a directory", "name another directory")
        elif unusable := find_path_problem(storage):
            problems.refuse(key, unusable, "name another directory")
    elif SECRET.search(storage):
        shown = hide_passwords(storage).partition("?")[0]
        reason = "with a password or a query, which files and messages of the sweep would show"
        fix = "leave it out; packages of stores read variables, such as AWS_SECRET_ACCESS_KEY"
        problems.refuse(key, reason, fix, value=shown)
    elif workers > 1:
        reason = "an object store, and the processes of a trial need one directory"
        fix = "write a directory that every node sees, or resources.workers: 1"
        problems.refuse(key, reason, fix)
    elif not ledger and not is_hub_address(storage) and not problems.has_problem("ledger"):
        fix = "write ledger: postgresql+psycopg2://USER@HOST/DATABASE, or a directory as storage"
        problems.refuse(key, "an object store, which cannot hold a ledger", fix)
    elif not set(storage.split("/")).isdisjoint((".", "..")) or storage.endswith("://"):
        reason = "not the address of a directory on an object store"
        problems.refuse(key, reason, "write it like s3://bucket/sweeps")


def take_tracking_variables(root: YamlNode) -> None:
    """Add MLflow's variables to a document that does not have the keys of `tracking`.

    The file of a sweep has a variable's address without its password, which is added again.
    """
    for key, variable in TRACKING_VARIABLES.items():
        value, written = os.environ.get(variable), root.get(("tracking", key))
        if value and (written is None or value != written.value == hide_passwords(value)):
            node = YamlNode(SourceMark(variable), value)
            section = (root.entries or {}).setdefault("tracking", YamlNode(node.mark, entries={}))
            if section.entries is not None:
                section.entries[key] = node


def check_tracking(tracking: Tracking, problems: Problems) -> None:
    """Refuse a file of SQLite that no disk can hold, and a name that MLflow's store cannot."""
    _, is_file_address, path = tracking.uri.partition(":///")
    unusable = find_path_problem(path) if is_file_address else ""
    if unusable:
        problems.refuse("tracking.uri", unusable, "write sqlite:///mlflow.db, or another file")
    # Column `experiments.name`, which SQLite does not enforce; MLflow's MAX_EXPERIMENT_NAME_LENGTH.
    most = 256 if tracking.uri.startswith(("postgresql", "mysql", "mssql")) else 500
    if len(tracking.experiment) > most:
        reason = f"{len(tracking.experiment)} characters; MLflow takes at most {most} there"
        problems.refuse("tracking.experiment", reason, "write a shorter name", "tracking.uri")


def read_ledger(data: object) -> str:
    """Return the address of a database that can hold a ledger; empty for a file."""
    if isinstance(data, str) and (not data or LEDGER.fullmatch(data)):
        return data
    fix = "write postgresql+psycopg2://USER@HOST/DATABASE, or leave the key out"
    raise build_refusal("not the address of a PostgreSQL database", fix)
