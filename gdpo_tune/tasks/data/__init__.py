"""Prompts from a data set: read rows, map each to a problem, assign it to a split."""
