"""Licence of a published policy: that of the policy from which its training started."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import UsageError, get_first_line
from gdpo_tune.core.files import is_directory
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.policies.load_policy import ANSWER_SECONDS, find_local_directory, resolve_policy

PACKAGE_LICENCE = "apache-2.0"
"""Licence of this package, and of the policies that it contains."""
IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.-]*")
"""Form of an identifier in the metadata of a card, such as `apache-2.0`."""
NOT_STATED = (None, "", "unknown")
CARD = "README.md"


@dataclass(frozen=True)
class Licence:
    """A licence, as the metadata of a card has it."""

    identifier: str
    name: str = ""
    """Name of a licence without an identifier of its own, which is then `other`."""
    link: str = ""
    source: str = ""
    """Origin, for a person."""


def find_licence(policy: str, revision: str, given: str | None) -> Licence:
    """Return the licence that a person gives, or that of the base.

    The base's is read in its card: on the Hub, or beside its weights.

    Raises:
        UsageError: neither is known, or the given one has a wrong form.
    """
    if given is not None:
        if not IDENTIFIER.fullmatch(given):
            raise UsageError(
                f"--license {given}: not an identifier of a licence\n    fix: write one such as "
                "apache-2.0, mit, cc-by-4.0, or other"
            )
        return Licence(given, source="given with --license")
    if policy in POLICIES:
        return Licence(
            PACKAGE_LICENCE, source="the policy ships with gdpo_tune, and has its licence"
        )
    data, reason = _read_card(policy, revision)
    identifier = data.get("license")
    if isinstance(identifier, list):
        identifier = identifier[0] if len(identifier) == 1 else None
    if identifier in NOT_STATED:
        raise UsageError(
            f"the licence of {policy} is unknown: {reason or 'its card states none'}\n"
            "    fix: look it up, and write --license ID, such as --license apache-2.0"
        )
    name, link = (str(data.get(key) or "") for key in ("license_name", "license_link"))
    return Licence(str(identifier), name, link, f"that of {policy}")


def _read_card(policy: str, revision: str) -> tuple[dict[str, Any], str]:
    """Return the metadata of a policy's card, and why there is none; may be empty."""
    from httpx import HTTPError
    from huggingface_hub import HfApi

    if is_directory(Path(resolve_policy(policy))):
        return _read_card_file(Path(resolve_policy(policy)) / CARD)
    try:
        info = HfApi().model_info(policy, revision=revision or None, timeout=ANSWER_SECONDS)
    except (OSError, HTTPError, ValueError) as error:
        local = find_local_directory(policy, revision)
        data, _ = _read_card_file(local / CARD) if local else ({}, "")
        return data, "" if data else f"its card cannot be read ({get_first_line(error)})"
    return info.card_data.to_dict() if info.card_data else {}, ""


def _read_card_file(file: Path) -> tuple[dict[str, Any], str]:
    from huggingface_hub import RepoCard

    try:
        card = RepoCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except FileNotFoundError:
        return {}, f"it has no {CARD}"
    except (OSError, ValueError) as error:
        return {}, f"its card cannot be read ({get_first_line(error)})"
    return card.data.to_dict(), ""
