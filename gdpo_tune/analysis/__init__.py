"""Fronts, hypervolumes, replicates and comparisons, computed from the records of trials.

Every function is pure: it reads `TrialRecord`s and `Objective`s and writes nothing.
"""
