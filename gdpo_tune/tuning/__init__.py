"""The search: Optuna proposes, Ray places trials, the ledger remembers. The only room with Ray."""
