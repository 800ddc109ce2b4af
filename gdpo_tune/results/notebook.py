"""Sweep in a notebook: tables of trials and front, figures, and the Optuna study.

    from gdpo_tune import load_sweep

    sweep = load_sweep("runs/code")
    sweep.trials        # pandas DataFrame, one row per trial
    sweep.figure("pairs")

It only reads the ledger, so it works beside a running sweep. Load again to see new trials. Only
`sweep.steer` changes the sweep, if it runs: `sweep.steer.request("stop", {"trial": 7})`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pandas as pd

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.text import abbreviate_parameter, format_count, join_names, suggest
from gdpo_tune.core.trials import format_parts
from gdpo_tune.results import front_table
from gdpo_tune.results.comparison_report import ComparisonReport, compare_modes, compare_sweeps
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.picks import PickedCandidate, parse_pick, pick_trial
from gdpo_tune.results.steering import Steering
from gdpo_tune.results.wording import REPORT_FILE, describe_last_session, describe_states

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from optuna import Study


Gallery = Mapping[str, "Callable[[], go.Figure]"]
"""Name of a figure -> function that draws it."""
MAX_ROWS = 8
"""Members of the front that the table shows, unless more stand out."""


class LoadedSweep:
    """State of a sweep at the time of loading."""

    def __init__(self, sweep: Sweep, draw: Callable[[Sweep], Gallery]) -> None:
        self.spec = sweep.spec
        """Specification of the sweep."""
        self.records = sweep.records
        """All trials of the ledger."""
        self._sweep = sweep
        self._draw = draw

    def __repr__(self) -> str:
        return (
            f"<sweep {self.spec.name}: {len(self.records)} trials, "
            f"{len(self.analysis.members)} configurations on the front>"
        )

    def _repr_html_(self) -> str:
        spec, front = self.spec, self.analysis
        state = describe_last_session(self._sweep.sessions)
        complete, others = describe_states(front.records)
        counts = ", ".join(filter(None, [f"{format_count(complete, 'trial')} complete", others]))
        rows = front_table.list_rows(front, MAX_ROWS)
        names = [abbreviate_parameter(goal.name) for goal in front.objectives]
        cells: list[dict[str, str]] = []
        for row in rows:
            values = (text.replace(" ", "\N{NO-BREAK SPACE}") for text in row.cells)
            cells.append(
                {
                    "configuration": row.title,
                    **dict(zip(names, values, strict=True)),
                    "seeds": str(row.policy.seeds),
                    "on the front": "yes" if row.policy.is_on_front else "no",
                    "remarks": ", ".join(row.remarks),
                }
            )
        table = pd.DataFrame(cells)
        hidden = len(front.members) - sum(row.policy.is_on_front for row in rows)
        more = f"<p>{format_count(hidden, 'more configuration')} on the front: see "
        report = spec.directory / REPORT_FILE
        link = f"No report yet: <code>python -m gdpo_tune.report {escape(spec.location)}</code>"
        if report.exists():
            address = quote(os.path.relpath(report))
            link = f'<a href="{address}" target="_blank">{REPORT_FILE}</a>'
        parts = [
            f"<p><b>{escape(spec.name)}</b>{escape(f': {state}' if state else '')}<br>",
            f"{escape(counts)}<br>{escape(front_table.describe_front(front))}</p>",
            table.to_html(index=False, border=0) if len(table) else "",
            f"{more}<code>.front</code></p>" if hidden else "",
            f"<p>{link}</p>",
        ]
        return "".join(parts)

    @cached_property
    def analysis(self) -> Front:
        """Front with its intervals, knee and extremes, as in the report."""
        return self._sweep.front

    @cached_property
    def trials(self) -> pd.DataFrame:
        """Table with one row per trial, by number.

        Columns: `name`, `role`, `state`, `seed`, `replicate_of`, `parts`, `feasible`, `on_front`,
        `reason`, `seconds`, `cpu_seconds`, `completions`, `evaluation_completions`, `started` and
        `finished` (UTC without a zone); `param/<name>`; `test/<metric>`, `validation/<metric>` and
        `..._se`, their standard errors. An unknown value is missing, and so are parameters without
        effect and those of a trial that trained nothing: the untrained policy, checkpoints, merges.
        """
        members = {number for member in self.analysis.members for number in member.numbers}
        drop_inactive = self.spec.space.drop_inactive
        rows: list[dict[str, Any]] = []
        for record in self.records:
            row: dict[str, Any] = {
                "number": record.number,
                "name": record.name,
                "role": record.role,
                "state": record.state,
                "seed": record.seed,
                "replicate_of": record.replicate_of,
                "parts": format_parts(record.parts) if record.parts else None,
                "feasible": record.feasible,
                "on_front": record.number in members,
                "reason": record.reason,
                "seconds": record.cost.seconds,
                "cpu_seconds": record.cost.cpu_seconds,
                "completions": record.cost.completions,
                "evaluation_completions": record.cost.evaluation_completions,
                "started": record.started,
                "finished": record.finished,
                **{f"param/{name}": v for name, v in drop_inactive(record.trained_params).items()},
            }
            for split, found in (("test", record.test), ("validation", record.validation)):
                row |= {f"{split}/{name}": estimate.mean for name, estimate in found.items()}
                row |= {f"{split}/{name}_se": estimate.se for name, estimate in found.items()}
            rows.append(row)
        table = _build_table(rows, "number")
        for name in {"started", "finished"} & {*table}:  # Excel takes no time zone
            table[name] = pd.to_datetime(table[name], unit="s")
        return table

    @cached_property
    def front(self) -> pd.DataFrame:
        """Table with one row per configuration on the front, best in the first objective first.

        Columns: `name`, `role`, `parts` (of a checkpoint or merge), `trials` (numbers), `seeds`,
        `probability` of a place on the front, `picked_as`, `worse_than_baselines`;
        `param/<name>`; `<objective>` and `<objective>_se`, means over seeds on test prompts.
        """
        return _build_table(front_table.list_front_facts(self.analysis), "trial")

    @cached_property
    def effects(self) -> pd.DataFrame:
        """Table with one row per question and objective: what each dimension changes.

        Columns: `dimension`, `before`, `after`, `objective`, `value`, `low`, `high`, `told_apart`,
        `more` trainings to `step` that would tell, and their `completions`.
        """
        found = self._sweep.effects
        rows = [
            {
                **{k: v for k, v in contrast._asdict().items() if k not in ("interval", "more")},
                **contrast.interval._asdict(),
                "told_apart": contrast.is_told_apart,
                "step": found.step,
                "more": contrast.more,
                "completions": contrast.more * found.completions,
            }
            for contrast in found.contrasts
        ]
        return pd.DataFrame(rows)

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures for which this sweep has data."""
        return tuple(self._gallery)

    def figure(self, name: str) -> go.Figure:
        """Draw a figure of the report, to show or to change; a UsageError names those there are."""
        if name not in self._gallery:
            guess = suggest(name, self._gallery)
            raise UsageError(f"figure {name!r}: {guess}this sweep has {join_names(self._gallery)}")
        return self._gallery[name]()

    def pick(self, text: str) -> PickedCandidate:
        """Pick a candidate as `--pick` does: `knee`, `merge-27`; or raise a PickError."""
        return pick_trial(self._sweep, parse_pick(text))

    def compare(self, other: LoadedSweep) -> ComparisonReport:
        """Compare this sweep with another one; see `results.comparison_report`."""
        return compare_sweeps(self._sweep, other._sweep)

    def compare_modes(self, first: str, second: str) -> ComparisonReport:
        """Compare two normalization modes of this sweep; see `results.comparison_report`."""
        return compare_modes(self._sweep, first, second)

    @cached_property
    def steer(self) -> Steering:
        """Requests to the sweep while it runs, see `Steering`."""
        return Steering(self.spec.location)

    @cached_property
    def study(self) -> Study:
        """Copy of the Optuna study in memory, for `optuna.visualization`.

        Its values are the objectives on validation prompts, as the sampler sees them. It has the
        trainings alone, since Optuna looks at parameters that all of its trials have; the user
        attribute `trial` is the number here.
        """
        from gdpo_tune.ledger import Ledger
        from gdpo_tune.ledger.opening import copy_study

        with Ledger.open(self.spec, read_only=True) as ledger:
            return copy_study(ledger.study)

    @cached_property
    def _gallery(self) -> Gallery:
        return self._draw(self._sweep)


def _build_table(rows: Sequence[Mapping[str, Any]], index: str) -> pd.DataFrame:
    """Return `rows` by `index`; flags and whole numbers have dtypes that take missing values."""
    if not rows:
        return pd.DataFrame()
    table = pd.DataFrame(rows).set_index(index)
    for name in table:
        kinds = {type(row[name]) for row in rows if row.get(name) is not None}
        if kinds == {bool} or name == "feasible":
            table[name] = table[name].astype("boolean")
        elif kinds == {int} or name == "replicate_of":
            table[name] = table[name].astype("Int64")
    return table
