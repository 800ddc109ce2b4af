"""Importance of each parameter for each objective, with its interval."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.effects import Effects, Strength
from gdpo_tune.core.text import abbreviate_parameter
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_layout

_OPACITIES: dict[Strength, float] = {"clear": 1.0, "unclear": 0.5, "none": 0.15}
_WORDS: dict[Strength, str] = {
    "clear": "",
    "unclear": "<br>unclear",
    "none": "<br>no detectable effect",
}


def draw_importance(effects: Effects) -> go.Figure:
    """Draw a panel per objective and a bar per parameter, pale without a detectable effect."""
    objectives = list(dict.fromkeys(effect.objective for effect in effects.estimates))
    parameters = list(dict.fromkeys(effect.parameter for effect in effects.estimates))[::-1]
    figure: go.Figure = make_subplots(
        rows=1,
        cols=len(objectives),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        column_titles=[abbreviate_parameter(name) for name in objectives],
    )
    by_pair = {(effect.objective, effect.parameter): effect for effect in effects.estimates}
    color = style.REWARDS[0]
    for column, objective in enumerate(objectives, start=1):
        shown = [by_pair[objective, parameter] for parameter in parameters]
        figure.add_bar(
            x=[effect.importance for effect in shown],
            y=[abbreviate_parameter(effect.parameter) for effect in shown],
            orientation="h",
            marker={
                "color": [style.fade(color, _OPACITIES[effect.strength]) for effect in shown],
                "line": {"color": color, "width": 1.2},
            },
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [effect.interval.high - effect.importance for effect in shown],
                "arrayminus": [effect.importance - effect.interval.low for effect in shown],
                "color": style.MUTED,
                "thickness": 1.3,
                "width": 4,
            },
            text=[
                f"95 %: {effect.interval.low:.0%} to {effect.interval.high:.0%}"
                f"{_WORDS[effect.strength]}"
                for effect in shown
            ],
            textposition="none",
            hovertemplate="%{y}: %{x:.0%}<br>%{text}<extra></extra>",
            showlegend=False,
            row=1,
            col=column,
        )
    figure.update_layout(**make_layout(140 + 34 * len(parameters), t=64, b=56), bargap=0.4)
    # No tick at 100 %: its label would touch the next panel's 0 %.
    figure.update_xaxes(
        title_text="share of variance",
        tickformat=".0%",
        tickvals=[0, 0.2, 0.4, 0.6, 0.8],
        range=[0, 1],
    )
    return figure
