"""The one durable record of a sweep: every trial, its values, state, cost and reason."""

from gdpo_tune.ledger.ledger import Ledger
from gdpo_tune.ledger.opening import copy_study, create_study, silence_optuna
from gdpo_tune.ledger.trial_encoding import compute_violation, convert_to_distribution

__all__ = [
    "Ledger",
    "compute_violation",
    "convert_to_distribution",
    "copy_study",
    "create_study",
    "silence_optuna",
]
