"""Which checkpoints stay on disk once a sweep is done (`keep:`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gdpo_tune.analysis.replicates import configurations
from gdpo_tune.core.checkpoint_names import MARKER, by_steps
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.sweep_store import SweepStore
from gdpo_tune.training.checkpoints import newest_valid_checkpoint, remove_all_but


def tidy(ledger: Ledger) -> None:
    """Delete the checkpoints of finished trials that `keep:` does not name.

    A kept trial keeps its last checkpoint whole: the trained policy, and the optimizer's and the
    random states beside it. An unfinished trial keeps what it can go on from, and a pruned one
    under `keep: all` what it had come to.
    """
    records = [record for record in ledger.records() if not record.is_open]
    kept = kept_trials(ledger, records)
    stay: dict[int, Path | None] = {}
    for record in records:
        folder = ledger.trial_directory(record.number)
        stays = record.checkpoint
        if record.state == "pruned":
            stays = newest(ledger, folder)
        stay[record.number] = stays if record.number in kept else None
    if ledger.spec.address:
        names = {number: path and path.name for number, path in stay.items()}
        SweepStore(ledger.spec).keep_only(names)
    for number, path in stay.items():
        remove_all_but(ledger.trial_directory(number), path)
    ledger.forget_checkpoints([record.number for record in records])


def newest(ledger: Ledger, folder: Path) -> Path | None:
    """The newest whole checkpoint of a trial; of one on an object store its marker is here."""
    if not ledger.spec.address:
        return newest_valid_checkpoint(folder)
    names = by_steps([f"{path.parent.name}/{MARKER}" for path in folder.glob(f"*/{MARKER}")])
    return folder / names[0] if names else None


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
