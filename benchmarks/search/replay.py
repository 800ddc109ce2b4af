"""Simulated sweeps of word problems on replayed real learning curves.

    python benchmarks/search/replay.py [--seeds 30] [--processes 2] [--out DIRECTORY] [--small]

The table `curves_math.parquet` holds trainings of the embedded policy; `problems.py` describes how
trials are replayed from it. The budget is 30 full trials, 4 in flight, and every trial trains to
its end. In `math` trials are measured after 20 of 60 steps and at their ends, which alone are
candidates of the front. In `math_checkpoints` they are measured after 20 to 60 steps. Each
measurement is paid for, and checkpoints there are candidates too. `reaches random and TPE at` is
the share of the budget at which the median hypervolume reaches the final one of random search and
of Optuna's TPE. DIRECTORY/sweeps.jsonl keeps finished sweeps; DIRECTORY also gets `table.md` and
`replay.png`. The last line is JSON.
"""

from __future__ import annotations

from comparison import Plan, compare, parse_arguments, print_figures

FULL = Plan(
    "replay",
    problems=["math", "math_checkpoints"],
    contestants=[
        "gdpo_tune auto",
        "gdpo_tune tpe",
        "optuna random",
        "optuna tpe",
        "optuna nsga2",
        "optuna gp",
        "botorch qnehvi",
        "ray optunasearch",
    ],
    budget=30,
    seeds=30,
)
SMALL = Plan(
    "replay",
    problems=["math"],  # the surrogates of the other take a minute
    contestants=["gdpo_tune auto", "optuna random"],
    budget=3,
    seeds=1,
)


if __name__ == "__main__":
    print_figures(compare(parse_arguments(__doc__ or "", FULL, SMALL))[1])
