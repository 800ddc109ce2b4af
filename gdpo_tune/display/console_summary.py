"""Terminal output at the end of a sweep and of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.core.text import format_count, format_hypervolume, format_number
from gdpo_tune.core.trials import TrialRecord, format_parts, title_candidate
from gdpo_tune.display.tables import MAX_ROWS, build_console, build_front_table, explain_marks
from gdpo_tune.results import wording
from gdpo_tune.results.comparison_report import ComparisonReport
from gdpo_tune.results.front_table import TABLE_FILE, list_rows
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.spec import SweepSpec

WIDTH = 160
"""Columns where the output is no terminal and so has no width of its own."""


def print_summary(
    sweep: Sweep, console: Console | None = None, *, note: str = "", view: str = ""
) -> None:
    """Print the front with its standard errors, the failures, paths and next commands.

    `note` says how the sweep ended; `view` is the front's address in MLflow, without the server
    part for a database.
    """
    out = console or build_console()
    if not out.is_terminal and console is None:
        out = build_console(WIDTH)
    spec, records, front, chosen = sweep.spec, sweep.records, sweep.front, sweep.chosen
    complete, others = wording.describe_states(records)
    counts = ", ".join(filter(None, [f"{format_count(complete, 'trial')} complete", others]))
    work = wording.describe_work(records, "training")
    volume = format_hypervolume(front.hypervolume, front.hypervolume_interval)
    head = (
        f": {f'{note}; ' if note else ''}{counts}, {work}; "
        f"{len(front.members)} on the front, hypervolume {volume}"
    )
    out.print(Text.assemble("\n", (spec.name, "bold"), head))
    _print_unmet(out, spec, records)
    for warning in sweep.warnings:
        _print_prose(out, f"warning: {warning}", "yellow")
    if rows := list_rows(front, MAX_ROWS):
        out.print(build_front_table(front, rows, spec.space.dimensions, out))
    if front.members:
        _print_prose(out, explain_marks(front, rows), "dim")
        _print_labelled(out, sweep)
    for line in wording.describe_origins(front):
        _print_prose(out, line, "dim")
    for line in wording.describe_effects(sweep.effects):
        _print_prose(out, line, "")
    failed = [record for record in records if record.state == "failed"]
    if failed:
        _print_line(out, f"\n{len(failed)} failed", "bold")
    for record in failed:
        line = Text(f"{title_candidate(record.name)}: {record.reason or 'no reason recorded'}")
        out.print(Padding(line, (0, 0, 0, 2)))
    _print_incidents(out, sweep)
    _print_outputs(out, sweep)
    _print_next_steps(out, sweep, view)
    for line in chosen.lines if chosen else ():
        _print_line(out, line, "bold")


def print_comparison(report: ComparisonReport) -> None:
    """Print the verdict, its reasons, what limits it, and the path of the page."""
    out = build_console()
    _print_line(out, f"\n{report.verdict.headline}", "bold")
    for line in report.verdict.reasons:
        _print_line(out, f"  {line}")
    for line in report.notes:
        _print_line(out, f"  {line}", "dim")
    _print_line(out, f"\nreport  {report.file}")


def _print_line(out: Console, text: str, style: str = "") -> None:
    # Text, since it may hold what rich would take for markup; unbroken, so that it can be copied.
    out.print(Text(text, style=style), soft_wrap=True, highlight=False)


def _print_prose(out: Console, text: str, style: str) -> None:
    """Print sentences, between the words of which a terminal may break lines."""
    if out.is_terminal:
        out.print(Text(text, style=style), highlight=False)
    else:
        _print_line(out, text, style)


def _print_labelled(out: Console, sweep: Sweep) -> None:
    rows: list[tuple[str, str]] = []
    front = sweep.front
    for member in sorted(front.members, key=lambda member: member is not front.knee):
        content = format_parts(member.parts)
        if len(member.parts) < 2:
            content = wording.describe_parameters(member.params, sweep.spec.space.dimensions)
        if labels := front.list_labels(member, ties=True):
            rows.append((title_candidate(member.name), f"{content}: {', '.join(labels)}"))
    if rows:
        _print_rows(out, "\nBest compromise and extremes", rows)


def _print_unmet(out: Console, spec: SweepSpec, records: Sequence[TrialRecord]) -> None:
    trained = [r for r in records if r.state == "complete" and not r.is_initial]
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


def _print_incidents(out: Console, sweep: Sweep) -> None:
    incidents = wording.list_incidents(sweep.sessions)
    lost = [incident for incident in incidents if incident.kind == "node lost"]
    trials = {number for incident in lost for number in incident.trials}
    if lost:
        attempts = f"with attempts at {format_count(len(trials), 'trial')}"
        _print_line(out, f"{format_count(len(lost), 'node')} lost, {attempts}")
    retried = sum(incident.kind == "attempt retried" for incident in incidents)
    if retried:
        _print_line(out, f"{format_count(retried, 'attempt')} failed and retried")


def _print_outputs(out: Console, sweep: Sweep) -> None:
    spec, front = sweep.spec, sweep.front
    names = {
        "report": wording.REPORT_FILE,
        "front": wording.FRONT_FILE,
        "front as a table": TABLE_FILE,
    }
    files = {label: spec.directory / name for label, name in names.items()}
    rows = [(label, str(path)) for label, path in files.items() if path.exists()]
    rows.append(("trials", f"{spec.location}/trials"))
    policies = {record.number: record.policy for record in front.records}
    for member in front.members:
        labels, policy = front.list_labels(member), policies[member.numbers[0]]
        if labels and policy:
            rows.append((f"policy, {', '.join(labels)}", policy))
    _print_rows(out, "\nOutputs", rows)


def _print_next_steps(out: Console, sweep: Sweep, view: str) -> None:
    location, chosen = sweep.spec.location, sweep.chosen
    uri = redact_passwords(sweep.spec.tracking.uri)
    if uri.startswith(("http://", "https://")):
        rows = [("Open in MLflow", view or uri)]
    else:
        rows = [("Start MLflow", f"mlflow ui --backend-store-uri {quote(uri)}")]
        served = "http://127.0.0.1:5000/"  # by `mlflow ui`
        rows += [("Open in MLflow", f"{served}{view}")] if view else []
    rows.append(("Regenerate report", f"python -m gdpo_tune.report {quote(location)}"))
    if chosen:
        source = quote(f"{location}:{chosen.name}")
        subject = "this trial"
        if len(chosen.record.parts) > 1:
            rows.append(("Repeat this merge", f"python -m gdpo_tune.export {source} --to mergekit"))
            subject = "from its weights"
        rows.append((f"Train {subject}", f"python -m gdpo_tune.train --from {source}"))
        if sweep.can_export:
            rows.append((f"Export {subject}", f"python -m gdpo_tune.export {source} --to trl"))
    _print_rows(out, "\nNext steps", rows)


def _print_rows(out: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    _print_line(out, title, "bold")
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        _print_line(out, f"  {name:<{width}}  {text}")
