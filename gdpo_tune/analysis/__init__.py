"""What trials are worth: front, hypervolume, replicates and the choice among front members.

Everything here is a pure function of `TrialRecord`s and `Objective`s.
"""

from gdpo_tune.analysis.front import Front, HypervolumePoint, build_front
from gdpo_tune.analysis.racing import next_replicate
from gdpo_tune.analysis.replicates import Configuration, configurations
from gdpo_tune.analysis.stagnation import has_stagnated

__all__ = [
    "Configuration",
    "Front",
    "HypervolumePoint",
    "build_front",
    "configurations",
    "has_stagnated",
    "next_replicate",
]
