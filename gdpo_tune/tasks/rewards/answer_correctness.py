"""`correctness` of the task `math`: 1 for the right answer, numbers compared by value."""

from gdpo_tune.tasks.answers import extract_answer, normalize_number
from gdpo_tune.tasks.base import RewardInfo, Sample


def is_same_answer(answer: str, gold: str) -> bool:
    """Return whether two answers agree once numbers are written plainly."""
    return normalize_number(answer) == normalize_number(gold)


def score_answer(sample: Sample) -> float:
    """Return 1.0 if the completion's answer is `data["answer"]`, else 0.0."""
    return float(is_same_answer(extract_answer(sample.completion), sample.problem.data["answer"]))


REWARD = RewardInfo("correctness", 0, 1, score_answer, "share of completions with the right answer")
