"""`length`: 1 for a completion of at most `training.length_limit` tokens, else 0."""

from gdpo_tune.tasks.base import RewardInfo, Sample, TaskMetric


def score_length(sample: Sample) -> float:
    """Return 1.0 if the completion is within the limit, else 0.0."""
    return float(sample.tokens <= sample.length_limit)


REWARD = RewardInfo("length", 0, 1, score_length, "share of completions within the length limit")
MEAN_LENGTH = TaskMetric(
    "minimize", 0, float("inf"), "mean tokens of a completion", lambda sample: float(sample.tokens)
)
"""The held-out metric `mean_length`."""
