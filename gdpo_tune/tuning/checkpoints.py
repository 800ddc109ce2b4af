"""Which checkpoints stay on disk once a sweep is done (`keep:`)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from gdpo_tune.analysis import configurations
from gdpo_tune.ledger import Ledger
from gdpo_tune.trials import TrialRecord


def tidy(ledger: Ledger) -> None:
    """Delete the checkpoints of finished trials that `keep:` does not name.

    A kept trial keeps its trained policy only; an unfinished one keeps all, to go on from.
    """
    records = [record for record in ledger.records() if record.state != "running"]
    kept = kept_trials(ledger, records)
    for record in records:
        folder = ledger.trial_directory(record.number)
        for path in [*folder.glob("checkpoint-*"), *folder.glob(".unfinished-*")]:
            if not (record.number in kept and path == record.checkpoint):
                shutil.rmtree(path)
    ledger.forget_checkpoints([record.number for record in records])


def kept_trials(ledger: Ledger, records: Sequence[TrialRecord]) -> set[int]:
    """Numbers of the trials whose policy stays."""
    if ledger.spec.keep == "all":
        return {record.number for record in records}
    if ledger.spec.keep == "none":
        return set()
    found = configurations(records, ledger.spec.objective_list())
    return {number for point in found if point.on_front for number in point.numbers}
