"""Publication of a sweep's policies, and of its record, on the Hub."""
