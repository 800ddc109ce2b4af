"""What trials cost stands among their metrics, where the sweep judges by it.

It is written there, since later starts may give a trial other resources, and filled in when read,
since later starts may judge by costs that nobody asked for when the trial was run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gdpo_tune.core.costs import priced
from gdpo_tune.core.trials import Cost, Estimate, Outcome
from gdpo_tune.spec import SweepSpec


def outcome_with_costs(outcome: Outcome, spec: SweepSpec) -> Outcome:
    """The outcome of a trial, on both splits with the cost that it had in the end."""
    return replace(
        outcome,
        validation=with_costs(outcome.validation, outcome.cost, spec),
        test=with_costs(outcome.test, outcome.cost, spec),
    )


def with_costs(
    measured: Mapping[str, Estimate], cost: Cost, spec: SweepSpec
) -> dict[str, Estimate]:
    """Metrics and those costs that objectives or constraints of the sweep name.

    A cost that is among the metrics stays as it is.
    """
    return priced(measured, cost, spec.judged, spec.resources.in_all)
