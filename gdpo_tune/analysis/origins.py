"""Origins of a front: final policies, checkpoints and merges; what each adds and costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.pareto import compute_hypervolume
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.trials import Cost, sum_costs

Kind = Literal["ends", "checkpoints", "merges"]
KINDS: tuple[Kind, ...] = ("ends", "checkpoints", "merges")


@dataclass(frozen=True)
class Origin:
    """One kind of candidates: its part of the front, and its cost."""

    kind: Kind
    trials: int
    """Trials of this kind, replicates included, in any state."""
    members: int
    """Configurations of this kind on the front."""
    hypervolume: float
    """Hypervolume of the candidates of this kind and of the kinds before it."""
    share: float
    """Part of the front's hypervolume that this kind adds to those before it; 0 without any."""
    cost: Cost
    """Cost of its trials together."""


def summarize_origins(front: Front) -> tuple[Origin, ...]:
    """Summarize the kinds of candidates that a sweep has, in the order of `KINDS`.

    The shares are nested and sum to 1: ends alone, then what checkpoints add, then what merges add
    to both. Empty for a sweep without checkpoints and merges, where ends are all there is.
    """
    kinds = {r.number: KINDS[min(len(r.parts), 2)] for r in front.records if r.role != "untrained"}
    if set(kinds.values()) <= {"ends"}:
        return ()
    origins: list[Origin] = []
    points: list[tuple[float, ...]] = []
    before = 0.0
    for kind in KINDS:
        numbers = {number for number, own in kinds.items() if own == kind}
        ranked = [c for c in front.configurations if c.rank >= 0 and c.first in numbers]
        points += [c.get_values(front.objectives) for c in ranked]
        volume = compute_hypervolume(points, front.objectives)
        share = (volume - before) / front.hypervolume if front.hypervolume else 0.0
        cost = sum_costs([r.cost for r in front.records if r.number in numbers])
        members = sum(c.is_on_front for c in ranked)
        origins.append(Origin(kind, len(numbers), members, volume, share, cost))
        before = volume
    return tuple(origin for origin in origins if origin.trials)


def find_parents(front: Front, candidate: Configuration) -> list[Configuration]:
    """Find the measured candidates that a merge or a checkpoint consists of, in its order.

    A part is missing if it was never evaluated on test prompts.
    """
    owners: dict[tuple[int, int | None], Configuration] = {}
    last_steps = {record.number: record.last_step for record in front.records}
    for configuration in front.configurations:
        if len(configuration.parts) == 1:
            part = configuration.parts[0]
            owners[part.trial, part.step] = configuration
        elif configuration.is_training:
            owners |= {(n, last_steps[n]): configuration for n in configuration.numbers}
    found = [owners.get((part.trial, part.step)) for part in candidate.parts]
    return [parent for parent in found if parent is not None and parent is not candidate]
