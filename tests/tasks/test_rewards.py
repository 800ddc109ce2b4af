import pytest

from gdpo_tune import rewards
from tests.support.data import score_one
from tests.support.tables import read_table


@pytest.mark.parametrize(("completion", "expected"), read_table("programs")["blocks"])
def test_block_format(completion, expected):
    assert score_one(rewards.block_format, completion) == expected


@pytest.mark.parametrize(("length", "expected"), [(1, 1), (25, 1), (26, 1), (27, 0), (64, 0)])
def test_length_includes_the_limit(length, expected):
    assert score_one(rewards.length, "", length, 26) == expected
