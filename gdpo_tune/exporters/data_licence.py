"""Licence of a data set, whose rows an export would copy."""

from __future__ import annotations

from typing import Any

from gdpo_tune.core.errors import DataError
from gdpo_tune.core.files import expand_path, path_exists
from gdpo_tune.core.settings import DataSettings

ANSWER_SECONDS = 5.0
"""Seconds that the Hub has to answer."""
SHAREABLE = {
    *("apache-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "cc-by-3.0", "cc-by-4.0", "cc0-1.0"),
    *("cc-by-sa-3.0", "cc-by-sa-4.0", "cdla-permissive-2.0", "mit", "odc-by", "pddl", "unlicense"),
}
"""Licences, by the Hub's names, that allow to pass rows on."""


def require_shareable(data: DataSettings) -> None:
    """Refuse to copy rows of a data set on the Hub unless its licence allows to pass them on.

    Rows of a file are the user's own matter, and so are prompts that a task writes.

    Raises:
        DataError: the licence is another one, or not known.
    """
    if not data.source or data.is_local:
        return
    licences = find_licences(data.source)
    if licences and SHAREABLE.issuperset(licences):
        return
    known = f"its licence is {' and '.join(licences)}" if licences else "its licence is not known"
    raise DataError(
        f"data.source = {data.source}: its rows would be copied into the directory, and {known}: "
        "--reference-data writes a program that fetches them instead; --copy-data copies them, if "
        "you may pass them on"
    )


def find_licences(source: str) -> list[str]:
    """Return the licences that the Hub names for a data set; empty if none is known."""
    stated = getattr(_ask_hub(source), "license", None) or []
    return [stated] if isinstance(stated, str) else list(stated)


def is_within_reach(data: DataSettings) -> bool:
    """Return whether a data set is on this machine, or on the Hub and the Hub answers."""
    if data.is_local:
        return path_exists(expand_path(data.source))
    return _ask_hub(data.source) is not None


def _ask_hub(source: str) -> Any:
    """Return the card of a data set, or an empty one; None if the Hub has or says nothing."""
    from httpx import HTTPError
    from huggingface_hub import DatasetCardData, HfApi

    try:
        info = HfApi().dataset_info(source, timeout=ANSWER_SECONDS)
    except (OSError, ValueError, HTTPError):  # no network, no such data set, no right to it
        return None
    return info.card_data or DatasetCardData()
