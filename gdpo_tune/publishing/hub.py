"""Uploads to the Hub: who may, what is there already, and only what changed.

A repository gets all of its files in one commit, so it is never half an update. Contents that an
interrupted upload has stored are not sent again.

A refusal, or no answer, is a `UsageError` before the first upload, when nothing was sent, and a
`HubError` from then on, after which the same command continues.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from httpx import HTTPError
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from gdpo_tune.core.addresses import MANIFEST
from gdpo_tune.core.errors import HubError, UsageError, get_first_line
from gdpo_tune.core.text import format_first
from gdpo_tune.publishing.publication import CARD, Publication
from gdpo_tune.publishing.repositories import RepositoryContent, describe_manifest, parse_manifest

EMPTY = {".gitattributes"}
"""Files of a new repository."""
MOST_NAMES = 4
"""Names of files of a taken repository that a message lists."""
AGAIN = "run the same command again; what has arrived is not sent again"
LATER = "write the same with --dry-run, whose directories `hf upload` sends later"
INVALID, UNAUTHORIZED, FORBIDDEN = 400, 401, 403
LONGEST = 300
"""Characters of a reason of the Hub, which lists every licence that it knows."""


class FoundRepository(NamedTuple):
    """A repository that exists."""

    manifest: Mapping[str, Any] | None
    """Its manifest; None if it is empty."""
    revision: str
    """Its newest commit."""
    names: Set[str]
    """Its files."""


def log_in(target: str) -> HfApi:
    """Return a client whose user may write to the owner of `USER/NAME`; refuse any other user."""
    if get_token() is None:
        raise UsageError(
            "no token for the Hub\n    fix: log in with `hf auth login`, or set HF_TOKEN to a "
            "token that may write; --dry-run needs none"
        )
    api = HfApi()
    with explain_refusals():
        user: Any = api.whoami()
        try:
            name = str(user["name"])
            names = [name, *(str(org["name"]) for org in user.get("orgs") or ())]
            role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError("its answer names no user") from error
    owner = target.partition("/")[0]
    if owner.lower() not in [name.lower() for name in names]:
        raise UsageError(
            f"--to {target}: you are logged in as {name}, who may not write to {owner}\n"
            f"    fix: write --to {name}/{target.partition('/')[2]}, or log in as {owner}"
        )
    if role == "read":
        raise UsageError(
            "the token of the Hub may only read\n    fix: create one that may write, and log in "
            "with `hf auth login`"
        )
    return api


@contextmanager
def explain_refusals() -> Generator[None]:
    """Turn an error of the Hub before the first upload into a usage error."""
    state = "nothing was uploaded"
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code == UNAUTHORIZED:
            fix = "log in with `hf auth login`, or set HF_TOKEN to a valid token"
        elif error.response.status_code == FORBIDDEN:
            fix = "use a token that may write there"
        else:
            fix = f"try again later, or {LATER}"
        raise UsageError(
            f"the Hub refuses: {get_first_line(error)}; {state}\n    fix: {fix}"
        ) from error
    except ValueError as error:  # of the token, or of an answer
        raise UsageError(
            f"the Hub cannot be asked: {get_first_line(error)}; {state}\n    fix: log in again "
            f"with `hf auth login`, check HF_ENDPOINT, or {LATER}"
        ) from error
    except (HTTPError, OSError) as error:
        raise UsageError(
            f"the Hub cannot be reached: {get_first_line(error)}; {state}\n    fix: try again with "
            f"a network, or {LATER}"
        ) from error


def check_names(
    api: HfApi, contents: Sequence[RepositoryContent], *, private: bool
) -> dict[str, FoundRepository]:
    """Refuse names that are taken by anything but an earlier call, or public with `private`.

    Returns:
        Path of each repository that exists -> what is there.
    """
    found: dict[str, FoundRepository] = {}
    for content in contents:
        repository = content.repository
        with explain_refusals():
            try:
                info: Any = api.repo_info(repository.id, repo_type=repository.kind)
            except RepositoryNotFoundError:
                continue
            names = {sibling.rfilename for sibling in info.siblings or ()}
            manifest = None
            if MANIFEST in names:
                path = api.hf_hub_download(repository.id, MANIFEST, repo_type=repository.kind)
                manifest = parse_manifest(Path(path))
        others = sorted(names - EMPTY)
        if manifest is None and others:
            held = f"{len(others)} files ({format_first(others, MOST_NAMES)})"
            raise UsageError(_explain_taken(content, f"{held}, and this command did not make it"))
        if manifest is not None and (conflict := content.find_conflict(manifest)):
            raise UsageError(_explain_taken(content, conflict))
        if private and not info.private:
            raise UsageError(
                f"{repository.path} exists and is public, so --private has no effect\n"
                "    fix: make it private in its settings on the Hub, or leave --private out"
            )
        found[repository.path] = FoundRepository(manifest, str(info.sha), names)
    return found


def check_cards(api: HfApi, contents: Sequence[RepositoryContent]) -> None:
    """Refuse cards that the Hub would refuse, such as one of a licence that it does not know."""
    for content in contents:
        card, repository = content.files[CARD], content.repository
        assert isinstance(card, bytes), "cards are written here"
        with explain_refusals():
            answer = get_session().post(
                f"{api.endpoint}/api/validate-yaml",
                json={"content": card.decode(), "repoType": repository.kind},
                headers=build_hf_headers(),
            )
            if answer.status_code != INVALID:
                hf_raise_for_status(answer)
                continue
            try:
                errors = [str(error["message"]) for error in answer.json()["errors"]]
            except (LookupError, TypeError) as error:
                raise ValueError("it refuses a card without a reason") from error
        raise UsageError(
            f"{repository.path}: the Hub refuses the card: {shorten(' '.join(errors), LONGEST)}\n"
            "    fix: write --license with an identifier that the Hub knows, or other"
        )


def _explain_taken(content: RepositoryContent, held: str) -> str:
    return (
        f"--to: {content.repository.path} is taken: it holds {held}\n"
        "    fix: write another name; nothing there was changed"
    )


def upload(
    api: HfApi, content: RepositoryContent, found: Mapping[str, FoundRepository], *, private: bool
) -> str:
    """Create or update a repository, and return what was done, with its address on the Hub.

    `found` is the result of `check_names`: files of an earlier manifest that are no longer written
    are deleted.
    """
    repository = content.repository
    earlier = found.get(repository.path)
    written = earlier.manifest["files"] if earlier and earlier.manifest else ()
    gone = set(written) & earlier.names - content.files.keys() if earlier else ()
    operations = [
        *(CommitOperationAdd(name, file) for name, file in content.files.items()),
        *(CommitOperationDelete(name) for name in sorted(gone)),
    ]
    message = f"Publish {describe_manifest(content.manifest)} of a sweep"
    with explain_interruptions(repository.path):
        if earlier is None:
            api.create_repo(repository.id, repo_type=repository.kind, private=private)
        commit = api.create_commit(
            repository.id, operations, commit_message=message, repo_type=repository.kind
        )
    verb = "published" if earlier is None else "updated"
    if earlier is not None and commit.oid == earlier.revision:
        verb = "unchanged"
    return f"{verb}: {api.endpoint}/{repository.path}"


def list_in_collection(
    api: HfApi, publication: Publication, contents: Sequence[RepositoryContent], *, private: bool
) -> str:
    """List all repositories in a collection, which is created if missing; return its address."""
    with explain_interruptions("the collection"):
        collection = api.create_collection(
            publication.title,
            namespace=publication.target.partition("/")[0],
            description=f"Policies on the Pareto front of the sweep {publication.spec.name}"[:150],
            private=private,
            exists_ok=True,
        )
        wanted = {(c.repository.id, c.repository.kind) for c in contents}
        for item in collection.items:
            is_member = publication.is_name_of_member(item.item_id)
            if is_member and (item.item_id, item.item_type) not in wanted:
                api.delete_collection_item(collection.slug, item.item_object_id, missing_ok=True)
        for content in contents:
            repository = content.repository
            api.add_collection_item(collection.slug, repository.id, repository.kind, exists_ok=True)
    return collection.url


@contextmanager
def explain_interruptions(subject: str) -> Generator[None]:
    """Turn an error during an upload into a `HubError`."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # all errors of the client
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        reason, fix = get_first_line(cause), AGAIN
        response = getattr(cause, "response", None)
        if getattr(response, "status_code", None) in (UNAUTHORIZED, FORBIDDEN):
            fix = f"use a token that may write there, and {AGAIN}"
        elif isinstance(error, ValueError):  # a card that the Hub refuses: each line has a reason
            reason = " ".join(str(error).split())
        raise HubError(f"{subject}: the upload stopped: {reason}\n    fix: {fix}") from error
