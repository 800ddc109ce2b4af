"""What every page of ours is made of: sections and figures in one HTML file without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    # The page is for one's own eyes: nothing in it sends data anywhere.
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "sendChartToCloud"],
}
NARROWEST = 560
"""Pixels below which a figure scrolls instead of shrinking: a phone is narrower."""


def page(title: str, head: str, sections: Iterable[str], footer: str) -> str:
    """A whole page, plotly.js included once.

    Figures follow the reader's preference for dark or light, and are light on paper.

    Args:
        title: of the window.
        head: HTML above the sections.
        sections: HTML, as `section` makes it.
        footer: a line of text.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>"
        f"<style>{_asset('report.css')}</style><script>{get_plotlyjs()}</script></head><body>"
        f"{head}<main>{''.join(sections)}</main>"
        f"<footer>{escape(footer)}</footer>"
        f"<script>{_asset('report.js')}</script></body></html>"
    )


def section(title: str, caption: str, body: str) -> str:
    """A part of the page; `caption` and `body` are HTML."""
    return f"<section><h2>{title}</h2><p>{caption}</p>{body}</section>"


def drawing(
    figure: go.Figure, name: str, *, buttons: bool = True, narrowest: int = NARROWEST
) -> str:
    """A figure, as data that the page draws.

    Args:
        figure: its width is left to the page.
        name: its id is `figure-` and this, so that equal sweeps give equal files.
        buttons: whether plotly's buttons show under the pointer.
        narrowest: pixels below which it scrolls.
    """
    config = json.dumps({**_CONFIG, "displayModeBar": "hover" if buttons else False})
    # Within a script a text may not say "</script>" or "<!--"; JSON has another word for "<".
    data = _LONG.sub(_shorter, str(figure.to_json())).replace("<", "\\u003c")
    height = figure.layout.height or 400
    return (
        f'<div class="wide"><div class="figure" id="figure-{name}" '
        f'data-config="{escape(config, quote=True)}" '
        f'style="min-width:{narrowest}px;height:{height}px"></div></div>'
        f'<script type="application/json" id="data-{name}">{data}</script>'
    )


_LONG = re.compile(r"-?\d+\.\d{7,}(e-?\d+)?")


def _shorter(found: re.Match[str]) -> str:
    """A number with the digits that a picture can show: they are half of a large page."""
    return f"{float(found[0]):.6g}"


def bullets(lines: Iterable[str], kind: str = "words") -> str:
    """A list of sentences, as text."""
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _asset(name: str) -> str:
    return files("gdpo_tune.figures").joinpath("assets", name).read_text(encoding="utf-8")
