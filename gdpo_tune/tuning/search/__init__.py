"""Proposals: the plan of a sweep, the samplers, and the study that they read."""
