import pytest

from gdpo_tune import rewards
from tests.support.data import score_one

F = "def f(x): return x"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (f"<think>1+1=2</think><answer>{F}</answer>", 1),
        (f"<think></think><answer>{F}</answer>", 1),
        (f"<think>a\nb</think>\n<answer>\n{F}\n</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        (f"<think>1+1=2<answer>{F}</answer>", 0),
        (f"<think></think><answer>{F}", 0),
        (f"<think></think><answer>{F}</answer> I hope this helps.", 0),
        (f"Sure. <think></think><answer>{F}</answer>", 0),
        (f"<think></think>so<answer>{F}</answer>", 0),
        (f"<think></think><think></think><answer>{F}</answer>", 0),
        (f"<think></think><answer>{F}</answer><answer>{F}</answer>", 0),
        (f"<think><think></think></think><answer>{F}</answer>", 0),
        (f"<think>the <answer> tag</think><answer>{F}</answer>", 0),
        (f"<answer>{F}</answer><think></think>", 0),
        (f"<answer>{F}</answer>", 0),
        (F, 0),
        ("", 0),
    ],
)
def test_block_format(completion, expected):
    assert score_one(rewards.block_format, completion) == expected


@pytest.mark.parametrize(("length", "expected"), [(1, 1), (25, 1), (26, 1), (27, 0), (64, 0)])
def test_length_includes_the_limit(length, expected):
    assert score_one(rewards.length, "", length, 26) == expected
