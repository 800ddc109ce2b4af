"""The report's panel that chooses a policy: a slider per limit, a preference, and the answer."""

from __future__ import annotations

import json
from html import escape
from shlex import quote
from typing import TYPE_CHECKING

from gdpo_tune.analysis.front import Front
from gdpo_tune.figures.choices import Slider, build_choices, list_preferences, list_sliders
from gdpo_tune.figures.html_page import build_command, embed_data

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def build_choose_panel(spec: SweepSpec, front: Front) -> str:
    """Return the controls with their data; empty while the front is empty.

    assets/choose_panel.js fills the answer and the commands.
    """
    if not front.members:
        return ""
    sliders = list_sliders(spec, front)
    controls = "".join(_build_slider(slider, index) for index, slider in enumerate(sliders))
    options = "".join(
        f'<option value="{escape(rule, quote=True)}">{escape(name)}</option>'
        for rule, name in list_preferences(front).items()
    )
    location = quote(str(spec.address or spec.directory.absolute()))
    pick = build_command(
        "Pick it on the command line", f"python -m gdpo_tune.report {location} --pick {{pick}}"
    )
    merge = build_command(
        "Search for a merge within these limits", f"python -m gdpo_tune.merge {location} {{wish}}"
    )
    data = embed_data("choices", json.dumps(build_choices(spec, front)))
    return (
        '<form class="choose" id="choose" aria-labelledby="choose-title" autocomplete="off">'
        '<h3 id="choose-title">Choose</h3>'
        f'{controls}<div class="limit"><label for="prefer">among those that fit, prefer</label>'
        f'<select id="prefer">{options}</select></div>'
        '<p id="choose-answer" role="status"></p>'
        '<p><button type="button" id="choose-loosen" hidden>Loosen</button> '
        '<button type="reset" id="choose-reset" hidden>Reset</button></p>'
        f'{pick}<div id="choose-merge" hidden>{merge}</div></form>{data}'
    )


def _build_slider(slider: Slider, index: int) -> str:
    """Return a slider and a number field of the same limit; an empty field is no limit."""
    label, ends = escape(slider.label), f'min="{slider.low!r}" max="{slider.high!r}"'
    step = f'step="{slider.step!r}"'
    return (
        f'<div class="limit" data-limit="{index}"><label for="limit-{index}">{label}</label>'
        f'<input type="range" id="limit-{index}" {ends} {step} value="{slider.loosest!r}">'
        f'<input type="number" step="any" placeholder="any" aria-label="{label}: exact value">'
        "</div>"
    )
