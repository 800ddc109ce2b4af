"""Publication of a sweep's policies, and of its numbers, on the Hub."""
