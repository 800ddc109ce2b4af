"""Terminal output at the end of a sweep and of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gdpo_tune.analysis.agreement import measure_agreements
from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.verdict import Verdict
from gdpo_tune.core.events import IS_TRIED_AGAIN, WAS_LOST
from gdpo_tune.core.text import (
    abbreviate_parameter,
    format_count,
    format_hypervolume,
    format_number,
    format_parameter,
)
from gdpo_tune.core.trials import TrialRecord, format_parts, title_candidate
from gdpo_tune.display.consoles import build_console
from gdpo_tune.display.tables import build_front_table, explain_marks, select_rows
from gdpo_tune.results.summary import (
    FRONT_FILE,
    REPORT_FILE,
    TABLE_FILE,
    ChosenTrial,
    describe_origins,
    describe_states,
    describe_work,
    list_incidents,
)
from gdpo_tune.results.warnings import list_result_warnings
from gdpo_tune.spec import hide_passwords

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

MLFLOW_UI = "http://127.0.0.1:5000/"
"""Address that `mlflow ui` serves by default."""
WIDTH = 160
"""Columns where the output is no terminal and so has no width of its own."""


def print_summary(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    console: Console | None = None,
    *,
    note: str = "",
    chosen: ChosenTrial | None = None,
    view: str = "",
    sessions: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Print the front with its standard errors, the failures, paths and next commands.

    `note` says how the sweep ended, as `LiveDisplay.note` has it; `view` is the address of the
    front in MLflow, without the server part for a database; `sessions` are as `Ledger.get_sessions`
    returns them.
    """
    out = console or build_console()
    if not out.is_terminal and console is None:
        out = build_console(WIDTH)
    front = build_front(records, spec.list_objectives(), chosen and chosen.name)
    out.print(_build_head(spec, front, note))
    _print_unmet(out, spec, records)
    for warning in list_result_warnings(spec, front):
        _print_prose(out, f"warning: {warning}", "yellow")
    if front.members or front.baselines:
        shown = select_rows(front)
        out.print(build_front_table(front, spec.space.dimensions, out))
        if front.members:
            _print_prose(out, explain_marks(front, shown), "dim")
        _print_labelled(out, spec, front)
    for line in describe_origins(front):
        _print_prose(out, line, "dim")
    for agreement in measure_agreements(records, front.objectives):
        _print_prose(out, f"early scores: {agreement}", "dim")
    failed = [record for record in records if record.state == "failed"]
    if failed:
        _print_line(out, f"\n{len(failed)} failed", "bold")
    for record in failed:
        line = Text(f"{title_candidate(record.name)}: {record.reason or 'no reason recorded'}")
        out.print(Padding(line, (0, 0, 0, 2)))
    _print_incidents(out, sessions)
    _print_outputs(out, spec, front)
    _print_next_steps(out, spec, chosen, view)
    for line in chosen.lines if chosen else ():
        _print_line(out, line, "bold")


def print_comparison(
    verdict: Verdict, notes: Sequence[str], page: Path, console: Console | None = None
) -> None:
    """Print the verdict, its reasons, what limits it, and the path of the page."""
    out = console or build_console()
    _print_line(out, f"\n{verdict.headline}", "bold")
    for line in verdict.reasons:
        _print_line(out, f"  {line}")
    for line in notes:
        _print_line(out, f"  {line}", "dim")
    _print_line(out, f"\nreport  {page}")


def _print_line(out: Console, text: str, style: str = "") -> None:
    # Text, since it may hold what rich would take for markup; unbroken, so that it can be copied.
    out.print(Text(text, style=style), soft_wrap=True, highlight=False)


def _print_prose(out: Console, text: str, style: str) -> None:
    """Print sentences, between the words of which a terminal may break lines."""
    if out.is_terminal:
        out.print(Text(text, style=style), highlight=False)
    else:
        _print_line(out, text, style)


def _build_head(spec: SweepSpec, front: Front, note: str) -> Text:
    complete, others = describe_states(front.records)
    counts = ", ".join(filter(None, [f"{format_count(complete, 'trial')} complete", others]))
    work = describe_work(front.records, spec.resources.trials_per_process, "training")
    volume = format_hypervolume(front.hypervolume, front.hypervolume_interval)
    head = (
        f": {f'{note}; ' if note else ''}{counts}, {work}; "
        f"{len(front.members)} on the front, hypervolume {volume}"
    )
    return Text.assemble("\n", (spec.name, "bold"), head)


def _print_labelled(out: Console, spec: SweepSpec, front: Front) -> None:
    """Print what the members that have a label consist of, or their parameters."""
    rows: list[tuple[str, str]] = []
    for member in sorted(front.members, key=lambda member: member is not front.knee):
        labels = ", ".join(front.list_labels(member, ties=True))
        if labels:
            rows.append(
                (title_candidate(member.name), f"{_describe_content(spec, member)}: {labels}")
            )
    if rows:
        _print_rows(out, "\nBest compromise and extremes", rows)


def _describe_content(spec: SweepSpec, member: Configuration) -> str:
    """Return the parts of a merge, else the searched parameters."""
    if len(member.parts) > 1:
        return format_parts(member.parts)
    return ", ".join(
        f"{abbreviate_parameter(name)} {format_parameter(member.params[name])}"
        for name in spec.space.dimensions
        if name in member.params
    )


def _print_unmet(out: Console, spec: SweepSpec, records: Sequence[TrialRecord]) -> None:
    """Print the value closest to each constraint, if no trained trial satisfies them all."""
    trained = [r for r in records if r.state == "complete" and r.role != "untrained"]
    if not trained or any(record.feasible is not False for record in trained):
        return
    _print_line(out, "no trial satisfies all constraints, so nothing is on the front", "bold")
    for name, bound in spec.constraints.items():
        values = [r.validation[name].mean for r in trained if name in r.validation]
        text = "no trial has measured it"
        if values:
            closest = max(values) if bound.op == ">=" else min(values)
            text = f"the closest trial has {format_number(closest)} on validation"
        _print_line(out, f"  {name} {bound}: {text}")


def _print_incidents(out: Console, sessions: Sequence[Mapping[str, Any]]) -> None:
    """Print how many nodes and attempts were lost; the report lists them."""
    incidents = list_incidents(sessions)
    lost = [incident for incident in incidents if incident.description.endswith(WAS_LOST)]
    trials = {number for incident in lost for number in incident.trials}
    if lost:
        attempts = f"with attempts at {format_count(len(trials), 'trial')}"
        _print_line(out, f"{format_count(len(lost), 'node')} lost, {attempts}")
    retried = sum(incident.description.startswith(IS_TRIED_AGAIN) for incident in incidents)
    if retried:
        _print_line(out, f"{format_count(retried, 'attempt')} failed and retried")


def _print_outputs(out: Console, spec: SweepSpec, front: Front) -> None:
    names = {"report": REPORT_FILE, "front": FRONT_FILE, "front as a table": TABLE_FILE}
    files = {label: spec.directory / name for label, name in names.items()}
    rows = [(label, str(path)) for label, path in files.items() if path.exists()]
    rows.append(("trials", f"{spec.location}/trials"))
    policies = {record.number: record.policy for record in front.records}
    for member in front.members:
        labels, policy = front.list_labels(member), policies[member.numbers[0]]
        if labels and policy:
            rows.append((f"policy, {', '.join(labels)}", policy))
    _print_rows(out, "\nOutputs", rows)


def _print_next_steps(out: Console, spec: SweepSpec, chosen: ChosenTrial | None, view: str) -> None:
    uri = hide_passwords(spec.tracking.uri)
    if uri.startswith(("http://", "https://")):
        rows = [("Open in MLflow", view or uri)]
    else:
        rows = [("Start MLflow", f"mlflow ui --backend-store-uri {quote(uri)}")]
        rows += [("Open in MLflow", f"{MLFLOW_UI}{view}")] if view else []
    rows.append(("Regenerate report", f"python -m gdpo_tune.report {quote(spec.location)}"))
    if chosen:
        source = quote(f"{spec.location}:{chosen.name}")
        if len(chosen.record.parts) > 1:
            rows.append(("Repeat this merge", f"python -m gdpo_tune.export {source} --to mergekit"))
        else:
            rows.append(("Train this trial", f"python -m gdpo_tune.train --from {source}"))
            rows.append(("Export this trial", f"python -m gdpo_tune.export {source} --to trl"))
    _print_rows(out, "\nNext steps", rows)


def _print_rows(out: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    _print_line(out, title, "bold")
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        _print_line(out, f"  {name:<{width}}  {text}")
