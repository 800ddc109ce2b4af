"""Pages as one HTML file that needs no network: the parts of the template, and figures as data."""

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

from gdpo_tune.core import text
from gdpo_tune.figures import style
from gdpo_tune.results.wording import ORIGINS, describe_role, name_state

CONFIG = {
    "displaylogo": False,
    "responsive": True,
    # Nothing in the page may send data anywhere.
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "sendChartToCloud"],
}
STACKED = ("pairs", "sides")
"""Figures whose panels move below one another where the page is narrow."""
MIN_WIDTHS = {**dict.fromkeys(STACKED, 300), **dict.fromkeys(("slices", "progress", "all"), 700)}
MIN_WIDTH = 560
"""Pixels below which a figure scrolls instead of shrinking: a phone is narrower."""
LABELS, MIN_COLUMN, MIN_GAP = 200, 110, 85
"""Pixels for the labels beside panels, for a column of them, and between two axes of parameters."""
SCRIPTS = ("drawing.js", "report.js", "choice.js", "choose_panel.js")
LONG_NUMBER = re.compile(r"-?\d+\.\d{7,}(e-?\d+)?")


def _make_slug(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


FILTERS: dict[str, Callable[..., Any]] = {
    "slug": _make_slug,
    "quote": quote,
    "short": text.abbreviate_parameter,
    "number": text.format_number,
    "estimate": text.format_estimate,
    "parameter": text.format_parameter,
    "percent": text.format_percent,
    "duration": text.format_duration,
    "mode": text.get_mode,
    "mode_mark": style.get_mark,
    "mark": style.get_configuration_mark,
    "role": describe_role,
    "origin": ORIGINS.__getitem__,
    "state": name_state,
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
    values = {"NO_VALUE": text.NO_VALUE}
    return environment.get_template("report.html.jinja", globals=values).module


def build_page(
    title: str,
    head: Markup,
    sections: Iterable[Markup],
    footer: str = "",
    contents: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return a whole page, plotly.js included once; `contents` are titles of sections in groups."""
    parts, folder = get_parts(), files("gdpo_tune.figures").joinpath("assets")
    style_sheet, *scripts = (
        Markup(folder.joinpath(name).read_text(encoding="utf-8"))
        for name in ("report.css", *SCRIPTS)
    )
    links = parts.contents(contents) if contents else ""
    plotly = Markup(get_plotlyjs())
    page = parts.page(title, head, [*sections], links, footer, style_sheet, plotly, scripts)
    return str(page).strip()  # no Markup, whose methods escape


def embed_data(content: Any) -> Markup:
    """Return JSON for a script of the page, in which no text may end the script."""
    data = content if isinstance(content, str) else json.dumps(content)
    return Markup(data.replace("<", "\\u003c"))


def embed_figure(figure: go.Figure, name: str, title: str, still: str = "") -> Markup:
    """Return a figure as data that the page draws, in a width that the page decides.

    Its id has `name`, so that equal sweeps give equal files; `title` is for screen readers. Where
    scripts are blocked, the page says so, and shows `still`, a picture as HTML.
    """
    # Its own axes are dragged in the figure of all parameters, so it has no buttons.
    config = json.dumps({**CONFIG, "displayModeBar": False if name == "all" else "hover"})
    # A figure cannot show more than six digits, and the others are half of a large page.
    data = LONG_NUMBER.sub(lambda match: f"{float(match[0]):.6g}", str(figure.to_json()))
    width = MIN_WIDTHS.get(name, MIN_WIDTH)
    if name not in STACKED:
        columns = len({axis.domain for axis in figure.select_xaxes()})
        axes = len(getattr(figure.data[0], "dimensions", ()))
        width = max(width, LABELS + MIN_COLUMN * columns, MIN_GAP * axes)
    return get_parts().figure(
        name, title, config, embed_data(data), width, name in STACKED, Markup(still)
    )
