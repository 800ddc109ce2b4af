"""Trials of earlier sweeps that this sweep's sampler learns from (`search.warm_start`)."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gdpo_tune.core.content import Fact, describe_changes, list_changes
from gdpo_tune.core.errors import IdentityError
from gdpo_tune.core.files import expand_path
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import list_decisive_values


def load_earlier_trials(spec: SweepSpec) -> list[TrialRecord]:
    """Load the usable trials of the sweeps that the spec names, by directory and number.

    A usable trial trained a policy, is complete and has every judged metric. Members of a
    population are left out, and so are replicates of members: their parameters moved while they
    trained. So are trials before an accepted change of content. The ledgers are only read, so an
    earlier sweep may still run.

    Raises:
        SpecError: the file of an earlier sweep is not valid any more.
        UsageError, IdentityError: a directory holds no ledger, or one of another sweep.
    """
    trials: list[TrialRecord] = []
    for directory in map(expand_path, spec.search.warm_start):
        with _open_earlier(directory) as ledger:
            records = ledger.get_records()
        members = {record.number for record in records if record.role == "member"}
        for record in records:
            trained = record.state == "complete" and record.is_training and record.is_comparable
            moved = record.number in members or record.replicate_of in members
            if trained and not moved and record.validation.keys() >= set(spec.judged_metrics):
                trials.append(record)
    return trials


def refuse_other_content(spec: SweepSpec, content: Mapping[str, Fact]) -> None:
    """Refuse to learn from a sweep that measured by other content, such as an edited reward.

    What this sweep names differently, such as its policy, it changes on purpose. Versions decide
    numbers and not their meaning, so they may differ too.

    Raises:
        IdentityError: a file of an earlier sweep's task, data or policy has changed since then.
        SpecError, UsageError: as `load_earlier_trials`.
    """
    for directory in map(expand_path, spec.search.warm_start):
        with _open_earlier(directory) as ledger:
            earlier, newest = ledger.spec, ledger.get_contents()[-1:]
        ours, theirs = list_decisive_values(spec), list_decisive_values(earlier)
        differ = {k.partition(".")[0] for k in ours | theirs if ours.get(k) != theirs.get(k)}
        others = ["version", "hub", *differ & {"data", "policy", "task"}]
        others += ["file"] if "task" in differ else []
        for recorded in newest:
            if changes := list_changes(recorded["digests"], content, without=others):
                raise IdentityError(
                    f"search.warm_start: {describe_changes(changes, directory, recorded['time'])}\n"
                    "    fix: restore it, or take that sweep out of search.warm_start"
                )


@contextmanager
def _open_earlier(directory: Path) -> Generator[Ledger]:
    earlier = load_spec(directory / SPEC, to_run=False)
    # the directory may have moved since the sweep ran
    location = {"storage": str(directory.absolute().parent), "name": directory.absolute().name}
    with Ledger.open(earlier.model_copy(update=location), read_only=True) as ledger:
        yield ledger
