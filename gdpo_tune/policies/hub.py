"""Policies on the Hub: whether they can be fetched, and what is known without loading them."""

from __future__ import annotations

from pathlib import Path

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.files import is_present
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.policies.load_policy import (
    WEIGHTS,
    check_policy,
    find_local_directory,
    resolve_policy,
    suggest_policy,
)

ANSWER_SECONDS = 5.0
"""Seconds that the Hub has to answer a dry run."""


def check_policy_available(name: str, revision: str = "") -> None:
    """Refuse what `check_policy` does, and a Hub id that is neither cached nor on the Hub.

    It fetches a configuration of a few KB, so that a misspelt id is found before a cluster starts.

    Raises:
        PolicyError: the policy cannot be used or fetched; the message says what to do.
    """
    check_policy(name, revision)
    if is_present(Path(resolve_policy(name))):
        return
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json", revision=revision or None)
    except (OSError, ValueError) as error:  # all errors of the Hub client
        raise _build_hub_error(name, revision, error) from error


def describe_policy(name: str, revision: str = "") -> str:
    """Return what is known about the files of a policy, for a dry run.

    The Hub is asked once about a policy that is not on this machine.

    Raises:
        PolicyError: the policy cannot be used, or the Hub has none of this name.
    """
    check_policy(name, revision)
    if name in POLICIES:
        return f"{name} ships with the package"
    if is_present(Path(resolve_policy(name))):
        return f"{name} is a directory with a configuration, weights and a tokenizer"
    directory = find_local_directory(name, revision)
    if directory is not None and any(file for each in WEIGHTS for file in directory.glob(each)):
        return f"{name} is in the local cache of the Hub"
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        HfApi().model_info(name, revision=revision or None, timeout=ANSWER_SECONDS)
    except (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        HFValidationError,
    ) as error:
        raise _build_hub_error(name, revision, error) from error
    except (OSError, HTTPError):
        text = "is not in the local cache, and the Hub does not answer, so it was not checked"
        return f"{name} {text}. {suggest_policy(name)}".rstrip()
    return f"{name} is on the Hub; this machine has no copy of its weights yet"


def _build_hub_error(name: str, revision: str, error: Exception) -> PolicyError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    place = f"{name!r} at revision {revision}" if revision else repr(name)
    return PolicyError(
        f"policy {place} cannot be loaded from the Hub: {reason}. {suggest_policy(name)}"
        "Check the name, or download it on a machine with a network and give its directory"
    )
