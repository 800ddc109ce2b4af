"""Ray: the cluster, the trials that run on it, and what happens when parts of it fail."""
