"""The one durable record of a sweep: every trial, its values, state, cost and reason."""

from gdpo_tune.ledger.encoding import compute_violation, to_distribution
from gdpo_tune.ledger.ledger import Ledger
from gdpo_tune.ledger.study import copy_study, create_study, quiet_optuna

__all__ = [
    "Ledger",
    "compute_violation",
    "copy_study",
    "create_study",
    "quiet_optuna",
    "to_distribution",
]
