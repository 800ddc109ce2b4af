"""Tables of simulated sweeps, and their figures for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from measures import Share, compute_median, evaluate_at_budgets, find_budget_to_reach

if TYPE_CHECKING:
    from comparison import Sweep

NOTHING = "\N{EM DASH}"


@dataclass(frozen=True)
class Row:
    """Figures of one contestant on one problem, over its seeds."""

    problem: str
    contestant: str
    seeds: int
    median: float
    """Median hypervolume at the whole budget."""
    low: float
    high: float
    mean: float
    deviation: float
    """Standard deviation over seeds."""
    at_third: float
    """Median hypervolume at a third of the budget."""
    at_half: float
    to_reach: float | None
    """Share of the budget at which the median reaches the final ones of all `TO_REACH`.

    None if it never does, or for a contestant of `TO_REACH`."""
    started: float
    complete: float
    model_share: float | None
    front_continues: float | None
    worst_third_continues: float | None
    usual_ask: float
    slowest_ask: float


TO_REACH = ("optuna random", "optuna tpe")
"""Contestants whose final hypervolume the others should reach with less budget."""


def build_rows(sweeps: Sequence[Sweep], budget: int) -> Iterator[Row]:
    """Yield a row for each problem and contestant, problem by problem."""
    for problem in dict.fromkeys(sweep.problem for sweep in sweeps):
        own = [sweep for sweep in sweeps if sweep.problem == problem]
        names = list(dict.fromkeys(sweep.contestant for sweep in own))
        groups = {name: [sweep for sweep in own if sweep.contestant == name] for name in names}
        goals = [_compute_final(groups[name], budget) for name in TO_REACH if name in groups]
        for name, group in groups.items():
            yield _build_row(group, budget, None if name in TO_REACH else max(goals, default=None))


def _compute_final(sweeps: Sequence[Sweep], budget: int) -> float:
    return float(np.median([evaluate_at_budgets(sweep.steps, [budget])[0] for sweep in sweeps]))


def _build_row(sweeps: Sequence[Sweep], budget: int, goal: float | None) -> Row:
    values = np.array(
        [evaluate_at_budgets(sweep.steps, [budget / 3, budget / 2, budget]) for sweep in sweeps]
    )
    final = compute_median(values)
    enough = (
        None
        if goal is None
        else find_budget_to_reach([sweep.steps for sweep in sweeps], goal, budget)
    )
    shares = [sweep.model_share for sweep in sweeps if sweep.model_share is not None]
    return Row(
        problem=sweeps[0].problem,
        contestant=sweeps[0].contestant,
        seeds=len(sweeps),
        median=float(final.value[2]),
        low=float(final.low[2]),
        high=float(final.high[2]),
        mean=float(values[:, 2].mean()),
        deviation=float(values[:, 2].std(ddof=1)) if len(sweeps) > 1 else 0.0,
        at_third=float(final.value[0]),
        at_half=float(final.value[1]),
        to_reach=None if enough is None else enough / budget,
        started=float(np.mean([sweep.started for sweep in sweeps])),
        complete=float(np.mean([sweep.complete for sweep in sweeps])),
        model_share=float(np.mean(shares)) if shares else None,
        front_continues=_pool_share(sweeps, "front"),
        worst_third_continues=_pool_share(sweeps, "worst third"),
        usual_ask=float(np.median([sweep.usual_ask for sweep in sweeps])),
        slowest_ask=max(sweep.slowest_ask for sweep in sweeps),
    )


def _pool_share(sweeps: Sequence[Sweep], standing: str) -> float | None:
    shares = [sweep.continued[standing] for sweep in sweeps]
    pooled = Share(sum(share.hits for share in shares), sum(share.of for share in shares))
    return pooled.value if pooled.of else None


def render_markdown(sweeps: Sequence[Sweep], budget: int) -> str:
    """Render a table for each problem."""
    rows = list(build_rows(sweeps, budget))
    tables = [
        _render_table([row for row in rows if row.problem == problem], budget)
        for problem in dict.fromkeys(row.problem for row in rows)
    ]
    return "\n".join(tables)


def build_figures(sweeps: Sequence[Sweep], budget: int) -> list[dict[str, Any]]:
    """Build the rows for JSON."""
    return [
        {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
        for row in build_rows(sweeps, budget)
    ]


def _render_table(rows: Sequence[Row], budget: int) -> str:
    lines = [
        f"### {rows[0].problem}, budget of {budget} full trials",
        "",
        "| | hypervolume, median [95 %] | mean ± sd | at a third | at half | "
        "reaches random and TPE at | trials: complete of started | from the model | "
        "P(continue): front, worst third | "
        "ask: median, slowest (s) | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row.contestant,
            f"{row.median:.3f} [{row.low:.3f}, {row.high:.3f}]",
            f"{row.mean:.3f} ± {row.deviation:.3f}",
            f"{row.at_third:.3f}",
            f"{row.at_half:.3f}",
            _format_share(row.to_reach),
            f"{row.complete:.0f} of {row.started:.0f}",
            _format_share(row.model_share),
            f"{_format_share(row.front_continues)}, {_format_share(row.worst_third_continues)}",
            f"{row.usual_ask:.3f}, {row.slowest_ask:.2f}",
            str(row.seeds),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _format_share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"
