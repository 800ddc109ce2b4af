"""Checkpoints that stay on disk once a trial, or a sweep, has ended (`keep:`).

A trial leaves its last checkpoint, and those before it that may be on the front. While the sweep
runs these are at most as many, over all trials, as `search.checkpoints.budget` has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gdpo_tune.analysis.merge_choice import rank_checkpoints
from gdpo_tune.analysis.replicates import pool_trials
from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.http import OUTAGE_SECONDS
from gdpo_tune.core.trial_files import MARKER, sort_checkpoints
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.sweep_store import SweepStore
from gdpo_tune.spec import SweepSpec
from gdpo_tune.training.checkpoints import drop_optimizer, find_newest_checkpoint, remove_all_but
from gdpo_tune.tuning.plan import is_asked_merge
from gdpo_tune.tuning.survivors import choose_survivors, is_wide_rung_measured, list_levels

MOST_KEPT = 2
"""Evaluated checkpoints before its end that a trial keeps."""


def delete_unkept_checkpoints(ledger: Ledger) -> None:
    """Delete the checkpoints of finished trials that `keep:` does not name.

    Pruned trials keep their newest one under `keep: all`. A merge that a person asked for stays,
    and keeps the policies of its parts, as does one on the front.
    """
    records = [r for r in ledger.get_records() if not r.is_open]
    kept = select_kept_trials(ledger, records)
    parts = {part for record in records if record.number in kept for part in record.parts}
    paths: dict[int, set[Path]] = {}
    for record in records:
        checkpoint = record.checkpoint
        if record.state == "pruned":
            checkpoint = find_newest(ledger, ledger.get_trial_directory(record.number))
        is_kept = record.number in kept or record.role == "start"  # trials begin at it
        paths[record.number] = {checkpoint} if checkpoint and is_kept else set()
    for part in parts:
        paths[part.trial].add(ledger.get_checkpoint(part.trial, part.step))
    _keep_only(ledger, paths)
    ledger.refresh_checkpoints([record.number for record in records])


def trim_ended_trial(ledger: Ledger, record: TrialRecord) -> TrialRecord:
    """Delete the checkpoints that no later decision needs of a trial that has ended; return it.

    The last checkpoint of a complete trial stays: until the end of the sweep, the trial may join
    the front. An object store that does not answer keeps all until then.
    """
    keep, directory = ledger.spec.keep, ledger.get_trial_directory(record.number)
    paths: dict[int, set[Path]] = {record.number: set()}
    if record.state == "complete" and (keep != "none" or record.role == "start"):
        paths = _select_promising(ledger, record)
    elif record.state == "pruned" and keep == "all":
        newest = find_newest(ledger, directory)
        paths[record.number] = {newest} if newest else set()
    with suppress(StoreUnreachableError):
        _keep_only(ledger, paths, patience=0.0)
    ledger.refresh_checkpoints(list(paths))
    return ledger.get_record(record.number)


def list_kept_steps(
    spec: SweepSpec, records: Sequence[TrialRecord], record: TrialRecord
) -> tuple[int, ...]:
    """Return the steps before the end whose checkpoints a trial keeps while it runs.

    A search trial keeps the last `MOST_KEPT` at which it is evaluated, and a replicate those that a
    fresh seed of a candidate needs.
    """
    if not spec.has_candidates:
        return ()
    if record.role == "search":
        end, every, levels = spec.training.steps, spec.training.evaluate_every, ()
        if not spec.search.checkpoints.budget:
            return ()
        if spec.search.is_divided:
            if not is_wide_rung_measured(spec, records):
                return ()
            end = choose_survivors(spec, records).end
            levels = list_levels(spec, records, end)[1:-1]
        # to choose from: earlier ones are seldom on the front
        return tuple(sorted({*levels, *range(every, end, every)})[-MOST_KEPT:])
    if record.replicate_of is None or record.parts:
        return ()
    parts = (part for other in records for part in other.parts)
    # a configuration may have been trained under several numbers
    steps = {part.step for part in parts if records[part.trial].params == record.params}
    return tuple(sorted(step for step in steps if step < spec.training.steps))


def _select_promising(ledger: Ledger, ended: TrialRecord) -> dict[int, set[Path]]:
    """Return the checkpoints that stay of `ended`, and of each trial that now keeps fewer.

    Before the end these are the first in `rank_checkpoints`, as many as the budget has left, and
    those of candidates and replicates; of a divided budget, all.
    """
    records, spec = ledger.get_records(), ledger.spec
    evaluated = [part for record in records for part in record.parts]
    for _, effect in ledger.steering.list_waiting(records):
        evaluated += effect.parts  # its merge starts once a slot is free
    spent = sum(record.role == "checkpoint" for record in records)
    ranked = rank_checkpoints(records, spec.list_objectives(), spec.meets_constraints)
    waiting = [part for part in ranked if part not in evaluated]
    left = max(0, spec.search.checkpoints.budget - spent)
    promising = {(part.trial, part.step) for part in (*waiting[:left], *evaluated)}
    paths: dict[int, set[Path]] = {}
    for record in records:
        steps = record.kept_steps
        # of a divided budget few trainings have many merges, and their rungs are parents of some
        if record.replicate_of is None and not spec.search.is_divided:
            steps = tuple(step for step in steps if (record.number, step) in promising)
        if record.number == ended.number or steps != record.kept_steps:
            kept = {ledger.get_checkpoint(record.number, step) for step in steps}
            paths[record.number] = kept | ({record.checkpoint} if record.checkpoint else set())
    return paths


def _keep_only(
    ledger: Ledger, paths: Mapping[int, set[Path]], patience: float = OUTAGE_SECONDS
) -> None:
    """Delete all checkpoints of these trials but the given ones, in the store too.

    Raises:
        StoreUnreachableError: the object store does not answer; nothing is deleted on disk.
    """
    if ledger.spec.address:
        names = {number: {path.name for path in kept} for number, kept in paths.items()}
        SweepStore(ledger.spec, patience=patience).prune_checkpoints(names)
    for number, kept in paths.items():
        remove_all_but(ledger.get_trial_directory(number), *kept)
        record = ledger.get_record(number)
        for path in kept - {record.checkpoint} if record.state == "complete" else ():
            drop_optimizer(path)


def find_newest(ledger: Ledger, directory: Path) -> Path | None:
    """Return the newest complete checkpoint; on an object store, the local copy of its marker."""
    if not ledger.spec.address:
        return find_newest_checkpoint(directory)
    markers = directory.glob(f"*/{MARKER}")
    names = sort_checkpoints(f"{path.parent.name}/{MARKER}" for path in markers)
    return directory / names[0] if names else None


def select_kept_trials(ledger: Ledger, records: Sequence[TrialRecord]) -> set[int]:
    """Return the numbers of the trials whose last checkpoint stays at the end."""
    everything = {record.number for record in records}
    if ledger.spec.keep != "front":
        return everything if ledger.spec.keep == "all" else set()
    points = pool_trials(records, ledger.spec.list_objectives())
    # Constraints may change on a finished sweep: an empty front is no reason to delete everything.
    front = {number for p in points if p.is_on_front for number in p.numbers} or everything
    return front | {record.number for record in records if is_asked_merge(record)}
