"""Trials of earlier sweeps that this sweep's sampler learns from (`search.warm_start`)."""

from __future__ import annotations

from gdpo_tune.core.files import expand_home
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import SPEC


def load_earlier_trials(spec: SweepSpec) -> list[TrialRecord]:
    """Load the usable trials of the sweeps that the spec names, by directory and number.

    A usable trial trained a policy, is complete and has every judged metric. Members of a
    population are left out, and so are replicates of members: their parameters moved while they
    trained. The ledgers are only read, so an earlier sweep may still run.

    Raises:
        SpecError: the file of an earlier sweep is not valid any more.
        UsageError, IdentityError: a directory holds no ledger, or one of another sweep.
    """
    trials: list[TrialRecord] = []
    for directory in map(expand_home, spec.search.warm_start):
        earlier = load_spec(directory / SPEC, to_run=False)
        # the directory may have moved since the sweep ran
        location = {"storage": str(directory.absolute().parent), "name": directory.absolute().name}
        with Ledger.open(earlier.model_copy(update=location), read_only=True) as ledger:
            records = ledger.get_records()
        members = {record.number for record in records if record.role == "member"}
        for record in records:
            trained = record.state == "complete" and record.is_training
            moved = record.number in members or record.replicate_of in members
            if trained and not moved and record.validation.keys() >= set(spec.judged_metrics):
                trials.append(record)
    return trials
