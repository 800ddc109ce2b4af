"""What stops a trial before its end: one file a scheduler, each with a `build(ledger)`."""
