"""The front in MLflow: ranks, tags, hypervolume, a table, and a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.analysis.origins import summarize_origins
from gdpo_tune.core.formatting import (
    CANDIDATE_COLORS,
    INK,
    MODE_COLORS,
    OTHER_COLOR,
    get_mode,
)
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.results.front_table import format_front_csv
from gdpo_tune.results.live import Paced
from gdpo_tune.results.summary import TABLE_FILE, describe_origins
from gdpo_tune.tracking import views
from gdpo_tune.tracking.model_versions import build_final_messages
from gdpo_tune.tracking.run_content import RUN_NAME, SWEEP, build_run_name, convert_to_milliseconds
from gdpo_tune.tracking.spool import Message, Point

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

LEAST_SECONDS = 2.0
"""Least time between two computations of the front."""
TIME_SHARE = 0.01
"""Largest share of the time for them, so that the driver rarely waits for Python's lock."""
PALE = 0.35
"""Share of its mode's colour that a trial beside the front has; the rest is white."""
BEHIND = 1000
"""`pareto/order` of a trial behind the front, times its rank."""


@dataclass(frozen=True)
class FrontProjection:
    """The front as content of runs."""

    trials: dict[int, Message]
    """Trial number -> tag `pareto`, name, colour and, if it is ranked, its rank and its place."""
    sweep: list[Message]
    final: list[Message]
    """Content for the end of the sweep: versions in the registry, and where their policies are."""


class FrontWatch:
    """Computes the front in a thread of its own. Its methods are called from the driver."""

    def __init__(self, spec: SweepSpec) -> None:
        self.is_stale = False
        """Set it to True once trials have ended."""
        self._spec = spec
        self._worker = ThreadPoolExecutor(1, "front")
        self._job: Future[FrontProjection] | None = None
        self._trials: dict[int, Message] = {}
        self._paced = Paced[FrontProjection](1 / TIME_SHARE, LEAST_SECONDS)

    def poll(
        self, records: Mapping[int, TrialRecord], *, wait: bool = False
    ) -> Iterator[FrontProjection]:
        """Yield new fronts, each with those `trials` that changed; start a computation when due.

        `wait` computes the front of exactly these `records` before returning.
        """
        yield from self._collect_result(wait=wait)
        if self.is_stale and (wait or (self._job is None and self._paced.is_due)):
            ordered = [records[number] for number in sorted(records)]
            self._job = self._worker.submit(self._project_changes, ordered)
            self.is_stale = False
            yield from self._collect_result(wait=wait)

    def _collect_result(self, *, wait: bool) -> Iterator[FrontProjection]:
        if self._job is not None and (wait or self._job.done()):
            job, self._job = self._job, None
            yield job.result()

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()

    def _project_changes(self, records: Sequence[TrialRecord]) -> FrontProjection:
        """Project the front in the worker, which saves the driver milliseconds of comparisons."""
        front = self._paced.make(lambda: project_front(self._spec, records))
        changed = {n: trial for n, trial in front.trials.items() if self._trials.get(n) != trial}
        self._trials = front.trials
        return replace(front, trials=changed)


def project_front(spec: SweepSpec, records: Sequence[TrialRecord]) -> FrontProjection:
    """Return the front of `records` as content of runs: every trial so far, by number."""
    front = build_front(records, spec.list_objectives())
    ranks = {number: c.rank for c in front.configurations for number in c.numbers}
    places = list_places(front)
    knee = front.knee.numbers if front.knee else ()
    finished = {record.number: record.finished or 0.0 for record in front.records}
    size = [["pareto/size", len(front.members), None, 0]] if front.configurations else []
    hypervolume = [
        ["hypervolume", point.hypervolume, convert_to_milliseconds(finished[point.number]), step]
        for step, point in enumerate(front.hypervolume_over_trials)
    ]
    note = {"mlflow.note.content": _format_note(spec, front)}
    table = {"name": TABLE_FILE, "text": format_front_csv(front)}
    return FrontProjection(
        trials={
            r.number: _build_trial_message(
                r, ranks.get(r.number, -1), places.get(r.number), is_knee=r.number in knee
            )
            for r in front.records
        },
        sweep=[
            {"run": SWEEP, "metrics": hypervolume},
            {"run": SWEEP, "tags": note, "metrics": [*size, *_list_origin_metrics(front)]},
            {"run": SWEEP, "artifact": table},
        ],
        final=build_final_messages(spec, front),
    )


def _list_origin_metrics(front: Front) -> list[Point]:
    """Return the share and the cost of each kind of candidates, if there are several kinds."""
    points: list[Point] = []
    for origin in summarize_origins(front):
        values = {"share": origin.share, "members": float(origin.members)}
        values |= {name: float(spent) for name, spent in asdict(origin.cost).items()}
        points += [[f"origin/{origin.kind}/{n}", value, None, 0] for n, value in values.items()]
    return points


def list_places(front: Front) -> dict[int, int]:
    """Return trial number -> place in a list: the knee 1, then the front, best first.

    Trials behind the front share the place `BEHIND` times their rank. Places of their own would
    change with every trial that ends, and each change is a request to MLflow.
    """
    members = sorted(front.members, key=lambda member: member is not front.knee)
    numbers = [number for member in members for number in member.numbers]
    places = {number: place for place, number in enumerate(numbers, start=1)}
    behind = [c for c in front.configurations if c.rank > 0]
    return places | {number: BEHIND * c.rank for c in behind for number in c.numbers}


def _build_trial_message(
    record: TrialRecord, rank: int, place: int | None, *, is_knee: bool
) -> Message:
    tags = {
        "pareto": str(rank == 0).lower(),
        "mlflow.runColor": choose_color(record, on_front=rank == 0),
        RUN_NAME: f"{build_run_name(record)}{', knee' if is_knee else ''}",
    }
    values = {"pareto/rank": rank, "pareto/order": place} if rank >= 0 else {}
    metrics = [[name, float(value), None, 0] for name, value in values.items() if value is not None]
    return {"run": str(record.number), "tags": tags, "metrics": metrics}


def choose_color(record: TrialRecord, *, on_front: bool) -> str:
    """Return the colour of a trial in MLflow's charts, `#rrggbb`: its mark's, or a pale one."""
    if record.role == "untrained":
        return INK
    color = CANDIDATE_COLORS.get(record.role) or (
        MODE_COLORS.get(get_mode(record.params), OTHER_COLOR) if record.params else OTHER_COLOR
    )
    if on_front:
        return color
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(PALE * c + (1 - PALE) * 255):02x}" for c in channels)


def _format_note(spec: SweepSpec, front: Front) -> str:
    """Return the description of the sweep's run, in Markdown."""
    goals = ", ".join(f"{goal.direction} `{goal.name}`" for goal in front.objectives)
    states = [record.state for record in front.records]
    bounds = front.hypervolume_interval
    interval = f" (95 %: {bounds.low:.4f} to {bounds.high:.4f})" if front.members else ""
    origins = "".join(f"- {line}\n" for line in describe_origins(front))
    origins += "\n" if origins else ""
    return (
        f"{views.format_links()}. These pages load {views.LOADED} trials, the front first; "
        "`report.html` among this run's artifacts shows all.\n\n"
        f"Sweep **{spec.name}**: task `{spec.task}`, policy `{spec.policy}`; {goals}.\n\n"
        f"{states.count('complete')} trials complete, {states.count('failed')} failed; "
        f"{len(front.members)} configurations on the front, "
        f"hypervolume {front.hypervolume:.4f}{interval}.\n\n{origins}"
        "The trials are the children of this run: filter by `tags.pareto = 'true'`, sort by "
        "`metrics.pareto/order`. Artifacts: `report.html`, `front.png`, `front.csv`, `spec.yaml`.\n"
    )
