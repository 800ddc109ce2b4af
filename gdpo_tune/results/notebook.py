"""A sweep in a notebook: its trials and its front as tables, its figures, and its Optuna study.

    from gdpo_tune import load_sweep

    sweep = load_sweep("runs/code")
    sweep.trials        # pandas DataFrame, one row a trial
    sweep.figure("pairs")

The ledger is only read, so this works beside a running sweep; load again to see what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import Estimate, TrialRecord
from gdpo_tune.results.compare import Compared, compare_modes, compare_sweeps
from gdpo_tune.results.open_sweep import Sweep, find_sweep
from gdpo_tune.results.pick_language import parse
from gdpo_tune.results.picking import PickedTrial, choose
from gdpo_tune.spec.problems import did_you_mean, one_of

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from optuna import Study

    from gdpo_tune.spec import SweepSpec

Gallery = Mapping[str, "Callable[[], go.Figure]"]
"""Name of a figure -> function that draws it."""


class LoadedSweep:
    """A sweep as it was when it was loaded."""

    def __init__(self, sweep: Sweep, draw: Callable[[SweepSpec, Front], Gallery]) -> None:
        self._sweep = sweep
        self._draw = draw

    def __repr__(self) -> str:
        return (
            f"<sweep {self.spec.name}: {len(self.records)} trials, "
            f"{len(self.analysis.members)} configurations on the front>"
        )

    @property
    def spec(self) -> SweepSpec:
        """What was asked."""
        return self._sweep.spec

    @property
    def records(self) -> Sequence[TrialRecord]:
        """Every trial as the ledger has it."""
        return self._sweep.records

    @cached_property
    def analysis(self) -> Front:
        """The front with its intervals, knee and extremes, as the report is drawn from it."""
        return self._sweep.front()

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row a trial, by number.

        Columns: `role`, `state`, `seed`, `replicate_of`, `feasible`, `on_front`, `reason`,
        `seconds`, `cpu_seconds`, `completions`, `started` and `finished` (UTC); `param/<name>`;
        `test/<metric>`, `validation/<metric>` and `..._se`, their standard errors. What is not
        known is missing.
        """
        members = {number for member in self.analysis.members for number in member.numbers}
        rows = [_trial_row(record, record.number in members) for record in self.records]
        table = pd.DataFrame(rows)
        if rows:
            for name in ("started", "finished"):
                table[name] = pd.to_datetime(table[name], unit="s", utc=True)
            table = table.set_index("number")
        return table

    @cached_property
    def front(self) -> pd.DataFrame:
        """One row a configuration on the front, best in the first objective first.

        Columns: `trials` (numbers), `seeds`, `probability` of a place on the front, `picked_as`;
        `param/<name>`; `<objective>` and `<objective>_se`, means over seeds on test prompts.
        """
        rows = [
            {
                "trial": member.first,
                "trials": member.numbers,
                "seeds": member.seeds,
                "probability": member.probability,
                "picked_as": ", ".join(self.analysis.picked_as(member)),
                **{f"param/{name}": value for name, value in member.params.items()},
                **_estimates("", {goal: member.mean[goal] for goal in self.spec.objectives}),
            }
            for member in self.analysis.members
        ]
        table = pd.DataFrame(rows)
        return table.set_index("trial") if rows else table

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures that this sweep has data for."""
        return tuple(self._drawers)

    def figure(self, name: str) -> go.Figure:
        """A figure of the report, to be shown or changed.

        Raises:
            UsageError: there is no such figure, or this sweep has no data for it.
        """
        if name not in self._drawers:
            raise UsageError(
                f"figure {name!r}: {did_you_mean(name, self._drawers)}"
                f"this sweep has {one_of(self._drawers)}"
            )
        return self._drawers[name]()

    def pick(self, words: str) -> PickedTrial:
        """One trial, by the words that every command knows: `knee`, `max_correctness`, ...

        Raises:
            PickError: the words cannot be read, or nothing fits them.
        """
        return choose(self.records, self.spec, parse(words))

    def compare(self, other: LoadedSweep) -> Compared:
        """This sweep against another one; `.verdict` says who is ahead, and why.

        Raises:
            UsageError: they cannot be compared.
        """
        return compare_sweeps(self._sweep, other._sweep)

    def compare_modes(self, first: str, second: str) -> Compared:
        """Two normalization modes of this sweep against each other.

        Raises:
            UsageError: there is no trial of one of them.
        """
        return compare_modes(self._sweep, first, second)

    @cached_property
    def study(self) -> Study:
        """A copy of the Optuna study in memory, for `optuna.visualization` and the like.

        Its values are the objectives on validation prompts, which is what the sampler sees.
        """
        from gdpo_tune.ledger import Ledger, copy_study

        with Ledger.open(self.spec, read_only=True) as ledger:
            return copy_study(ledger.study)

    @cached_property
    def _drawers(self) -> Gallery:
        return self._draw(self.spec, self.analysis)


def load(named: str, draw: Callable[[SweepSpec, Front], Gallery]) -> LoadedSweep:
    """A sweep, by its folder, by its name under `runs`, or by the file that it was searched with.

    Raises:
        UsageError: there is none.
    """
    return LoadedSweep(find_sweep(str(named)), draw)


def _trial_row(record: TrialRecord, on_front: bool) -> dict[str, Any]:
    return {
        "number": record.number,
        "role": record.role,
        "state": record.state,
        "seed": record.seed,
        "replicate_of": record.replicate_of,
        "feasible": record.feasible,
        "on_front": on_front,
        "reason": record.reason,
        "seconds": record.cost.seconds,
        "cpu_seconds": record.cost.cpu_seconds,
        "completions": record.cost.completions,
        "started": record.started,
        "finished": record.finished,
        **{f"param/{name}": value for name, value in record.params.items()},
        **_estimates("test/", record.test),
        **_estimates("validation/", record.validation),
    }


def _estimates(prefix: str, estimates: Mapping[str, Estimate]) -> dict[str, float]:
    means = {f"{prefix}{name}": estimate.mean for name, estimate in estimates.items()}
    return means | {f"{prefix}{name}_se": estimate.se for name, estimate in estimates.items()}
