"""Panels of a figure, whatever their number."""

import itertools

import pytest

from gdpo_tune.figures.layout import GAP_UP, get_panel_size, make_panels


@pytest.mark.parametrize("objectives", [2, 3, 4, 7, 8, 10])
def test_rows_of_panels_have_their_size_in_pixels(objectives: int):
    """plotly.py#2273: spacing as a share of the figure grows with the rows, and is then refused."""
    count = objectives * (objectives - 1) // 2
    figure, cells = make_panels(count)
    assert len(cells) == count
    layout = figure.layout
    inner = layout.height - layout.margin.t - layout.margin.b
    domains = {tuple(layout[each].domain) for each in layout if str(each).startswith("yaxis")}
    rows = sorted(domains)
    for low, high in rows:
        assert (high - low) * inner == pytest.approx(get_panel_size(count)[1], abs=1)
    for below, above in itertools.pairwise(rows):
        assert (above[0] - below[1]) * inner == pytest.approx(GAP_UP, abs=1)


def test_a_tick_has_the_notation_of_the_text():
    """mlflow#1753: plotly's default writes `60µ` and `5B`, where tables have 6e-5."""
    figure, _ = make_panels(2)
    axes = figure.layout.template.layout
    assert (axes.xaxis.exponentformat, axes.yaxis.exponentformat) == ("e", "e")
