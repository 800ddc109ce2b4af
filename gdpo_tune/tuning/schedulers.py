"""Base class of the schedulers, and what they read from a rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from gdpo_tune.core.trials import Objective, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec

Verdict = Literal["continue", "stop", "pause"]
MAX_NAMED = 3
"""Number of dominating trials that an explanation names."""


class Scheduler:
    """Scheduler `fifo`: every trial runs to its end. Subclasses override its decisions.

    They leave trials of other roles than `search`, such as baselines and replicates, to their end.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the steps at which a trial must be evaluated."""
        return ()

    def decide(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Return the verdict on a trial after an evaluation, `rung`, that is in the ledger.

        Evaluations at other steps than those of `list_evaluation_steps` come here too.
        A new process decides the rungs of open trials again. A second call for the same rung gives
        the same answer.
        """
        return "continue"

    def list_stopped(self) -> Sequence[int]:
        """Return the waiting trials that end now, without a test evaluation."""
        return ()

    def find_promotable(self) -> int | None:
        """Return the waiting trial that may continue now."""
        return None

    def find_ending(self) -> tuple[int, str] | None:
        """Return a waiting trial that ends where it waits, and why; no other one can go on."""
        return None

    def explain(self, rung: Rung) -> str:
        """Explain in one line why a trial does not continue from a rung."""
        return f"stopped at rung {rung.completions:,}"


def read_values(spec: SweepSpec, rung: Rung) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the M values of the objectives, and the C violations; 0 or less: it is met."""
    means = {name: metric.mean for name, metric in rung.validation.items()}
    violations = (bound.compute_violation(means[name]) for name, bound in spec.constraints.items())
    return tuple(means[name] for name in spec.objectives), tuple(violations)


def tighten_references(spec: SweepSpec) -> tuple[Objective, ...]:
    """Return the objectives, with a constraint on one of them as its reference.

    Hypervolume beyond a constraint is worth nothing. A parent may break the constraint, because a
    merge of it may meet it.
    """
    stricter = {("maximize", ">="): max, ("minimize", "<="): min}
    goals = list(spec.list_objectives())
    for index, goal in enumerate(goals):
        bound = spec.constraints.get(goal.name)
        if bound is not None and (choose := stricter.get((goal.direction, bound.op))):
            goals[index] = replace(goal, reference=choose(goal.reference, bound.limit))
    return tuple(goals)
