"""`correctness` of the task `code`: 1 if every test passes, hidden ones included.

A trial with `partial_credit` is trained on the share of tests that pass.
"""

from gdpo_tune.tasks.base import RewardInfo, Sample


def score_all_passed(sample: Sample) -> float:
    """Return 1.0 if the program passes every test, else 0.0."""
    return float(sample.result is not None and sample.result.passed)


def score_share_passed(sample: Sample) -> float:
    """Return the share of tests that the program passes."""
    return 0.0 if sample.result is None else sample.result.share


REWARD = RewardInfo(
    "correctness",
    0,
    1,
    score_all_passed,
    "share of completions whose code passes all tests",
    partial=score_share_passed,
)
