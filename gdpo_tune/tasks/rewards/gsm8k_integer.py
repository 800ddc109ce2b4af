"""`integer` of the task `gsm8k`: 1 if the answer consists of ASCII digits.

As in the method's GSM8K recipe, `-5`, `1,000` and `18.0` are no integers. One thing differs: its
`str.isdigit()` also takes superscripts, circled digits and the digits of other scripts, which
`scoring: released` chooses.

Source: `open_r1/gsm8k.py` of github.com/NVlabs/GDPO at b080e63.
"""

from gdpo_tune.tasks.answers import extract_tagged_answer
from gdpo_tune.tasks.base import RewardInfo, Sample


def score_integer(sample: Sample) -> float:
    """Return 1.0 if the answer consists of ASCII digits alone, else 0.0."""
    answer = extract_tagged_answer(sample.completion)
    return float(answer.isascii() and answer.isdigit())


def score_released_integer(sample: Sample) -> float:
    """Return 1.0 if the answer consists of what Unicode calls digits, else 0.0."""
    return float(extract_tagged_answer(sample.completion).isdigit())


REWARD = RewardInfo(
    "integer",
    0,
    1,
    score_integer,
    "share whose answer consists of ASCII digits",
    released=score_released_integer,
)
