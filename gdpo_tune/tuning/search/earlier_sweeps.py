"""Trials of earlier sweeps from which this one's sampler learns (`search.warm_start`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import SPEC
from gdpo_tune.spec.warm_start import folder_of


def load_earlier_trials(spec: SweepSpec) -> list[TrialRecord]:
    """Complete trials of the sweeps that the spec names, by folder and number.

    The untrained policy is none of them, nor is a member of a population or a replicate of one:
    their parameters moved while they trained. The ledgers are only read, so a sweep may still run.

    Raises:
        SpecError: the file of an earlier sweep does not hold any more.
        UsageError, IdentityError: a folder holds no ledger, or one of another sweep than its file.
    """
    found: list[TrialRecord] = []
    for folder in map(folder_of, spec.search.warm_start):
        earlier = load_spec(folder / SPEC, to_run=False)
        # where it lies now, wherever it lay when it ran
        here = {"storage": str(folder.absolute().parent), "name": folder.absolute().name}
        with Ledger.open(earlier.model_copy(update=here), read_only=True) as ledger:
            found += select_usable(ledger.records(), spec.judged)
    return found


def select_usable(records: Sequence[TrialRecord], judged: Sequence[str]) -> Iterator[TrialRecord]:
    """Trials of one sweep that were trained to their end, by the parameters of their records, and
    measured everything that is judged now."""
    moving = {record.number for record in records if record.role == "member"}
    for record in records:
        trained = record.state == "complete" and record.role != "untrained"
        moved = record.number in moving or record.replicate_of in moving
        if trained and not moved and all(name in record.validation for name in judged):
            yield record
