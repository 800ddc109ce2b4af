"""Prompts from a data set: read rows, map each to a problem, deal them out to the splits."""
