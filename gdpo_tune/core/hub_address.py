"""Addresses of published sweeps: `hf://USER/NAME` and `hf://datasets/USER/NAME`."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from gdpo_tune.core.errors import UsageError

SCHEME = "hf://"
DATASETS = "datasets/"
"""Prefix of the id of a data set in an address."""
REPOSITORY_ID = re.compile(r"(?=.{3,96}$)(\w[\w.-]*)/(\w(?:[\w.-]*\w)?)", re.ASCII)
"""Form of `USER/NAME`."""
MANIFEST = "gdpo_tune.json"
"""File of a repository that says which candidate of which sweep it holds."""
RECORD = "sweep"
"""Directory of a repository with the record of a sweep."""
RepositoryKind = Literal["model", "dataset"]


class Repository(NamedTuple):
    """A repository on the Hub."""

    kind: RepositoryKind
    id: str
    """`USER/NAME`."""

    @property
    def address(self) -> str:
        """Address of the sweep whose record it holds."""
        return f"{SCHEME}{DATASETS if self.kind == 'dataset' else ''}{self.id}"

    @property
    def path(self) -> str:
        """Path of its page on the Hub: `USER/NAME`, `datasets/USER/NAME`."""
        return self.address.removeprefix(SCHEME)


def is_hub_address(address: str) -> bool:
    """Return whether an address is that of a published sweep, or of its storage."""
    return address.lower().startswith(SCHEME)


def find_id_problem(repository: str) -> str:
    """Return why no repository on the Hub can have an id; empty if one can."""
    match = REPOSITORY_ID.fullmatch(repository)
    if match is None or "--" in repository or ".." in repository or repository.endswith(".git"):
        return (
            "not of the form USER/NAME (letters, digits, '.', '_', '-'; at most 96 characters, no "
            "'--' and no '..')"
        )
    return ""


def parse_hub_address(address: str) -> Repository:
    """Return the repository that an address names.

    Raises:
        UsageError: it names none.
    """
    path = address[len(SCHEME) :].rstrip("/")
    kind: RepositoryKind = "dataset" if path.startswith(DATASETS) else "model"
    identity = path.removeprefix(DATASETS)
    if problem := find_id_problem(identity):
        raise UsageError(
            f"{address}: {problem}\n    fix: write {SCHEME}USER/NAME or {SCHEME}{DATASETS}USER/NAME"
        )
    return Repository(kind, identity)


def refuse_published(address: str, command: str, fix: str) -> None:
    """Refuse a published sweep where a command would change it, or run it.

    Raises:
        UsageError: the address is that of a published sweep.
    """
    if is_hub_address(address):
        raise UsageError(f"{command}: {address} is published, so it is only read\n    fix: {fix}")
