"""Content of the live page as JSON, made again only after a change.

Times are Unix seconds, which the page turns into durations: so the content of a sweep in which
nothing happens stays the same, and nothing is sent or drawn again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from shlex import quote
from typing import Any

from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.events import Outlook, RecordedRequest, Request
from gdpo_tune.core.metrics import HOUR
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_count,
    format_duration,
    format_estimate,
    format_number,
    format_parameter,
    get_mode,
)
from gdpo_tune.core.trial_files import REWARDS, is_kept
from gdpo_tune.core.trials import Measurement, Objective, TrialRecord, title_candidate
from gdpo_tune.figures import style
from gdpo_tune.figures.front_plotly import draw_pairs
from gdpo_tune.figures.layout import make_layout
from gdpo_tune.figures.trial_curves import list_rewards
from gdpo_tune.ledger.budget import compute_hours, compute_spending
from gdpo_tune.results.live import RateLimited, estimate_seconds_left, measure_work
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.steering import Steering
from gdpo_tune.results.wording import describe_role, describe_states, list_incidents, name_state
from gdpo_tune.spec import SweepSpec
from gdpo_tune.web.live_sweep import LiveSweep, Planner, Snapshot

MAX_ENDED, MAX_RUNNING, MAX_LOG, MAX_REQUESTS = 200, 100, 200, 30
"""Most rows that the page lists, the latest; the report has all trials."""
MAX_CURVES = 12
"""Most running trials that are drawn, the latest."""
SILENCE = 600.0
"""Seconds without news after which a driver on another machine counts as silent."""
BUDGET_UNITS = {
    "trials": "trainings",
    "completions": "completions",
    "gpu_hours": "GPU-hours",
    "hours": "hours",
}
HEIGHTS = (260, 430)
"""Height of the curves with one row of panels, and with two, in pixels."""


class View:
    """State and figures of one sweep as the bytes that are sent. For one thread at a time."""

    def __init__(self, sweep: LiveSweep, plan: Planner, target: str) -> None:
        """Show `sweep`, which `target` names for `Steering`."""
        self._sweep = sweep
        self._plan = plan
        self._target = target
        self._snapshot: Snapshot | None = None
        self._status: tuple[str, str] | None = None
        self._state = b""
        self._figures: dict[str, bytes] = {}
        self._front = RateLimited[Front](share=30)
        """Front of the trials `_ended`; it may lag behind a little."""
        self._ended: object = None

    def get_state(self) -> bytes:
        """Return the present state as JSON."""
        snapshot = self._sweep.refresh()
        # A driver on another machine becomes silent as time passes, without any change.
        now = time.time()
        status = describe_sweep(snapshot, now)
        records = snapshot.records
        ended = [(r.number, r.state) for r in records if not r.is_open]
        is_front_due = ended != self._ended and self._front.is_due
        if snapshot is self._snapshot and status == self._status and not is_front_due:
            return self._state
        self._snapshot, self._status = snapshot, status
        front = self._front.value
        if front is None or is_front_due:
            self._ended = ended
            front = self._front.make(lambda: Sweep(snapshot.spec, records).front)
            figure = draw_pairs(front, snapshot.spec.constraints)
            drawn = bool(front.configurations)
            self._figures["front"] = str(figure.to_json()).encode() if drawn else b"null"
        curves = draw_running(
            front.objectives, records, snapshot.steps, snapshot.spec.training.steps
        )
        self._figures["running"] = _dump(curves)
        steering = snapshot.steering
        hours = compute_hours(snapshot.sessions, records, now, steering.pauses)
        plan = self._plan(snapshot.spec, records, hours, steering.list_waiting(records))
        state = build_state(snapshot, front, plan, now)
        versions = {name: hash(content) for name, content in self._figures.items()}
        self._state = _dump({**state, "figures": versions})
        return self._state

    def get_figure(self, name: str) -> bytes | None:
        """Return a figure of the latest state, `front` or `running`, as JSON; None if unknown."""
        if self._snapshot is None:
            self.get_state()
        return self._figures.get(name)

    def get_space(self) -> bytes:
        """Return the fields of a form for a configuration as JSON."""
        return _dump(list_fields(self._sweep.refresh().spec))

    def request(self, action: str, arguments: Mapping[str, Any], author: str) -> Request:
        """Leave a request for the driver; raises UsageError if it cannot be carried out."""
        return Steering(self._target).request(action, arguments, author=author)


def _dump(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def build_state(snapshot: Snapshot, front: Front, plan: Outlook, now: float) -> dict[str, Any]:
    """Return everything on the page but the figures."""
    spec, records = snapshot.spec, snapshot.records
    running = [record for record in records if record.state == "running"]
    ended = [record for record in records if not record.is_open]
    latest = sorted(ended, key=lambda r: (r.finished or 0.0, r.number), reverse=True)[:MAX_ENDED]
    kind, text = describe_sweep(snapshot, now)
    live = kind in ("running", "paused")
    uri = redact_passwords(spec.tracking.uri)
    has_address = not uri or uri.startswith(("http://", "https://"))  # a database has none
    return {
        "name": spec.name,
        "location": spec.location,
        "task": spec.task,
        "policy": spec.policy,
        "status": {"kind": kind, "text": text, "problem": snapshot.problem},
        "tiles": _build_tiles(snapshot, front, plan, now if live else None),
        "progress": {"done": len(ended), "planned": plan.planned},
        "ends_at": _estimate_end(snapshot, plan, now) if kind == "running" else None,
        "objectives": [abbreviate_parameter(goal.name) for goal in front.objectives],
        "parameters": [abbreviate_parameter(name) for name in _list_shown(spec)],
        "trials": None if spec.search.is_divided else spec.search.trials,
        "running": [_build_running_row(snapshot, r, live=live) for r in running[:MAX_RUNNING]],
        "hidden_running": max(0, len(running) - MAX_RUNNING),
        "ended": [
            {
                **_build_row(spec, record),
                "state": record.state,
                "state_name": name_state(record.state),
                "front": record.number in front.trial_numbers,
                "values": [format_estimate(record.test.get(name)) for name in spec.objectives],
                "time": format_duration(record.cost.seconds) if record.cost.seconds else NO_VALUE,
                "note": record.reason,
            }
            for record in latest
        ],
        "hidden_ended": max(0, len(ended) - MAX_ENDED),
        "log": _list_log(snapshot),
        "requests": [
            {
                "id": request.id,
                "time": request.asked,
                "author": request.author,
                "action": request.action,
                "trial": request.arguments.get("trial"),
                "text": request.text,
                "outcome": request.outcome if isinstance(request, RecordedRequest) else "pending",
                "reason": request.reason if isinstance(request, RecordedRequest) else "",
            }
            for request in [*snapshot.requests, *snapshot.pending][: -MAX_REQUESTS - 1 : -1]
        ],
        "mlflow": {
            "href": uri if has_address else "",
            "text": uri if has_address else f"mlflow ui --backend-store-uri {quote(uri)}",
        },
    }


def describe_sweep(snapshot: Snapshot, now: float) -> tuple[str, str]:
    """Return the kind of a sweep's state, and a sentence about it."""
    driver, session = snapshot.driver, snapshot.sessions[-1] if snapshot.sessions else {}
    if driver is not None and driver.is_alive:
        if not session or driver.since > session.get("finished", driver.since):
            return "starting", "The driver is starting."
        if "finished" not in session:
            if pause := snapshot.steering.pause:
                return "paused", f"Paused by {pause.author}: no further trial starts."
            return "running", "Running."
    if session.get("ending"):
        return "finished", f"Finished: {session['ending']}."
    if not snapshot.records and not session:
        return "not started", "The sweep has not started yet. This page waits for it."
    if driver is not None and driver.is_alive is None and "finished" not in session:
        recorded = [time for record in snapshot.records for time in record.times]
        if now - max(recorded, default=snapshot.sessions[-1]["started"]) < SILENCE:
            return "running", f"Running on {driver.host}."
        age = format_duration(SILENCE)
        return "silent", f"The driver on {driver.host} has recorded nothing for over {age}."
    return "ended", "The driver has ended; run the same command to resume."


def _build_tiles(
    snapshot: Snapshot, front: Front, plan: Outlook, now: float | None
) -> list[dict[str, str]]:
    records, budget = snapshot.records, snapshot.spec.search.budget
    ended = sum(not record.is_open for record in records)
    running = sum(record.state == "running" for record in records)
    complete, others = describe_states(records)
    others = others if now is None else others.replace(" unfinished", " running")
    provisional = sum(member.is_provisional for member in front.members)
    hours = compute_hours(snapshot.sessions, records, now, snapshot.steering.pauses)
    spent = compute_spending(snapshot.spec, records, hours)
    tiles = [
        (
            "Trials done",
            f"{ended} of at most {plan.planned}",
            f"{complete} complete; {others}".strip("; "),
        ),
        ("On the front", str(len(front.members)), f"{provisional} provisional"),
        ("Hypervolume", format_number(front.hypervolume) if front.members else NO_VALUE, ""),
    ]
    if now is not None:
        slots = snapshot.sessions[-1]["slots"]
        tiles.insert(1, ("Slots in use", f"{running} of {slots}", "trials side by side"))
    for name, unit in BUDGET_UNITS.items():
        if limit := getattr(budget, name):
            amounts = (
                f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"
                for value in (spent[name], limit)
            )
            tiles.append(("Budget", " of ".join(amounts), unit))
    return [{"label": label, "value": value, "note": note} for label, value, note in tiles]


def _estimate_end(snapshot: Snapshot, plan: Outlook, now: float) -> float | None:
    """Return when the sweep ends at the pace of this session; None while that is unknown.

    Pauses do not count: nothing starts in them.
    """
    session, records = snapshot.sessions[-1], snapshot.records
    hours = compute_hours([session], records, now, snapshot.steering.pauses)
    before = [r for r in records if r.finished is not None and r.finished < session["started"]]
    latest = {number: steps[-1].cost for number, steps in snapshot.steps.items() if steps}
    under_way = sum(c.work for c in latest.values()) - sum(records[n].cost.work for n in latest)
    done = measure_work(records, latest) - measure_work(before, {})
    left = estimate_seconds_left(plan.work - under_way, done, hours * HOUR, plan.hours)
    return None if left is None else now + left


def _build_running_row(snapshot: Snapshot, record: TrialRecord, *, live: bool) -> dict[str, Any]:
    steps = snapshot.steps.get(record.number, ())
    validation = record.rungs[-1].validation if record.rungs else {}
    return {
        **_build_row(snapshot.spec, record),
        "color": list_curve_colors(snapshot.records).get(record.number, ""),
        "step": steps[-1].step if steps else 0,
        "steps": snapshot.spec.count_steps(record),
        "started": record.started if live else None,
        "values": [
            format_number(validation[name].mean) if name in validation else NO_VALUE
            for name in snapshot.spec.objectives
        ],
        "can_stop": live,
    }


def _build_row(spec: SweepSpec, record: TrialRecord) -> dict[str, Any]:
    trained = record.trained_params
    mode = get_mode(trained) if trained else ""
    active = spec.space.select_active(trained) if trained else {}
    searched = {name: trained[name] for name in spec.space.dimensions if name in active}
    return {
        "number": record.number,
        "name": record.name,
        "title": title_candidate(record.name),
        "role": describe_role(record),
        "mode": mode,
        "mode_color": style.get_mark(mode).color if mode else "",
        "parameters": [format_parameter(searched.get(name)) for name in _list_shown(spec)],
        "searched": searched,
    }


def _list_shown(spec: SweepSpec) -> list[str]:
    # the mode has a column of its own
    return [name for name in spec.space.dimensions if name != "normalization"]


def _list_log(snapshot: Snapshot) -> list[dict[str, Any]]:
    lines: list[tuple[float, str, str]] = []
    for session in snapshot.sessions:
        slots = format_count(session["slots"], "slot")
        lines.append((session["started"], "driver", f"the driver started with {slots}"))
        if "finished" in session:
            reason = session.get("ending") or "interrupted"
            lines.append((session["finished"], "driver", f"the driver ended: {reason}"))
    lines += [(i.time, "incident", str(i)) for i in list_incidents(snapshot.sessions)]
    lines.sort(key=lambda line: line[0], reverse=True)
    return [{"time": at, "kind": kind, "text": text} for at, kind, text in lines[:MAX_LOG]]


def list_fields(spec: SweepSpec) -> list[dict[str, Any]]:
    """Return the searched parameters as the fields of a form, with the centre of the space."""
    fields: list[dict[str, Any]] = []
    for name, domain in dict[str, Any](spec.space.searched_domains).items():
        field: dict[str, Any] = {
            "name": name,
            "label": abbreviate_parameter(name),
            "centre": domain.find_middle(),
            "when": {parent: list(values) for parent, values in domain.when.items()},
            "choices": None,
        }
        if hasattr(domain, "choices"):
            field["choices"] = list(domain.list_values() or ())
        else:
            text = f"{format_parameter(domain.low)} to {format_parameter(domain.high)}"
            text += ", on a log scale" if domain.log else ""
            text += f", in steps of {domain.step}" if domain.step else ""
            field |= {key: getattr(domain, key) for key in ("low", "high", "integer")}
            field["range"] = text
        fields.append(field)
    return fields


def list_curve_colors(records: Sequence[TrialRecord]) -> dict[int, str]:
    """Return the number of each running trial that has curves -> their colour."""
    drawn = [r for r in records if r.state == "running" and r.is_training][-MAX_CURVES:]
    return {r.number: style.REWARDS[i % len(style.REWARDS)] for i, r in enumerate(drawn)}


def draw_running(
    objectives: Sequence[Objective],
    records: Sequence[TrialRecord],
    steps: Mapping[int, Sequence[Measurement]],
    last: int,
) -> dict[str, Any] | None:
    """Draw a panel per objective, and under them one per reward; None without any point.

    `last` is the last step of a trial.
    """
    colors = list_curve_colors(records)
    drawn = [record for record in records if record.number in colors]
    measured = {number: steps[number] for number in colors if steps.get(number)}
    rewards = list_rewards(measured) if measured else []
    goals = [goal.name for goal in objectives if any(record.rungs for record in drawn)]
    if not goals and not rewards:
        return None
    data: list[dict[str, Any]] = []
    for record in drawn:
        points = [m for m in measured.get(record.number, ()) if m.step]
        kept = [m for m in points if is_kept(m.step, points[-1].step)]
        curves = [
            [(r.step, r.validation[goal].mean) for r in record.rungs if goal in r.validation]
            for goal in goals
        ]
        for metric in (f"train/{REWARDS}{reward}/mean" for reward in rewards):
            curves.append([(m.step, m.metrics[metric]) for m in kept if metric in m.metrics])
        for panel, curve in enumerate(curves, start=1):
            axis = "" if panel == 1 else str(panel)
            has_marks = panel <= len(goals)
            title = f"trial {record.number}"
            trace: dict[str, Any] = {
                "type": "scatter",
                "mode": "lines+markers" if has_marks else "lines",
                "x": [step for step, _ in curve],
                "y": [value for _, value in curve],
                "xaxis": f"x{axis}",
                "yaxis": f"y{axis}",
                "line": {"color": colors[record.number], "width": 2},
                "name": title,
                "hovertemplate": f"{title}, step %{{x}}: %{{y:.4~g}}<extra></extra>",
            }
            data.append(trace | ({"marker": {"size": 6}} if has_marks else {}))
    titles = (tuple(map(abbreviate_parameter, names)) for names in (goals, rewards))
    return {"data": data, "layout": _build_layout(*titles, last)}


@lru_cache(maxsize=8)
def _build_layout(
    objectives: tuple[str, ...], rewards: tuple[str, ...], last: int
) -> dict[str, Any]:
    panels = [("validation", objectives), ("mean reward", rewards)]
    rows = [(title, names) for title, names in panels if names]
    columns = max(len(names) for _, names in rows)
    figure = make_subplots(
        rows=len(rows),
        cols=columns,
        specs=[[{} if c < len(names) else None for c in range(columns)] for _, names in rows],
        horizontal_spacing=0.06,
        vertical_spacing=0.2,
        subplot_titles=[name for _, names in rows for name in names],
    )
    figure.update_layout(**make_layout(HEIGHTS[len(rows) - 1], t=36, b=44))
    figure.update_layout(showlegend=False)
    figure.update_annotations(font={"size": 12.5})
    figure.update_xaxes(range=[0, last])
    figure.update_xaxes(title_text="step", row=len(rows))
    for row, (title, _) in enumerate(rows, start=1):
        figure.update_yaxes(title_text=title, row=row, col=1)
    return dict(figure.layout.to_plotly_json())
