"""`format` of the tasks `code` and `math`: 1 for one think block and then one answer block."""

import re

from gdpo_tune.tasks.base import RewardInfo, Sample

_BLOCKS = re.compile(
    r"<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", flags=re.DOTALL
)
_TAG = re.compile(r"</?(?:think|answer)>")


def score_block_format(sample: Sample) -> float:
    """Return 1.0 for exactly one think block and then exactly one answer block, else 0.0.

    White space may stand between and after the blocks, nothing else. The think block may be empty,
    so that this reward does not work against a short completion.
    """
    blocks = _BLOCKS.fullmatch(sample.completion.lstrip())
    if blocks is None:
        return 0.0
    inner = blocks["think"] + blocks["answer"]
    return 0.0 if _TAG.search(inner) else 1.0


REWARD = RewardInfo(
    "format", 0, 1, score_block_format, "share with exactly one think and one answer block"
)
