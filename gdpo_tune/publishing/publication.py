"""A sweep as one call of `publish` puts it on the Hub: its policies, and their licence.

What cannot be published is a `UsageError` that says how to go on.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gdpo_tune.core.addresses import Repository, find_id_problem
from gdpo_tune.core.errors import UsageError, get_first_line
from gdpo_tune.core.files import is_directory
from gdpo_tune.core.metrics import MetricInfo
from gdpo_tune.core.registry import POLICIES, collect_metrics
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.figures.front_png import write_front_png
from gdpo_tune.policies.load_policy import ANSWER_SECONDS, find_local_directory, resolve_policy
from gdpo_tune.publishing.record import build_record
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.picks import PickedCandidate
from gdpo_tune.results.public_record import hide_texts, make_public
from gdpo_tune.results.retrain import explain_missing_policy
from gdpo_tune.spec import SweepSpec

PICTURE = "front.png"
LONGEST_TITLE = 59
"""Most characters of a collection's title on the Hub."""


@dataclass(frozen=True)
class Publication:
    """A sweep as it is published under one name."""

    sweep: Sweep
    source: str
    """Location of the sweep, as the person wrote it."""
    target: str
    """`USER/NAME`."""
    licence: Licence
    is_front: bool
    """True if each member of the front gets a repository."""

    @cached_property
    def spec(self) -> SweepSpec:
        """Specification without what is about the author's machine."""
        return make_public(self.sweep.spec)

    @property
    def record(self) -> Repository:
        """Repository that has the numbers of the sweep."""
        return Repository("dataset" if self.is_front else "model", self.target)

    @property
    def sweep_id(self) -> str:
        """Identity of the sweep, told apart from other runs of an equal file by its start."""
        started = self.sweep.records[0].started or 0
        return f"{self.spec.compute_identity()}-{int(started)}"

    @property
    def title(self) -> str:
        """Title of the collection."""
        return f"{self.target.partition('/')[2]}: Pareto front"[:LONGEST_TITLE]

    @cached_property
    def metrics(self) -> dict[str, MetricInfo]:
        """Metrics of the sweep's task, and costs."""
        spec = self.sweep.spec  # a task in a file is there under its whole path alone
        return collect_metrics(load_task_info(spec.task, spec.space.domains))

    @cached_property
    def numbers(self) -> bytes:
        """Content of the file `NUMBERS`."""
        return (json.dumps(build_record(self.sweep), indent=1, allow_nan=False) + "\n").encode()

    def name_repository(self, candidate: str) -> Repository:
        """Return the repository of a candidate."""
        suffix = f"-{candidate.replace('@', '-step-')}" if self.is_front else ""
        return Repository("model", f"{self.target}{suffix}")

    def is_name_of_member(self, repository: str) -> bool:
        """Return whether `name_repository` may give this id to a member of a front."""
        pattern = rf"{re.escape(self.target)}-(merge-)?\d+(-step-\d+)?"
        return re.fullmatch(pattern, repository) is not None

    def draw_picture(self, chosen: PickedCandidate | None) -> bytes:
        """Return the picture of the front, with a candidate marked."""
        with TemporaryDirectory(prefix="gdpo-tune-") as directory:
            sweep = replace(self.sweep, chosen=chosen)
            return write_front_png(sweep, Path(directory, PICTURE)).read_bytes()


def open_publication(
    sweep: Sweep, source: str, target: str, licence: str | None, *, is_front: bool
) -> Publication:
    """Check what is published, and read what its cards need."""
    longest = f"{target}-merge-{len(sweep.records)}" if is_front else target
    if problem := find_id_problem(longest):
        raise UsageError(f"--to {target}: {problem}\n    fix: write --to USER/NAME")
    if not sweep.front.members:
        raise UsageError(
            f"{source}: nothing is on the front of that sweep, so there is nothing to publish\n"
            "    fix: let it run, or loosen its constraints"
        )
    policy, revision = sweep.spec.policy, sweep.spec.model.revision
    found = find_licence(policy, revision, licence)
    records = [hide_texts(record) for record in sweep.records]
    sweep = replace(sweep, records=records)
    return Publication(sweep, source, target, found, is_front)


def check_published(publication: Publication, chosen: PickedCandidate) -> None:
    """Refuse a candidate that was not evaluated, or whose policy was not kept."""
    if chosen.configuration is None:
        raise UsageError(
            f"{publication.source}: {chosen.title} was not evaluated on test prompts, so its card "
            "would be empty\n    fix: publish a member of the front"
        )
    if chosen.record.checkpoint is None:
        raise UsageError(
            explain_missing_policy(publication.sweep, chosen.record, publication.source)
        )


def list_members(publication: Publication) -> tuple[list[PickedCandidate], list[str]]:
    """Return the members of the front whose policies were kept, and why the others are missing."""
    kept: list[PickedCandidate] = []
    missing: list[str] = []
    for member in publication.sweep.front.members:
        record = publication.sweep.records[member.first]
        if record.checkpoint is None:
            missing.append(explain_missing_policy(publication.sweep, record, publication.source))
        else:
            kept.append(PickedCandidate(record, member.name, member))
    if not kept:
        raise UsageError(missing[0])
    return kept, missing


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

    That of the base is read from its card, on the Hub or next to its weights.
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
    from huggingface_hub import HfApi, RepoCard

    directory, reason = Path(resolve_policy(policy)), ""
    if not is_directory(directory):
        try:
            info = HfApi().model_info(policy, revision=revision or None, timeout=ANSWER_SECONDS)
            return info.card_data.to_dict() if info.card_data else {}, ""
        except (OSError, HTTPError, ValueError) as error:
            reason = f"its card cannot be read ({get_first_line(error)})"
        directory = find_local_directory(policy, revision)
        if directory is None:
            return {}, reason
    try:
        text = (directory / CARD).read_text(encoding="utf-8")
        data = RepoCard(text, ignore_metadata_errors=True).data.to_dict()
    except FileNotFoundError:
        return {}, reason or f"it has no {CARD}"
    except (OSError, ValueError) as error:
        return {}, reason or f"its card cannot be read ({get_first_line(error)})"
    return data, "" if data else reason
