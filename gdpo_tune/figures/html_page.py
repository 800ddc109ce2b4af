"""Building blocks of every page: sections and figures in one HTML file that needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from shlex import quote

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
_SCRIPTS = ("drawing.js", "report.js", "choice.js", "choose_panel.js")
_BLOCKED = "This figure needs scripts, which are blocked here. Save the page, and open the file."
_LONG_NUMBER = re.compile(r"-?\d+\.\d{7,}(e-?\d+)?")


def build_page(
    title: str, head: str, sections: Iterable[str], footer: str = "", contents: str = ""
) -> str:
    """Return a whole page, plotly.js included once.

    Figures follow the reader's preference for dark or light, and are light on paper. `head`,
    `sections` and `contents`, as `build_contents` returns them, are HTML; `title` (of the window)
    and `footer` are text.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>"
        f"<style>{_read_asset('report.css')}</style><script>{get_plotlyjs()}</script></head><body>"
        f'{head}<div class="page{" with-contents" if contents else ""}">{contents}'
        f"<main>{''.join(sections)}</main></div>"
        f"<footer>{escape(footer)}</footer>"
        f"{''.join(f'<script>{_read_asset(name)}</script>' for name in _SCRIPTS)}</body></html>"
    )


def build_section(title: str, caption: str, body: str) -> str:
    """Return a part of the page with an id from its title; `caption` and `body` are HTML."""
    about = f"<p>{caption}</p>" if caption else ""
    return f'<section id="{name_section(title)}"><h2>{title}</h2>{about}{body}</section>'


def name_section(title: str) -> str:
    """Return the id of a section."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def build_contents(groups: Mapping[str, Iterable[str]]) -> str:
    """Return links to the sections of these titles, in groups; a group may have no name."""
    items: list[str] = []
    for group, titles in groups.items():
        items += [f'<li class="group">{group}</li>'] if group else []
        items += [f'<li><a href="#{name_section(title)}">{title}</a></li>' for title in titles]
    return f'<nav class="contents" aria-label="Contents"><ul>{"".join(items)}</ul></nav>'


def build_command(title: str, template: str, name: str = "knee") -> str:
    """Return a command with a button that copies it.

    The page writes into `{pick}` and `{wish}` of the template; without it, `name` is the pick.
    """
    command = template.replace("{pick}", quote(name))
    return (
        f'<div class="command"><span>{escape(title)}</span>'
        f'<code data-template="{escape(template, quote=True)}">{escape(command)}</code>'
        f'<button type="button" class="copy" aria-label="Copy: {escape(title)}">Copy</button></div>'
    )


def embed_data(name: str, text: str) -> str:
    """Return JSON as data of the page, with the id `data-` and `name`."""
    # Within a script a text may not contain "</script>" or "<!--"; JSON can escape "<".
    text = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="data-{name}">{text}</script>'


def embed_figure(
    figure: go.Figure,
    name: str,
    title: str,
    *,
    buttons: bool = True,
    min_width: int = MIN_WIDTH,
    stacks: bool = False,
    still: str = "",
) -> str:
    """Return a figure as data that the page draws, in a width that the page decides.

    Its id is `figure-` and `name`, so that equal sweeps give equal files. `title` names it for
    screen readers. `buttons` shows plotly's under the pointer. Below `min_width` pixels it scrolls;
    if it `stacks`, its panels move below one another instead. Where scripts are blocked, the page
    says so, and shows `still`, a picture as HTML.
    """
    config = json.dumps({**_CONFIG, "displayModeBar": "hover" if buttons else False})
    # A figure cannot show more than six digits, and the others are half of a large page.
    data = _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.6g}", str(figure.to_json()))
    label = f'role="region" tabindex="0" aria-label="Figure: {escape(title, quote=True)}"'
    return (
        f'<div class="wide" {label}><div class="figure" id="figure-{name}" '
        f'data-config="{escape(config, quote=True)}"{" data-stacks" if stacks else ""} '
        f'style="min-width:{min_width}px"><div class="still"><p>{_BLOCKED}</p>{still}</div></div>'
        f"</div>{embed_data(name, data)}"
    )


def build_bullets(lines: Iterable[str]) -> str:
    """Return a list of sentences; empty if there are none."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="words">{items}</ul>' if items else ""


def _read_asset(name: str) -> str:
    return files("gdpo_tune.figures").joinpath("assets", name).read_text(encoding="utf-8")
