"""Trials of earlier sweeps from which this one's sampler learns (`search.warm_start`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.trials import TrialRecord


def earlier_trials(spec: SweepSpec) -> list[TrialRecord]:
    """Complete trials of the sweeps that the spec names, by folder and number.

    The untrained policy is none of them. The ledgers are only read, so a sweep may still run.

    Raises:
        SpecError: the file of an earlier sweep does not hold any more.
        UsageError, IdentityError: a folder holds no ledger, or one of another sweep than its file.
    """
    found: list[TrialRecord] = []
    for folder in map(Path, spec.search.warm_start):
        earlier = load_spec(folder / "spec.yaml")
        # where it lies now, wherever it lay when it ran
        here = {"storage": folder.absolute().parent, "name": folder.absolute().name}
        with Ledger.open(earlier.model_copy(update=here), read_only=True) as ledger:
            found += [record for record in ledger.records() if teaches(record, spec.judged)]
    return found


def teaches(record: TrialRecord, judged: Sequence[str]) -> bool:
    """Whether a trial was trained to its end and measured everything that is judged now."""
    trained = record.state == "complete" and record.role != "untrained"
    return trained and all(name in record.validation for name in judged)
