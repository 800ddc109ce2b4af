"""What trials are worth: front, hypervolume, replicates and the choice among front members.

Everything here is a pure function of `TrialRecord`s and `Objective`s.
"""

from gdpo_tune.analysis.front import Front, HypervolumePoint, build_front
from gdpo_tune.analysis.replicates import Configuration, configurations, next_replicate

__all__ = [
    "Configuration",
    "Front",
    "HypervolumePoint",
    "build_front",
    "configurations",
    "next_replicate",
]
