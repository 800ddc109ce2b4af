"""Rewards, one file each: a pure function of one `Sample`, and a `REWARD` with name and range."""
