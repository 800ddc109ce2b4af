"""Content of the page as JSON: a pure function of a snapshot.

Times are Unix seconds, which the page turns into durations: so the content of a sweep in which
nothing happens stays the same, and nothing is sent or drawn again.
"""

from __future__ import annotations

from typing import Any

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.metrics import HOUR
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_duration,
    format_estimate,
    format_number,
    format_parameter,
    get_mode,
)
from gdpo_tune.core.trials import TrialRecord, title_candidate
from gdpo_tune.figures import style
from gdpo_tune.ledger.budget import compute_hours, compute_spending
from gdpo_tune.results.summary import describe_role, describe_states, name_state
from gdpo_tune.results.time_left import (
    ENDED,
    estimate_seconds_left,
    measure_planned_work,
    measure_work_done,
)
from gdpo_tune.spec import SweepSpec, hide_passwords
from gdpo_tune.web.live_sweep import Plan, Snapshot
from gdpo_tune.web.request_texts import describe_requests, list_log
from gdpo_tune.web.running_curves import get_curve_color

MOST_ENDED = 200
"""Most ended trials that the page lists; the report has all."""
MOST_RUNNING = 100
"""Most running trials that the page lists."""
SILENCE = 600.0
"""Seconds without news after which a driver on another machine counts as silent."""
BUDGET_UNITS = {
    "trials": "trainings",
    "completions": "completions",
    "gpu_hours": "GPU-hours",
    "hours": "hours",
}


def build_state(snapshot: Snapshot, front: Front, plan: Plan, now: float) -> dict[str, Any]:
    """Return everything on the page but the figures."""
    spec, records = snapshot.spec, snapshot.records
    running = [record for record in records if record.state == "running"]
    ended = [record for record in records if record.state in ENDED]
    latest = sorted(ended, key=lambda r: (r.finished or 0.0, r.number), reverse=True)[:MOST_ENDED]
    kind, text = describe_sweep(snapshot, now)
    live = kind in ("running", "paused")
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
        "trials": spec.search.trials,
        "running": [_build_running_row(snapshot, r, live=live) for r in running[:MOST_RUNNING]],
        "hidden_running": max(0, len(running) - MOST_RUNNING),
        "ended": [_build_ended_row(spec, front, record) for record in latest],
        "hidden_ended": max(0, len(ended) - MOST_ENDED),
        "log": list_log(snapshot),
        "requests": describe_requests(snapshot),
        "mlflow": _link_tracking(spec),
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
        silent = now - _find_last_record(snapshot)
        if silent < SILENCE:
            return "running", f"Running on {driver.host}."
        age = format_duration(SILENCE)
        return "silent", f"The driver on {driver.host} has recorded nothing for over {age}."
    return "ended", "The driver has ended; run the same command to resume."


def _build_tiles(
    snapshot: Snapshot, front: Front, plan: Plan, now: float | None
) -> list[dict[str, str]]:
    """Return the main numbers; `now` is None for a sweep that does not run."""
    records, budget = snapshot.records, snapshot.spec.search.budget
    ended = sum(record.state in ENDED for record in records)
    running = sum(record.state == "running" for record in records)
    complete, others = describe_states(records)
    others = others if now is None else others.replace(" unfinished", " running")
    provisional = sum(member.is_provisional for member in front.members)
    hours = compute_hours(snapshot.sessions, records, now, snapshot.steering.pauses)
    spent = compute_spending(snapshot.spec, records, hours)
    tiles = [
        ("Trials done", f"{ended} of {plan.planned}", f"{complete} complete; {others}".strip("; ")),
        ("On the front", str(len(front.members)), f"{provisional} provisional"),
        ("Hypervolume", format_number(front.hypervolume) if front.members else NO_VALUE, ""),
    ]
    if now is not None:
        slots = snapshot.sessions[-1]["slots"]
        tiles.insert(1, ("Slots in use", f"{running} of {slots}", "trials side by side"))
    for name, unit in BUDGET_UNITS.items():
        limit = getattr(budget, name)
        if limit:
            value = f"{_format_amount(spent[name])} of {_format_amount(limit)}"
            tiles.append(("Budget", value, unit))
    return [{"label": label, "value": value, "note": note} for label, value, note in tiles]


def _format_amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def _estimate_end(snapshot: Snapshot, plan: Plan, now: float) -> float | None:
    """Return when the sweep ends at the pace of this session; None while that is unknown.

    Pauses do not count: nothing starts in them.
    """
    session, records = snapshot.sessions[-1], snapshot.records
    hours = compute_hours([session], records, now, snapshot.steering.pauses)
    before = [r for r in records if r.finished is not None and r.finished < session["started"]]
    latest = {number: steps[-1].step for number, steps in snapshot.steps.items() if steps}
    steps = snapshot.spec.training.steps
    left = estimate_seconds_left(
        measure_planned_work(plan.planned, plan.candidates),
        measure_work_done(records, latest, steps),
        measure_work_done(before, {}, steps),
        hours * HOUR,
    )
    return None if left is None else now + left


def _build_running_row(snapshot: Snapshot, record: TrialRecord, *, live: bool) -> dict[str, Any]:
    steps = snapshot.steps.get(record.number, ())
    total = 0 if not record.is_training else snapshot.spec.training.steps
    validation = record.rungs[-1].validation if record.rungs else {}
    return {
        **_build_row(snapshot.spec, record),
        "color": get_curve_color(record, snapshot.records),
        "step": steps[-1].step if steps else 0,
        "steps": total,
        "started": record.started if live else None,
        "values": [
            format_number(validation[name].mean) if name in validation else NO_VALUE
            for name in snapshot.spec.objectives
        ],
        "can_stop": live,
    }


def _build_ended_row(spec: SweepSpec, front: Front, record: TrialRecord) -> dict[str, Any]:
    return {
        **_build_row(spec, record),
        "state": record.state,
        "state_name": name_state(record.state),
        "front": record.number in front.trial_numbers,
        "values": [format_estimate(record.test.get(name)) for name in spec.objectives],
        "time": format_duration(record.cost.seconds) if record.cost.seconds else NO_VALUE,
        "note": record.reason,
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
    """Return the searched parameters, of which the mode has a place of its own."""
    return [name for name in spec.space.dimensions if name != "normalization"]


def _find_last_record(snapshot: Snapshot) -> float:
    """Return the time of the last record of the ledger."""
    times = [
        time
        for record in snapshot.records
        for time in (record.started, record.finished, *(rung.recorded for rung in record.rungs))
    ]
    return max((t for t in times if t is not None), default=snapshot.sessions[-1]["started"])


def _link_tracking(spec: SweepSpec) -> dict[str, str]:
    """Return address and text of the MLflow server; the address of a database is empty."""
    uri = hide_passwords(spec.tracking.uri)
    if not uri:
        return {"href": "", "text": ""}
    href = uri if uri.startswith(("http://", "https://")) else ""
    return {"href": href, "text": uri if href else f"mlflow ui --backend-store-uri {uri}"}


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
