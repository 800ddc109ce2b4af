"""Which checkpoints stay on disk once a sweep is done (`keep:`)."""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.analysis import configurations
from gdpo_tune.ledger import Ledger
from gdpo_tune.training.checkpoints import remove_all_but
from gdpo_tune.trials import TrialRecord


def tidy(ledger: Ledger) -> None:
    """Delete the checkpoints of finished trials that `keep:` does not name.

    A kept trial keeps its last checkpoint whole: the trained policy, and the optimizer's and the
    random states beside it. An unfinished trial keeps what it can go on from.
    """
    records = [record for record in ledger.records() if record.state != "running"]
    kept = kept_trials(ledger, records)
    for record in records:
        stays = record.checkpoint if record.number in kept else None
        remove_all_but(ledger.trial_directory(record.number), stays)
    ledger.forget_checkpoints([record.number for record in records])


def kept_trials(ledger: Ledger, records: Sequence[TrialRecord]) -> set[int]:
    """Numbers of the trials whose last checkpoint stays."""
    if ledger.spec.keep == "all":
        return {record.number for record in records}
    if ledger.spec.keep == "none":
        return set()
    found = configurations(records, ledger.spec.objective_list())
    if not any(point.on_front for point in found):
        # Constraints may change on a finished sweep: an empty front names nothing to throw away.
        return {record.number for record in records}
    return {number for point in found if point.on_front for number in point.numbers}
