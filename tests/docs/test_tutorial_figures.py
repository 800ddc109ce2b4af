"""The worked examples of the page are what training computes."""

import pytest
import tutorial_figures

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "gdpo_in_ten_minutes.md").read_text()


@pytest.mark.parametrize(
    "table", [tutorial_figures.tabulate_lost, tutorial_figures.tabulate_ranges]
)
def test_the_page_has_the_computed_examples(table):
    assert table() in PAGE


def test_the_page_has_the_front_of_the_stored_sweep(tmp_path):
    front = tutorial_figures.read_stored_front()
    assert tutorial_figures.tabulate_front(front) in PAGE
    tutorial_figures.draw_front(front, tmp_path / "front.png")
    tutorial_figures.draw_advantages(tmp_path / "advantages.png")
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


def test_the_examples_show_what_the_text_says():
    same, kept = (
        tutorial_figures.compute(tutorial_figures.LOST, mode) for mode in ("grpo", "gdpo")
    )
    assert same[:4] == same[4:]
    assert kept[0] == pytest.approx(2 * kept[4], abs=0.02)
    mixed = tutorial_figures.compute(tutorial_figures.MIXED, "grpo")
    assert mixed == tutorial_figures.compute(tutorial_figures.EQUAL, "grpo", (6, 1))
    equal = tutorial_figures.compute(tutorial_figures.EQUAL, "gdpo")
    assert equal == tutorial_figures.compute(tutorial_figures.MIXED, "gdpo")
