"""`format` of the task `gsm8k`: 1 for a think block, a line break and an answer block.

The authors' code does not count the think tags, which `scoring: released` chooses.

Source: `open_r1/gsm8k.py` of github.com/NVlabs/GDPO at b080e63.
"""

import re

from gdpo_tune.tasks.base import RewardInfo, Sample

_BLOCKS = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", flags=re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def score_gsm8k_format(sample: Sample) -> float:
    """Return 1.0 for the two blocks with one line break between, each tag once, else 0.0.

    As in Python's `$`, a single line break may follow.
    """
    text = sample.completion
    once = all(text.count(tag) == 1 for tag in _TAGS)
    return float(once and _BLOCKS.match(text) is not None)


def score_released_gsm8k_format(sample: Sample) -> float:
    """Return 1.0 for the two blocks with one line break between, answer tags once, else 0.0."""
    text = sample.completion
    once = text.count("<answer>") == text.count("</answer>") == 1
    return float(once and _BLOCKS.match(text) is not None)


REWARD = RewardInfo(
    "format",
    0,
    1,
    score_gsm8k_format,
    "share with a think line and an answer line",
    released=score_released_gsm8k_format,
)
