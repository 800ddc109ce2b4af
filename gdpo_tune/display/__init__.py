"""Terminal output: the running sweep, and summaries at its end."""
