"""Pages as one HTML file that needs no network: templates, and figures as data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from shlex import quote
from typing import Any

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from gdpo_tune.core import text as formatting
from gdpo_tune.figures import style
from gdpo_tune.results.wording import describe_role, name_state

CONFIG = {
    "displaylogo": False,
    "responsive": True,
    # Nothing in the page may send data anywhere.
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "sendChartToCloud"],
}
MIN_WIDTH = 560
"""Pixels below which a figure scrolls instead of shrinking: a phone is narrower."""
BLOCKED = "This figure needs scripts, which are blocked here. Save the page, and open the file."
SCRIPTS = ("drawing.js", "report.js", "choice.js", "choose_panel.js")
LONG_NUMBER = re.compile(r"-?\d+\.\d{7,}(e-?\d+)?")
FILTERS: dict[str, Callable[[Any], Any]] = {
    "slug": lambda title: re.sub(r"\W+", "-", title.lower()).strip("-"),
    "quote": quote,
    "dash": lambda _: formatting.NO_VALUE,
    "short": formatting.abbreviate_parameter,
    "number": formatting.format_number,
    "estimate": formatting.format_estimate,
    "parameter": formatting.format_parameter,
    "duration": formatting.format_duration,
    "mode": formatting.get_mode,
    "mode_color": lambda mode: style.get_mark(mode).color,
    "color": lambda policy: style.get_configuration_mark(policy).color,
    "role": describe_role,
    "state": name_state,
    "prompts": lambda columns: dict.fromkeys(prompt for *_, found in columns for prompt in found),
}


@cache
def get_parts() -> Any:
    """Return the macros of `report.html.jinja`; they escape what they are given."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gdpo_tune.figures"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters.update(FILTERS)
    return environment.get_template("report.html.jinja").module


def build_page(
    title: str,
    head: Markup,
    sections: Iterable[Markup],
    footer: str = "",
    contents: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return a whole page, plotly.js included once.

    Figures follow the reader's preference for dark or light, and are light on paper. `contents` are
    titles of sections in groups; a group may have no name.
    """
    parts = get_parts()
    style_sheet, *scripts = map(_read_asset, ("report.css", *SCRIPTS))
    links = parts.contents(contents) if contents else ""
    plotly = Markup(get_plotlyjs())
    page = parts.page(title, head, [*sections], links, footer, style_sheet, plotly, scripts)
    return str(page).strip()  # no Markup, whose methods escape


def embed_data(content: Any) -> Markup:
    """Return JSON for a script of the page, in which no text may end the script."""
    return Markup(
        (content if isinstance(content, str) else json.dumps(content)).replace("<", "\\u003c")
    )


def embed_figure(
    figure: go.Figure,
    name: str,
    title: str,
    *,
    buttons: bool = True,
    min_width: int = MIN_WIDTH,
    stacks: bool = False,
    still: str = "",
) -> Markup:
    """Return a figure as data that the page draws, in a width that the page decides.

    Its id is `figure-` and `name`, so that equal sweeps give equal files. `title` names it for
    screen readers. `buttons` shows plotly's under the pointer. Below `min_width` pixels it scrolls;
    if it `stacks`, its panels move below one another instead. Where scripts are blocked, the page
    says so, and shows `still`, a picture as HTML.
    """
    config = json.dumps({**CONFIG, "displayModeBar": "hover" if buttons else False})
    # A figure cannot show more than six digits, and the others are half of a large page.
    data = LONG_NUMBER.sub(lambda match: f"{float(match[0]):.6g}", str(figure.to_json()))
    picture = Markup(still)
    return get_parts().figure(
        name, title, config, embed_data(data), min_width, stacks, picture, BLOCKED
    )


def _read_asset(name: str) -> Markup:
    return Markup(files("gdpo_tune.figures").joinpath("assets", name).read_text(encoding="utf-8"))
