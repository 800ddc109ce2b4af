"""The one durable record of a sweep: every trial, its values, state, cost and reason."""

from gdpo_tune.ledger.format import distribution, excess
from gdpo_tune.ledger.ledger import Ledger
from gdpo_tune.ledger.study import copied, create_study, quiet_optuna

__all__ = ["Ledger", "copied", "create_study", "distribution", "excess", "quiet_optuna"]
