"""Sweep in a notebook: tables of trials and front, figures, and the Optuna study.

    from gdpo_tune import load_sweep

    sweep = load_sweep("runs/code")
    sweep.trials        # pandas DataFrame, one row per trial
    sweep.figure("pairs")

It only reads the ledger, so it works beside a running sweep. Load again to see new trials. Only
`sweep.steer` changes the sweep, if it runs: `sweep.steer.request("stop", {"trial": 7})`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import Estimate, TrialRecord, format_parts
from gdpo_tune.results.comparison_report import ComparisonReport, compare_modes, compare_sweeps
from gdpo_tune.results.front_table import list_facts
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.picks import parse_pick, pick_trial
from gdpo_tune.results.published_sweep import explain_foreign_ledger
from gdpo_tune.results.steering import Steering
from gdpo_tune.results.summary import ChosenTrial, describe_last_session
from gdpo_tune.spec.problems import join_names, suggest

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from optuna import Study


Gallery = Mapping[str, "Callable[[], go.Figure]"]
"""Name of a figure -> function that draws it."""


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
        from gdpo_tune.ledger import Ledger
        from gdpo_tune.results.sweep_html import render_sweep

        with explain_foreign_ledger(self.spec.location):
            with Ledger.open(self.spec, read_only=True) as ledger:
                state = describe_last_session(ledger.get_sessions())
            return render_sweep(self.spec, self.analysis, state)

    @cached_property
    def analysis(self) -> Front:
        """Front with its intervals, knee and extremes, as in the report."""
        return self._sweep.front

    @cached_property
    def trials(self) -> pd.DataFrame:
        """Table with one row per trial, by number.

        Columns: `name`, `role`, `state`, `seed`, `replicate_of`, `parts`, `feasible`, `on_front`,
        `reason`, `seconds`, `cpu_seconds`, `completions`, `evaluation_completions`, `started` and
        `finished` (UTC); `param/<name>`; `test/<metric>`, `validation/<metric>` and `..._se`, their
        standard errors. An unknown value is missing, and so are the parameters of a trial that
        trained nothing: the untrained policy, checkpoints and merges.
        """
        members = {number for member in self.analysis.members for number in member.numbers}
        rows = [_make_row(record, record.number in members) for record in self.records]
        if not rows:
            return pd.DataFrame()
        table = pd.DataFrame(rows).set_index("number")
        for name in ("started", "finished"):
            table[name] = pd.to_datetime(table[name], unit="s", utc=True)
        return table

    @cached_property
    def front(self) -> pd.DataFrame:
        """Table with one row per configuration on the front, best in the first objective first.

        Columns: `name`, `role`, `parts` (of a checkpoint or merge), `trials` (numbers), `seeds`,
        `probability` of a place on the front, `picked_as`, `worse_than_baselines`;
        `param/<name>`; `<objective>` and `<objective>_se`, means over seeds on test prompts.
        """
        rows = list_facts(self.analysis)
        return pd.DataFrame(rows).set_index("trial") if rows else pd.DataFrame()

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures for which this sweep has data."""
        return tuple(self._gallery)

    def figure(self, name: str) -> go.Figure:
        """Draw a figure of the report, to show or to change.

        Raises:
            UsageError: there is no such figure, or this sweep has no data for it.
        """
        if name not in self._gallery:
            guess = suggest(name, self._gallery)
            raise UsageError(f"figure {name!r}: {guess}this sweep has {join_names(self._gallery)}")
        return self._gallery[name]()

    def pick(self, text: str) -> ChosenTrial:
        """Pick a candidate as `--pick` does: `knee`, `max_correctness`, `merge-27`, ...

        Raises:
            PickError: the text cannot be parsed, or nothing satisfies it.
        """
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

        Its values are the objectives on validation prompts, as the sampler sees them.
        """
        from gdpo_tune.ledger import Ledger, copy_study

        with Ledger.open(self.spec, read_only=True) as ledger:
            return copy_study(ledger.study)

    @cached_property
    def _gallery(self) -> Gallery:
        return self._draw(self._sweep)


def _make_row(record: TrialRecord, on_front: bool) -> dict[str, Any]:
    return {
        "number": record.number,
        "name": record.name,
        "role": record.role,
        "state": record.state,
        "seed": record.seed,
        "replicate_of": record.replicate_of,
        "parts": format_parts(record.parts) if record.parts else None,
        "feasible": record.feasible,
        "on_front": on_front,
        "reason": record.reason,
        "seconds": record.cost.seconds,
        "cpu_seconds": record.cost.cpu_seconds,
        "completions": record.cost.completions,
        "evaluation_completions": record.cost.evaluation_completions,
        "started": record.started,
        "finished": record.finished,
        **{f"param/{name}": value for name, value in record.trained_params.items()},
        **_make_columns("test/", record.test),
        **_make_columns("validation/", record.validation),
    }


def _make_columns(prefix: str, estimates: Mapping[str, Estimate]) -> dict[str, float]:
    means = {f"{prefix}{name}": estimate.mean for name, estimate in estimates.items()}
    return means | {f"{prefix}{name}_se": estimate.se for name, estimate in estimates.items()}
