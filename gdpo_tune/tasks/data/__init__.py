"""Prompts from a data set: read rows, map each to a problem, deal them out to the splits."""

from gdpo_tune.tasks.data.dataset import check_data, describe_data, select_problems

__all__ = ["check_data", "describe_data", "select_problems"]
