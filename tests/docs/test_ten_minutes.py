"""The worked examples of the page are what training computes."""

import pytest
import ten_minutes

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "gdpo_in_ten_minutes.md").read_text()


@pytest.mark.parametrize("table", [ten_minutes.tabulate_lost, ten_minutes.tabulate_ranges])
def test_the_page_has_the_computed_examples(table):
    assert table() in PAGE


def test_the_page_has_the_front_of_the_stored_sweep(tmp_path):
    front = ten_minutes.read_stored_front()
    assert ten_minutes.tabulate_front(front) in PAGE
    ten_minutes.draw_front(front, tmp_path / "front.png")
    ten_minutes.draw_advantages(tmp_path / "advantages.png")
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


def test_the_examples_show_what_the_text_says():
    same, kept = (ten_minutes.compute(ten_minutes.LOST, mode) for mode in ("grpo", "gdpo"))
    assert same[:4] == same[4:]
    assert kept[0] == pytest.approx(2 * kept[4], abs=0.02)
    mixed = ten_minutes.compute(ten_minutes.MIXED, "grpo")
    assert mixed == ten_minutes.compute(ten_minutes.EQUAL, "grpo", (6, 1))
    equal = ten_minutes.compute(ten_minutes.EQUAL, "gdpo")
    assert equal == ten_minutes.compute(ten_minutes.MIXED, "gdpo")
