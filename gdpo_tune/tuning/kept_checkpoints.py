"""Checkpoints that stay on disk once a trial, or a sweep, has ended (`keep:`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gdpo_tune.analysis.replicates import pool_trials
from gdpo_tune.core.checkpoint_names import MARKER, sort_checkpoints
from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.sweep_store import SweepStore
from gdpo_tune.training.checkpoints import find_newest_checkpoint, remove_all_but


def delete_unkept_checkpoints(ledger: Ledger) -> None:
    """Delete the checkpoints of finished trials that `keep:` does not name.

    A kept trial keeps all files of its last checkpoint. Unfinished trials keep theirs, and pruned
    ones under `keep: all` their newest one.
    """
    records = [record for record in ledger.get_records() if not record.is_open]
    kept = select_kept_trials(ledger, records)
    paths: dict[int, Path | None] = {}
    for record in records:
        checkpoint = record.checkpoint
        if record.state == "pruned":
            checkpoint = find_newest(ledger, ledger.get_trial_directory(record.number))
        paths[record.number] = checkpoint if record.number in kept else None
    if ledger.spec.address:
        names = {number: path and path.name for number, path in paths.items()}
        SweepStore(ledger.spec).keep_only(names)
    for number, path in paths.items():
        remove_all_but(ledger.get_trial_directory(number), path)
    ledger.refresh_checkpoints([record.number for record in records])


def trim_ended_trial(ledger: Ledger, record: TrialRecord) -> TrialRecord:
    """Delete the checkpoints that no later decision needs of a trial that has ended; return it.

    The last checkpoint of a complete trial stays: until the end of the sweep, the trial may join
    the front. Of a pruned trial the newest one stays under `keep: all`, and nothing else. An object
    store that does not answer keeps them until the end of the sweep.
    """
    keep, directory, path = ledger.spec.keep, ledger.get_trial_directory(record.number), None
    if record.state == "complete" and keep != "none":
        path = record.checkpoint
    elif record.state == "pruned" and keep == "all":
        path = find_newest(ledger, directory)
    with suppress(StoreUnreachableError):
        if ledger.spec.address:
            name = path and path.name
            SweepStore(ledger.spec, patience=0.0).keep_only({record.number: name})
        remove_all_but(directory, path)
    if path == record.checkpoint:
        return record
    ledger.refresh_checkpoints([record.number])
    return ledger.get_record(record.number)


def find_newest(ledger: Ledger, directory: Path) -> Path | None:
    """Return the newest complete checkpoint; on an object store, the local copy of its marker."""
    if not ledger.spec.address:
        return find_newest_checkpoint(directory)
    markers = directory.glob(f"*/{MARKER}")
    names = sort_checkpoints(f"{path.parent.name}/{MARKER}" for path in markers)
    return directory / names[0] if names else None


def select_kept_trials(ledger: Ledger, records: Sequence[TrialRecord]) -> set[int]:
    """Return the numbers of the trials whose last checkpoint stays."""
    everything = {record.number for record in records}
    if ledger.spec.keep != "front":
        return everything if ledger.spec.keep == "all" else set()
    points = pool_trials(records, ledger.spec.list_objectives())
    # Constraints may change on a finished sweep: an empty front is no reason to delete everything.
    return {number for p in points if p.is_on_front for number in p.numbers} or everything
