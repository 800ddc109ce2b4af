"""Schedulers on Branin-Currin with a fidelity, compared by the hypervolume of finished trials.

    python benchmarks/search/schedulers.py [--seeds 40] [--processes 2] [--out DIRECTORY] [--small]

The budget is 30 full trials, 4 in flight, rungs at 1/27, 1/9 and 1/3 of a trial, reduction factor
3. The hypervolume is that of trials that used their full budget. `random + ...` compares
schedulers alone, `tpe + ...` sampler and scheduler together. P(continue) counts at every rung from
its third trial on. DIRECTORY/sweeps.jsonl keeps finished sweeps; DIRECTORY also gets `table.md` and
`schedulers.png`. The last line is JSON.
"""

from __future__ import annotations

from comparison import Plan, compare, parse_arguments, print_figures

FULL = Plan(
    "schedulers",
    problems=["branin_currin"],
    contestants=[
        "gdpo_tune random",
        "gdpo_tune random + asha",
        "gdpo_tune random + asha promote",
        "gdpo_tune auto",
        "gdpo_tune tpe + asha",
        "optuna random",
        "optuna tpe",
        "ray optunasearch",
        "ray optunasearch + asha",
        "syne-tune moasha",
    ],
    budget=30,
    seeds=40,
)
SMALL = Plan(
    "schedulers",
    problems=["branin_currin"],
    contestants=["gdpo_tune random", "gdpo_tune random + asha", "gdpo_tune random + asha promote"],
    budget=9,
    seeds=2,
)


if __name__ == "__main__":
    print_figures(compare(parse_arguments(__doc__ or "", FULL, SMALL))[1])
