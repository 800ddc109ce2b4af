"""What stands in the terminal once a sweep has ended."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gdpo_tune.analysis.agreement import agreements
from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core.formatting import format_duration, format_interval, format_number
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.display.tables import front_table
from gdpo_tune.results.summary import FRONT_FILE as FRONT, REPORT_FILE as REPORT, ChosenTrial as Choice, list_incidents as incidents_of, describe_other_states as other_states
from gdpo_tune.spec import without_password

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

MLFLOW_UI = "http://127.0.0.1:5000/"
"""Where `mlflow ui` serves by default."""
WIDTH = 160
"""Columns where the output is no terminal and so has no width of its own."""


def print_summary(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    console: Console | None = None,
    *,
    note: str = "",
    chosen: Choice | None = None,
    view: str = "",
    sessions: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Print the front with its standard errors, the failures, and where everything is.

    Args:
        spec: the sweep.
        records: all its trials; there may be none.
        console: where to print; default: standard output.
        note: how the sweep ended, as `LiveDisplay.note` has it; comes first.
        chosen: what a person chose; comes after the front.
        view: address of the front in MLflow, without a server's for a database; may be unknown.
        sessions: which processes worked on the sweep, as `Ledger.sessions` has them.
    """
    out = console or Console()
    if not out.is_terminal and console is None:
        out = Console(width=WIDTH)
    front = build_front(records, spec.objective_list(), chosen and chosen.number)
    out.print(_head(spec, front, note))
    _print_unmet(out, spec, records)
    if front.members or front.baselines:
        out.print(front_table(front, spec.space.dimensions, out))
    if any(member.provisional for member in front.members):
        noise = (
            "its error bar is at least the spread of seeds elsewhere in this sweep"
            if front.seeds_compared
            else "so the noise of training is unknown and its error bar too short"
        )
        out.print(Text(f"provisional: one seed, {noise}", style="dim"), soft_wrap=True)
    for line in chosen.lines if chosen else ():
        out.print(Text(line), soft_wrap=True, highlight=False)
    for line in agreements(records, spec.objective_list()):
        out.print(Text(str(line), style="dim"), soft_wrap=True)
    _print_failures(out, records)
    _print_incidents(out, sessions)
    _print_places(out, spec, front, chosen, view)


def _head(spec: SweepSpec, front: Front, note: str) -> Text:
    states = Counter(record.state for record in front.records)
    counts = ", ".join(
        filter(None, [f"{states['complete']} trials complete", other_states(states)])
    )
    interval = front.hypervolume_interval
    return Text.assemble(
        "\n",
        (spec.name, "bold"),
        f": {note}; " if note else ": ",
        f"{counts}, {format_duration(sum(record.cost.seconds for record in front.records))} of "
        f"training; {len(front.members)} on the front, "
        f"hypervolume {format_number(front.hypervolume)}"
        + (f" (95 %: {format_interval(interval.low, interval.high)})" if front.members else ""),
    )


def _print_unmet(out: Console, spec: SweepSpec, records: Sequence[TrialRecord]) -> None:
    """Say how far the constraints are, if no trained trial meets them all."""
    trained = [r for r in records if r.state == "complete" and r.role != "untrained"]
    if not trained or any(record.feasible is not False for record in trained):
        return
    out.print(Text("no trial meets all constraints, so nothing is on the front", style="bold"))
    for name, bound in spec.constraints.items():
        values = [r.validation[name].mean for r in trained if name in r.validation]
        if not values:
            out.print(f"  {name} {bound}: no trial has measured it")
            continue
        closest = max(values) if bound.op == ">=" else min(values)
        out.print(f"  {name} {bound}: the closest trial has {format_number(closest)} on validation")


def _print_failures(out: Console, records: Sequence[TrialRecord]) -> None:
    failed = [record for record in records if record.state == "failed"]
    if not failed:
        return
    out.print(Text(f"\n{len(failed)} failed", style="bold"))
    for record in failed:
        line = Text(f"trial {record.number}: {record.reason or 'no reason recorded'}")
        out.print(Padding(line, (0, 0, 0, 2)))


def _print_incidents(out: Console, sessions: Sequence[Mapping[str, Any]]) -> None:
    """Say that things went wrong and the sweep went on; the report has all of it."""
    found = incidents_of(sessions)
    lost = [what for what in found if what.description.endswith("was lost")]
    again = sum("is tried again" in what.description for what in found)
    moved = len({number for what in lost for number in what.trials})
    if lost:
        nodes = f"{len(lost)} node{'s' if len(lost) > 1 else ''} lost, with attempts at {moved}"
        out.print(Text(f"{nodes} trial{'s' if moved != 1 else ''}"), soft_wrap=True)
    if again:
        out.print(Text(f"{again} attempt{'s' if again > 1 else ''} failed and was made again"))


def _print_places(
    out: Console, spec: SweepSpec, front: Front, chosen: Choice | None, view: str
) -> None:
    """Paths and commands, each whole on its line so that it can be copied."""
    folder = spec.directory
    places = [("report", folder / REPORT), ("front", folder / FRONT)]
    rows = [(name, str(path)) for name, path in places if path.exists()]
    rows += [("trials", f"{spec.place}/trials")]
    rows += [(f"policy, {what}", path) for what, path in _policies(front)]
    commands = _in_mlflow(spec.tracking.uri, view)
    commands.append(("draw again", _command("report", spec.place)))
    if chosen:
        source = f"{spec.place}:{chosen.number}"
        commands.append(("train it", _command("train", "--from", source)))
        commands.append(("export it", _command("export", source, "--to", "trl")))
    for title, lines in (("\nWhere it is", rows), ("\nLook further", commands)):
        out.print(Text(title, style="bold"))
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            out.print(Text(f"  {name:<{width}}  {text}"), soft_wrap=True, highlight=False)


def _command(name: str, *words: str) -> str:
    return shlex.join(["python", "-m", f"gdpo_tune.{name}", *words])


def _policies(front: Front) -> list[tuple[str, str]]:
    """Folders of the trained policies of the knee and the extremes, as far as they were kept."""
    records = {record.number: record for record in front.records}
    found: list[tuple[str, str]] = []
    for member in front.members:
        names = front.picked_as(member)
        policy = records[member.numbers[0]].policy
        if names and policy:
            found.append((", ".join(names), policy))
    return found


def _in_mlflow(uri: str, view: str) -> list[tuple[str, str]]:
    """The front in MLflow: its address, and before it how to start MLflow on a database."""
    uri = without_password(uri)
    if uri.startswith(("http://", "https://")):
        return [("in MLflow", view or uri)]
    start = ("in MLflow", shlex.join(["mlflow", "ui", "--backend-store-uri", uri]))
    return [start, ("its front", f"{MLFLOW_UI}{view}")] if view else [start]
