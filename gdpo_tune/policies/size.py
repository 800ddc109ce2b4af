"""Moved to `load_policy`; this file goes once every room imports from there."""

from gdpo_tune.policies.load_policy import parameters as parameters
