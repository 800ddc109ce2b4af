"""Prompts from a data set: read rows, map each to a problem, deal them out to the splits."""

from gdpo_tune.tasks.data.dataset import FromData, check_data, describe, problems_of

__all__ = ["FromData", "check_data", "describe", "problems_of"]
