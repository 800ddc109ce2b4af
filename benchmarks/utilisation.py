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

from typing import Any

from harness import SPACES, load_space, run

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec

LIMIT = 0.80
SMALL = [
    "search.trials=2",
    "search.budget.completions=0",
    "search.replicates.max_runs=1",
    "search.merges.budget=0",
    "search.checkpoints.budget=0",
    "training.steps=10",
    "training.validation_prompts=16",
    "training.test_prompts=16",
]


def compute_figures(spec: SweepSpec) -> dict[str, Any]:
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
        "trials": len(records),
        "failed": sum(record.state == "failed" for record in records),
        "training_seconds": round(training, 1),
        "slots": [session["slots"] for session in sessions],
        "wall_seconds": round(sum(s["finished"] - s["started"] for s in sessions), 1),
        "utilisation": round(utilisation, 3),
        "limit": LIMIT,
        "ok": utilisation >= LIMIT,
    }


def measure(read: str = "", changes: list[str] = [str]):
    """Run the shipped sweep with some changes, or read a finished one in a storage directory."""
    if read:
        return compute_figures(load_spec(SPACES / "code.yaml", [f"storage={read}"]))
    from gdpo_tune.tuning.runner import run_sweep

    with load_space("code", *(changes or ())) as spec:
        run_sweep(spec)
        return compute_figures(spec)


if __name__ == "__main__":
    run(measure, {"changes": SMALL})
