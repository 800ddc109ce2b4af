"""What MLflow shows of the front: ranks and tags of the trials, hypervolume, a table, a note."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core.colors import INK, MODE_COLORS, OTHER_COLOR
from gdpo_tune.core.formatting import mode_of
from gdpo_tune.core.trials import Objective, TrialRecord
from gdpo_tune.tracking import views
from gdpo_tune.tracking.model_registry import final_models, policies
from gdpo_tune.tracking.run_content import Content, milliseconds

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


@dataclass(frozen=True)
class FrontContent:
    """What the front adds to the runs of a sweep."""

    trials: dict[int, Content]
    """Trial number -> tag `pareto`, its colour and, if it is ranked, `pareto/rank` (0 = front)."""
    sweep: Content
    hypervolume: list[list[Any]]
    """Points `[name, value, ms, step]`, one for each trial that ended, by order of ending."""
    table: str
    """The front as CSV."""
    models: dict[str, Any]
    """What the registry is to hold if nothing changes any more."""
    policies: dict[int, str]
    """Trial number -> where its policy is, in Markdown; for the trials in `models`."""


PALE = 0.35
"""Share of its mode's colour that a trial beside the front has; the rest is white."""


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
        models=final_models(spec.name, front),
        policies=policies(spec, front),
    )


def _trials(front: Front) -> dict[int, Content]:
    ranks = {number: c.rank for c in front.configurations for number in c.numbers}
    contents: dict[int, Content] = {}
    for record in front.records:
        rank = ranks.get(record.number, -1)
        values = {"pareto/rank": float(rank)} if rank >= 0 else {}
        tags = {
            "pareto": "true" if rank == 0 else "false",
            "mlflow.runColor": run_color(record, on_front=rank == 0),
        }
        contents[record.number] = Content(tags=tags, values=values)
    return contents


def run_color(record: TrialRecord, *, on_front: bool) -> str:
    """Colour of a trial in MLflow's charts, `#rrggbb`: its mode's, pale beside the front."""
    if record.role == "untrained":
        return INK
    color = MODE_COLORS.get(mode_of(record.params), OTHER_COLOR)
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    pale = [round(PALE * channel + (1 - PALE) * 255) for channel in channels]
    return "#" + "".join(f"{channel:02x}" for channel in (channels if on_front else pale))


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
        f"{views.links()}. These pages load {views.LOADED} trials, the front first; `report.html` "
        "among this run's artifacts shows all.\n\n"
        f"Sweep **{spec.name}**: task `{spec.task}`, policy `{spec.policy}`; {goals}.\n\n"
        f"{states.count('complete')} trials complete, {states.count('failed')} failed; "
        f"{len(front.members)} configurations on the front, "
        f"hypervolume {front.hypervolume:.4f}{_interval(front)}.\n\n"
        "The trials are the children of this run: filter by `tags.pareto = 'true'`, sort by "
        "`metrics.pareto/rank`. Artifacts: `report.html`, `front.png`, `front.csv`, `spec.yaml`.\n"
    )
