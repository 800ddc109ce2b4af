"""Share of the machine's time that a sweep spends on training.

    python benchmarks/utilisation.py [--small]      run the shipped search space, then measure
    python benchmarks/utilisation.py --read runs    measure the sweep in the directory `runs`

utilisation = sum of the seconds that trials spent in `train()` / (slots x wall time of the sweep)

Wall time includes the start of Ray and of the trials' processes, imports, proposals, and the end of
the sweep, when fewer trials are left than slots. Training time includes held-out evaluation and the
time of failed trials. A killed run has no end, so its ledger cannot be measured.

The limit is that of a whole sweep; a few short trials mostly start and end.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec

SPACE = Path(__file__).resolve().parents[1] / "search_spaces" / "code.yaml"
LIMIT = 0.80
SMALL = [
    "search.trials=2",
    "search.replicates.max_runs=1",
    "search.merges.budget=0",
    "search.checkpoints.budget=0",
    "training.steps=10",
    "training.validation_prompts=16",
    "training.test_prompts=16",
]


def measure(spec: SweepSpec) -> dict[str, Any]:
    """Compute the figures from a sweep's ledger.

    Raises:
        SystemExit: a session has no end, so its wall time is unknown.
    """
    with Ledger.open(spec, read_only=True) as ledger:
        records, sessions = ledger.get_records(), ledger.get_sessions()
    if not all("finished" in session for session in sessions):
        raise SystemExit("this sweep was killed or still runs: its wall time is unknown")
    training = sum(record.cost.seconds for record in records)
    offered = sum(s["slots"] * (s["finished"] - s["started"]) for s in sessions)
    utilisation = training / offered
    return {
        "benchmark": "utilisation",
        "trials": len(records),
        "failed": sum(record.state == "failed" for record in records),
        "training_seconds": round(training, 1),
        "slots": [session["slots"] for session in sessions],
        "wall_seconds": round(sum(s["finished"] - s["started"] for s in sessions), 1),
        "utilisation": round(utilisation, 3),
    }


def main() -> None:
    """Measure the sweep and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few short trials: seconds")
    parser.add_argument("--read", metavar="STORAGE", help="measure a finished sweep")
    options = parser.parse_args()
    if options.read:
        figures = measure(load_spec(SPACE, [f"storage={options.read}"]))
    else:
        from gdpo_tune.tuning.runner import run_sweep

        with tempfile.TemporaryDirectory() as directory:
            spec = load_spec(SPACE, [f"storage={directory}", *(SMALL if options.small else [])])
            run_sweep(spec)
            figures = measure(spec)
    if not options.small:
        figures |= {"limit": LIMIT, "ok": figures["utilisation"] >= LIMIT}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
