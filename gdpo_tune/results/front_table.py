"""The front as a table, which console, report, notebook, cards, MLflow and front.csv render."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.analysis.front import Front, find_untrained
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.text import (
    format_count,
    format_estimate,
    format_hypervolume,
    format_list,
    format_number,
)
from gdpo_tune.core.trials import Estimate, format_parts, title_candidate

TABLE_FILE = "front.csv"
BASELINES = {
    "untrained": "untrained policy",
    "start": "supervised start",
    "published": "published weights",
}
"""Role of a baseline -> its name where a person reads."""


@dataclass(frozen=True)
class FrontRow:
    """A member of the front or a baseline, with what every table says about it."""

    policy: Configuration
    values: tuple[Estimate, ...]
    """In the order of the objectives."""
    labels: tuple[str, ...]
    """Why it stands out: `knee`, `best correctness`."""
    baseline: str
    """Name of a baseline; else empty."""
    shortfalls: tuple[str, ...]
    """`worse than untrained in correctness`, `outside of length >= 0.9 on test prompts`."""
    worse: frozenset[str]
    """Objectives of `shortfalls`; empty for a baseline."""

    @property
    def title(self) -> str:
        """As `title_policy`."""
        return title_policy(self.policy)

    @property
    def stands_out(self) -> bool:
        """True for a knee, an extreme, a picked candidate or a baseline."""
        return bool(self.labels or self.baseline)

    @property
    def cells(self) -> list[str]:
        """The values as text."""
        return [format_estimate(value) for value in self.values]

    @property
    def remarks(self) -> list[str]:
        """All that is said about it in words, besides its title."""
        is_single = self.policy.is_on_front and self.policy.is_provisional
        published = [self.baseline] if self.policy.role == "published" else []
        return [*self.labels, *published, *["provisional"] * is_single, *self.shortfalls]


def title_policy(policy: Configuration) -> str:
    """Return `trial 7`, `merge-27`, `untrained policy` or `supervised start`."""
    return BASELINES[policy.role] if policy.is_initial else title_candidate(policy.name)


def build_front_row(front: Front, policy: Configuration, *, ties: bool = False) -> FrontRow:
    """Build the row of any configuration; with `ties` labels name the candidates tied with it."""
    worse, missed = front.find_shortfalls(policy), front.missed.get(policy.name, ())
    below = [f"worse than {role} in {format_list(names)}" for role, names in worse.items()]
    below += [f"outside of {format_list(missed)} on test prompts"] if missed else []
    return FrontRow(
        policy,
        tuple(policy.mean[goal.name] for goal in front.objectives),
        tuple(front.list_labels(policy, ties=ties)),
        BASELINES.get(policy.role, ""),
        tuple(below),
        frozenset().union(*worse.values()) if policy.role not in BASELINES else frozenset(),
    )


def list_rows(front: Front, most: int | None = None) -> list[FrontRow]:
    """List the members, best in the first objective first, then the baselines off the front.

    Of many members at most `most`: those that stand out, all of them, and others spread evenly.
    """
    rows = [build_front_row(front, member) for member in front.members]
    if most is not None and len(rows) > most:
        others = [row for row in rows if not row.stands_out]
        room = max(0, most - (len(rows) - len(others)))
        kept = {id(others[index * len(others) // room]) for index in range(room)}
        rows = [row for row in rows if row.stands_out or id(row) in kept]
    return rows + [build_front_row(front, b) for b in front.baselines if not b.is_on_front]


def list_front_facts(front: Front) -> list[dict[str, Any]]:
    """List each member as numbers and names, under the columns of `LoadedSweep.front`."""
    facts: list[dict[str, Any]] = []
    for member in front.members:
        row = build_front_row(front, member)
        measured = list(zip(front.objectives, row.values, strict=True))
        facts.append(
            {
                "trial": member.first,
                "name": member.name,
                "role": member.role,
                "parts": format_parts(member.parts) if member.parts else None,
                "trials": member.numbers,
                "seeds": member.seeds,
                "probability": member.probability,
                "picked_as": ", ".join(row.labels),
                "worse_than_baselines": "; ".join(row.shortfalls),
                **{f"param/{name}": value for name, value in member.params.items()},
                **{goal.name: value.mean for goal, value in measured},
                **{f"{goal.name}_se": value.se for goal, value in measured},
            }
        )
    return facts


def format_front_csv(front: Front) -> str:
    """Return `front.csv`: a row per member, best in the first objective first, with all digits."""
    facts = list_front_facts(front)
    for row, member in zip(facts, front.members, strict=True):
        row["parts"] = format_parts(member.parts, "") if member.parts else ""
    measured = [f"{goal.name}{suffix}" for goal in front.objectives for suffix in ("", "_se")]
    about = ["seeds", "probability", "role", "parts", "picked_as", "worse_than_baselines"]
    params = sorted({key for row in facts for key in row if key.startswith("param/")})
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    columns = ["trial", "name", *measured, *about, *params]
    writer.writerow([column.removeprefix("param/") for column in columns])
    for row in facts:
        writer.writerow([row.get(column, "") for column in columns])
    return file.getvalue()


def write_front_csv(directory: Path, front: Front) -> None:
    """Write `front.csv` into the sweep's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / TABLE_FILE, format_front_csv(front))


def summarize_front(front: Front) -> dict[str, Any]:
    """Return `trials`, `failed_trials`, `front` (members) and, where it has any, `hypervolume`.

    `hypervolume_interval` is its interval at 95 %, `[low, high]`.
    """
    figures: dict[str, Any] = {
        "trials": len(front.records),
        "failed_trials": sum(record.state == "failed" for record in front.records),
        "front": len(front.members),
    }
    if front.members:
        figures["hypervolume"] = front.hypervolume
        figures["hypervolume_interval"] = list(front.hypervolume_interval)
    return figures


def describe_front(front: Front) -> str:
    """Return `2 on the front, hypervolume ...`, without a full stop."""
    text = f"{len(front.members)} on the front"
    if front.members:
        volume = format_hypervolume(front.hypervolume, front.hypervolume_interval)
        text += f", hypervolume {volume}"
    return text


def describe_summary(front: Front) -> str:
    """Return `3 trials`, then what `describe_front` says."""
    return f"{format_count(len(front.records), 'trial')}, {describe_front(front)}"


def build_knee(front: Front) -> dict[str, Any]:
    """Return the knee's `name` and `test` values, and those of the untrained policy; may be {}."""
    if front.knee is None:
        return {}
    untrained, goals = find_untrained(front.baselines), front.objectives
    policies = {"test": front.knee, **({"untrained": untrained} if untrained else {})}
    values = {
        key: {goal.name: policy.mean[goal.name].mean for goal in goals}
        for key, policy in policies.items()
    }
    return {"name": front.knee.name, **values}


def describe_knee(knee: Mapping[str, Any]) -> str:
    """Return what `build_knee` found: `Knee: trial 7, correctness 0.610 (untrained 0.596), ...`."""
    untrained = knee.get("untrained", {})
    values = [
        f"{name} {format_number(value)}"
        + (f" (untrained {format_number(untrained[name])})" if name in untrained else "")
        for name, value in knee["test"].items()
    ]
    return f"Knee: {title_candidate(knee['name'])}, {', '.join(values)}"
