"""`bug_free`, an optional reward of the task `code`: 1 for a program that does not break.

It is there, compiles, raises in no test and stays within the limits of the sandbox. Its answers may
be wrong.
"""

from gdpo_tune.tasks.base import RewardInfo, Sample


def score_bug_free(sample: Sample) -> float:
    """Return 1.0 if the program does not break, else 0.0."""
    return float(sample.result is not None and not sample.result.has_bug)


REWARD = RewardInfo("bug_free", 0, 1, score_bug_free, "share whose program does not break")
