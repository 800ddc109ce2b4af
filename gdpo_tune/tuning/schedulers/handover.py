"""How a member of a population takes over another one's training: its checkpoint, and the record.

The decision is in the ledger before. The member's `schedule.json` is written last, so that what a
kill cut short is found and done again; the donor waits until all of a generation is done.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from gdpo_tune.analysis.lineage import training_of
from gdpo_tune.core.files import write_whole
from gdpo_tune.core.trials import Exploit, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.sweep_store import SweepStore
from gdpo_tune.training.checkpoints import (
    adopt_checkpoint,
    newest_valid_checkpoint,
    remove_all_but,
)

SCHEDULE = "schedule.json"
"""In a member's folder: the one training that its policy comes from."""


def hand_over(ledger: Ledger, exploit: Exploit) -> None:
    """Make a member go on from what its donor came to.

    Where the donor's checkpoint of that step is damaged, the one before serves, or none: the
    schedule of the member says how to come to the same.

    Raises:
        DiskFullError: there is no room for the checkpoint.
    """
    if ledger.spec.address:
        store = SweepStore(ledger.spec)
        store.hand_over(exploit.donor, exploit.member)
        store.put(write_schedule(ledger, exploit.member))
        return
    source = newest_valid_checkpoint(ledger.trial_directory(exploit.donor))
    directory = ledger.trial_directory(exploit.member)
    if source is None:
        remove_all_but(directory, None)
    else:
        adopt_checkpoint(source, directory)
    write_schedule(ledger, exploit.member)


def finish(ledger: Ledger) -> None:
    """Do what was decided and then cut short."""
    for record in ledger.records():
        if is_cut_short(ledger, record):
            hand_over(ledger, record.lineage[-1])


def is_cut_short(ledger: Ledger, record: TrialRecord) -> bool:
    """Whether a member that took over has not yet got what it goes on from."""
    if record.state != "paused" or not record.lineage:
        return False
    if record.rungs[-1].step > record.lineage[-1].step:
        return False  # it has gone on since
    file = ledger.trial_directory(record.number) / SCHEDULE
    return not file.exists() or file.read_text(encoding="utf-8") != content(ledger, record.number)


def write_schedule(ledger: Ledger, number: int) -> Path:
    """Write what a member's policy comes from; return the file."""
    directory = ledger.trial_directory(number)
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / SCHEDULE, content(ledger, number))
    return directory / SCHEDULE


def content(ledger: Ledger, number: int) -> str:
    """The training as JSON, and from whom each part of it was taken over."""
    records = ledger.records()
    training = training_of(records, number)
    lineage = [{"step": e.step, "donor": e.donor} for e in records[number].lineage]
    return json.dumps({"trial": number, **asdict(training), "lineage": lineage}, indent=1)
