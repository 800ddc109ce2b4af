"""Content of the repositories that one call of `publish` fills."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from gdpo_tune.core.addresses import MANIFEST, Repository
from gdpo_tune.core.errors import UsageError
from gdpo_tune.publishing.card import build_model_card, build_record_card
from gdpo_tune.publishing.publication import CARD, PICTURE, Publication
from gdpo_tune.publishing.record import NUMBERS, collect_policy_files
from gdpo_tune.results.open_sweep import fetch_policy
from gdpo_tune.results.picks import PickedCandidate

KEYS = {"sweep", "candidate", "pick", "record", "files"}
"""Keys of a manifest."""


@dataclass(frozen=True)
class RepositoryContent:
    """Files of a repository, and what they are."""

    repository: Repository
    files: Mapping[str, Path | bytes]
    """Path in the repository -> file of this machine, or content; the manifest is among them."""
    manifest: Mapping[str, Any]
    """Sweep, candidate, choice, address of the record, and names of the files."""
    adapter: Path | None = None
    """Directory of an adapter whose policy has to be written whole before; see `add_policy`."""

    def add_policy(self, files: Mapping[str, Path | bytes]) -> RepositoryContent:
        """Return the content with the files of the whole policy."""
        return _add_manifest(replace(self, files={**self.files, **files}))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(
            file.stat().st_size if isinstance(file, Path) else len(file)
            for file in self.files.values()
        )

    def find_conflict(self, manifest: Mapping[str, Any]) -> str:
        """Return why this must not replace what a manifest describes; empty if it may."""
        if manifest.get("sweep") != self.manifest["sweep"]:
            return f"{describe_manifest(manifest)} of another sweep"
        mine, other = self.manifest, manifest.get("candidate")
        has_pick = mine["candidate"] and other and mine["pick"] == manifest.get("pick")
        is_same = mine["candidate"] == other or has_pick
        return "" if is_same else f"{describe_manifest(manifest)} of this sweep"


def describe_manifest(manifest: Mapping[str, Any]) -> str:
    """Return `candidate 7`, or `the record`."""
    candidate = manifest.get("candidate")
    return f"candidate {candidate}" if candidate else "the record"


def build_model_repository(
    publication: Publication, candidate: PickedCandidate, others: Sequence[str] = ()
) -> RepositoryContent:
    """Build the repository of a policy; it has the record unless each member gets a repository.

    `others` are the names of the published members.
    """
    directory = fetch_policy(publication.sweep.spec, candidate.record.checkpoint)
    assert directory is not None, "only policies that were kept are published"
    policy = collect_policy_files(publication.sweep, directory)
    files: dict[str, Path | bytes] = {
        CARD: build_model_card(publication, candidate, policy, others).encode(),
        PICTURE: publication.draw_picture(candidate),
        **policy.files,
        **({} if publication.is_front else {NUMBERS: publication.numbers}),
    }
    repository = publication.name_repository(candidate.name)
    content = _build_content(publication, repository, files, candidate)
    return replace(content, adapter=directory if policy.is_adapter else None)


def build_front_repositories(
    publication: Publication, members: Sequence[PickedCandidate], missing: Sequence[str]
) -> list[RepositoryContent]:
    """Build the repository of the record, then those of the members of the front."""
    names = [member.name for member in members]
    files: dict[str, Path | bytes] = {
        CARD: build_record_card(publication, members, missing).encode(),
        PICTURE: publication.draw_picture(None),
        NUMBERS: publication.numbers,
    }
    record = _build_content(publication, publication.record, files, None)
    return [record, *(build_model_repository(publication, m, names) for m in members)]


def _build_content(
    publication: Publication,
    repository: Repository,
    files: Mapping[str, Path | bytes],
    candidate: PickedCandidate | None,
) -> RepositoryContent:
    manifest = {
        "made_by": "gdpo-tune publish",
        "sweep": publication.sweep_id,
        "candidate": candidate and candidate.name,
        "pick": candidate and candidate.text,
        "record": publication.record.path,
    }
    return _add_manifest(RepositoryContent(repository, files, manifest))


def _add_manifest(content: RepositoryContent) -> RepositoryContent:
    manifest = {**content.manifest, "files": sorted(content.files.keys() - {MANIFEST})}
    text = (json.dumps(manifest, indent=1) + "\n").encode()
    return replace(content, files={**content.files, MANIFEST: text}, manifest=manifest)


def parse_manifest(file: Path) -> Mapping[str, Any] | None:
    """Return the manifest of a repository; None if there is none that `publish` has written."""

    def is_below(name: str) -> bool:
        path = PurePosixPath(name)
        return not path.is_absolute() and ".." not in path.parts

    try:
        manifest: Any = json.loads(file.read_bytes())
        is_own = manifest.keys() >= KEYS and all(map(is_below, manifest["files"]))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return manifest if is_own else None


def check_directories(contents: Sequence[RepositoryContent], directory: Path) -> None:
    """Refuse directories that hold something else, with a `UsageError`."""
    for content in contents:
        target = directory / content.repository.id.partition("/")[2]
        if not target.exists():
            continue
        manifest = parse_manifest(target / MANIFEST)
        conflict = "other files" if manifest is None else content.find_conflict(manifest)
        if conflict and (manifest is not None or not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} exists and holds {conflict}\n    fix: choose another --out")


def write_directory(content: RepositoryContent, directory: Path) -> Path:
    """Write the files of a repository to a directory of its name, and return that.

    What an earlier call wrote there is replaced, and other files stay; see `check_directories`.
    """
    target = directory / content.repository.id.partition("/")[2]
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name, file in content.files.items():
        path = unfinished / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(file, Path):
            shutil.copyfile(file, path)
        else:
            path.write_bytes(file)
    with suppress(OSError):
        target.rmdir()  # it may be there and empty
    if not target.exists():
        unfinished.rename(target)
        return target
    for name in (parse_manifest(target / MANIFEST) or {}).get("files", ()):
        if name not in content.files:
            (target / name).unlink(missing_ok=True)
    for name in content.files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).replace(target / name)
    shutil.rmtree(unfinished)
    return target
