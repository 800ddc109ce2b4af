"""`correctness` of the task `gsm8k`: 1 if the answer is the right text exactly.

The answer is the text after the last `<answer>`, or all of a completion without that tag, so a bare
`42` is correct. The gold answer is normalised first: otherwise this reward and `integer` could
contradict each other. The authors' code compares with the gold answer as it is written, such as
`1,000`, which `scoring: released` chooses.

Source: `open_r1/gsm8k.py` of github.com/NVlabs/GDPO at b080e63.
"""

from gdpo_tune.tasks.answers import extract_tagged_answer, normalize_number
from gdpo_tune.tasks.base import RewardInfo, Sample


def score_exact_answer(sample: Sample) -> float:
    """Return 1.0 if the answer is the normalised `data["answer"]` exactly, else 0.0."""
    gold = normalize_number(sample.problem.data["answer"])
    return float(extract_tagged_answer(sample.completion) == gold)


def score_released_exact_answer(sample: Sample) -> float:
    """Return 1.0 if the answer is the gold answer as the data set writes it, else 0.0."""
    data = sample.problem.data
    gold = data.get("written_answer", data["answer"])
    return float(extract_tagged_answer(sample.completion) == gold)


REWARD = RewardInfo(
    "correctness",
    0,
    1,
    score_exact_answer,
    "share whose answer is the right text exactly",
    released=score_released_exact_answer,
)
