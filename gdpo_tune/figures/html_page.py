"""Building blocks of every page: sections and figures in one HTML file that needs no network."""

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
    # Nothing in the page may send data anywhere.
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "sendChartToCloud"],
}
MIN_WIDTH = 560
"""Pixels below which a figure scrolls instead of shrinking: a phone is narrower."""
_LONG_NUMBER = re.compile(r"-?\d+\.\d{7,}(e-?\d+)?")


def build_page(title: str, head: str, sections: Iterable[str], footer: str = "") -> str:
    """Return a whole page, plotly.js included once.

    Figures follow the reader's preference for dark or light, and are light on paper. `head` and
    `sections` are HTML, `title` (of the window) and `footer` are text.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>"
        f"<style>{_read_asset('report.css')}</style><script>{get_plotlyjs()}</script></head><body>"
        f"{head}<main>{''.join(sections)}</main>"
        f"<footer>{escape(footer)}</footer>"
        f"<script>{_read_asset('report.js')}</script></body></html>"
    )


def build_section(title: str, caption: str, body: str) -> str:
    """Return a part of the page; `caption` and `body` are HTML."""
    return f"<section><h2>{title}</h2><p>{caption}</p>{body}</section>"


def embed_figure(
    figure: go.Figure, name: str, *, buttons: bool = True, min_width: int = MIN_WIDTH
) -> str:
    """Return a figure as data that the page draws, in a width that the page decides.

    Its id is `figure-` and `name`, so that equal sweeps give equal files. `buttons` shows plotly's
    under the pointer; below `min_width` pixels it scrolls.
    """
    config = json.dumps({**_CONFIG, "displayModeBar": "hover" if buttons else False})
    # A figure cannot show more than six digits, and the others are half of a large page.
    data = _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.6g}", str(figure.to_json()))
    # Within a script a text may not contain "</script>" or "<!--"; JSON can escape "<".
    data = data.replace("<", "\\u003c")
    return (
        f'<div class="wide"><div class="figure" id="figure-{name}" '
        f'data-config="{escape(config, quote=True)}" '
        f'style="min-width:{min_width}px;height:{figure.layout.height or 400}px"></div></div>'
        f'<script type="application/json" id="data-{name}">{data}</script>'
    )


def build_bullets(lines: Iterable[str]) -> str:
    """Return a list of sentences; empty if there are none."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="words">{items}</ul>' if items else ""


def _read_asset(name: str) -> str:
    return files("gdpo_tune.figures").joinpath("assets", name).read_text(encoding="utf-8")
