"""The one durable record of a sweep: every trial, its values, state, cost and reason."""

from gdpo_tune.ledger.ledger import Ledger

__all__ = ["Ledger"]
