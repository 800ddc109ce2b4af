"""Record of a sweep for others: from it `load_sweep("hf://...")` reads the same front.

    sweep/spec.yaml                the resolved file, without what is about the author's machine
          ledger.journal           the ledger's records
          trials/<number>/steps.jsonl    metrics of training, thinned as for MLflow

Numbers are those of the sweep, bit for bit. Prompts, completions and policies stay behind; what of
the texts leaves is in `results.public_record`.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from gdpo_tune.core.addresses import RECORD
from gdpo_tune.core.object_store import JOURNAL, SPEC
from gdpo_tune.core.trial_files import STEPS_FILE, is_kept, read_steps
from gdpo_tune.ledger.opening import open_for_reading
from gdpo_tune.ledger.trial_encoding import TRIALS
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.public_record import PublicFilter
from gdpo_tune.spec import load_spec


def build_record(sweep: Sweep) -> dict[str, bytes]:
    """Return the files of a sweep's record: path in a repository -> content."""
    # Without the changes of requests, which are in the ledger.
    assert sweep.file is not None, "it was read"
    name = sweep.file.parent.name
    public = PublicFilter(load_spec(sweep.file, [sweep.storage_override], name, to_run=False))
    journal = open_for_reading(sweep.spec)
    try:
        selected = map(public.select_record, journal.read_logs(0))
        lines = [json.dumps(r, separators=(",", ":")) + "\n" for r in selected if r is not None]
    finally:
        journal.close()
    files = {SPEC: public.spec.dump_yaml().encode(), JOURNAL: "".join(lines).encode()}
    for record in sweep.records:
        steps = read_steps(record.directory) if record.is_training and record.directory else []
        kept = (
            {"step": m.step, "metrics": public.select(m.metrics), "cost": asdict(m.cost)}
            for m in steps
            if is_kept(m.step, steps[-1].step)
        )
        if text := "".join(f"{json.dumps(step)}\n" for step in kept):
            files[f"{TRIALS}/{record.number}/{STEPS_FILE}"] = text.encode()
    return {f"{RECORD}/{name}": content for name, content in files.items()}
