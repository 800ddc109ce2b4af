"""Simulated sweeps of word problems on replayed real learning curves.

    python experiments/search/replay.py [--seeds 30] [--processes 2] [--out DIRECTORY] [--small]

docs/search.md has its figures: commits ebb4ed6f (`math`) and 25250bcc (`math_checkpoints`) of
2026-11-22 and 23, on `curves_math.parquet`.

`problems.py` describes how trials are replayed from the table. The budget is 30 full trials, 4 in
flight, and every trial trains to its end. In `math` trials are measured after 20 of 60 steps and at
their ends, which alone are candidates of the front. In `math_checkpoints` they are measured after
20 to 60 steps; measurements are paid for, and checkpoints are candidates too. DIRECTORY keeps
finished sweeps in `sweeps.jsonl`, and gets `table.md`. The last line is JSON.
"""

from __future__ import annotations

import json

from comparison import Plan, compare, parse_arguments

PEERS = (*(f"optuna {name}" for name in ("random", "tpe", "nsga2", "gp")), "botorch qnehvi")
NAMES = ["gdpo_tune auto", "gdpo_tune tpe", *PEERS, "ray optunasearch"]
FULL = Plan("replay", ["math", "math_checkpoints"], NAMES, budget=30, seeds=30)
# The surrogates of the other problem take a minute.
SMALL = Plan("replay", ["math"], ["gdpo_tune auto", "optuna random"], budget=3, seeds=1)


if __name__ == "__main__":
    print(json.dumps(compare(parse_arguments(__doc__ or "", FULL, SMALL))))
