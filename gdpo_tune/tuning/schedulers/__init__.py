"""Schedulers that stop trials early: one class each, built from the ledger."""
