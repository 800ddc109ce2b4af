"""The search: Optuna proposes, Ray places trials, the ledger records. Only this room uses Ray."""
