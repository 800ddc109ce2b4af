"""What MLflow shows of the front: ranks and tags of the trials, hypervolume, a table, a note."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.tracking.projection import Content, milliseconds
from gdpo_tune.trials import Objective, TrialRecord

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


@dataclass(frozen=True)
class FrontContent:
    """What the front adds to the runs of a sweep."""

    trials: dict[int, Content]
    """Trial number -> tag `pareto` and, if the trial is ranked, `pareto/rank` (0 = front)."""
    sweep: Content
    hypervolume: list[list[Any]]
    """Points `[name, value, ms, step]`, one for each trial that ended, by order of ending."""
    table: str
    """The front as CSV."""


def project_front(spec: SweepSpec, records: Sequence[TrialRecord]) -> FrontContent:
    """What MLflow is to show of the front of `records`: every trial so far, by number."""
    front = build_front(records, spec.objective_list())
    return FrontContent(
        trials=_trials(front),
        sweep=Content(
            tags={"mlflow.note.content": _note(spec, front)},
            values={"pareto/size": len(front.members)} if front.configurations else {},
        ),
        hypervolume=_hypervolume(front),
        table=front_table(front),
    )


def _trials(front: Front) -> dict[int, Content]:
    ranks = {number: c.rank for c in front.configurations for number in c.numbers}
    contents: dict[int, Content] = {}
    for record in front.records:
        rank = ranks.get(record.number, -1)
        values = {"pareto/rank": float(rank)} if rank >= 0 else {}
        tags = {"pareto": "true" if rank == 0 else "false"}
        contents[record.number] = Content(tags=tags, values=values)
    return contents


def _hypervolume(front: Front) -> list[list[Any]]:
    finished = {record.number: record.finished or 0.0 for record in front.records}
    return [
        ["hypervolume", point.hypervolume, milliseconds(finished[point.number]), step]
        for step, point in enumerate(front.hypervolume_over_trials)
    ]


def front_table(front: Front) -> str:
    """The front as CSV, one configuration a row, best in the first objective first."""
    goals: tuple[Objective, ...] = front.objectives
    measured = [f"{goal.name}{suffix}" for goal in goals for suffix in ("", "_se")]
    params = sorted({name for member in front.members for name in member.params})
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["trial", *measured, "seeds", "probability", "role", *params])
    for member in front.members:
        estimates = [member.mean[goal.name] for goal in goals]
        numbers = [f"{x:.4f}" for estimate in estimates for x in (estimate.mean, estimate.se)]
        about = [member.seeds, f"{member.probability:.3f}", member.role]
        settings = [member.params.get(name, "") for name in params]
        writer.writerow([member.first, *numbers, *about, *settings])
    return file.getvalue()


def _interval(front: Front) -> str:
    if not front.members:
        return ""
    where = front.hypervolume_interval
    return f" (95 %: {where.low:.4f} to {where.high:.4f})"


def _note(spec: SweepSpec, front: Front) -> str:
    """Description of the parent run, in Markdown."""
    goals = ", ".join(f"{goal.direction} `{goal.name}`" for goal in front.objectives)
    states = [record.state for record in front.records]
    return (
        f"Sweep **{spec.name}**: task `{spec.task}`, policy `{spec.policy}`; {goals}.\n\n"
        f"{states.count('complete')} trials complete, {states.count('failed')} failed; "
        f"{len(front.members)} configurations on the front, "
        f"hypervolume {front.hypervolume:.4f}{_interval(front)}.\n\n"
        "The trials are the children of this run: filter by `tags.pareto = 'true'`, sort by "
        "`metrics.pareto/rank`. Artifacts: `report.html`, `front.png`, `front.csv`, `spec.yaml`.\n"
    )
