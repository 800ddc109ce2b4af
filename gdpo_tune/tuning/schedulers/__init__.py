"""Schedulers that stop trials early: one file each, with a `build(ledger)`."""
