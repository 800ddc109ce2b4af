"""Effective share of each reward: how much of the training signal it gave."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import abbreviate_parameter, get_mode
from gdpo_tune.figures import style
from gdpo_tune.figures.curves import REWARD, Steps, list_rewards
from gdpo_tune.figures.layout import make_layout

MAX_BARS = 24


def draw_shares(front: Front, steps: Steps) -> go.Figure:
    """Draw a bar for each training on the front and the published weights, by rewards' shares.

    The share of reward k is |w_k sigma_k| over the sum of all, averaged over steps and seeds: the
    effect of a weight once the spread of its reward is counted. The best member in the first
    objective is on top; many are thinned evenly, so that they can be read.
    """
    published = [c for c in front.baselines if c.role == "published" and not c.is_on_front]
    members = [member for member in front.members if member.is_training]
    stride = math.ceil(len(members) / MAX_BARS) or 1
    listed = [*members[::stride], *published]
    shown = [c for c in reversed(listed) if any(number in steps for number in c.numbers)]
    names = [
        f"trial {c.first} ({get_mode(c.params)}{', published' if c.role == 'published' else ''})"
        for c in shown
    ]
    figure = go.Figure()
    for index, reward in enumerate(list_rewards(steps)):
        shares = [_average_share(configuration, steps, reward) for configuration in shown]
        color = style.REWARDS[index % len(style.REWARDS)]
        figure.add_bar(
            y=names,
            x=shares,
            orientation="h",
            name=abbreviate_parameter(reward),
            marker={"color": color, "line": {"color": style.PAPER, "width": 1.5}},
            text=[f"{share:.0%}" if share >= 0.06 else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertemplate="%{y}: %{x:.1%}<extra>" + reward + "</extra>",
        )
    figure.update_layout(**make_layout(120 + 30 * max(len(shown), 1)), barmode="stack", bargap=0.35)
    figure.update_layout(legend_traceorder="normal")
    figure.update_xaxes(title_text="share of the training signal", tickformat=".0%", range=[0, 1])
    figure.update_yaxes(ticks="", showline=False)
    return figure


def _average_share(configuration: Configuration, steps: Steps, reward: str) -> float:
    metric = f"{REWARD}{reward}/share"
    values = [
        step.metrics[metric]
        for number in configuration.numbers
        for step in steps.get(number, [])
        if metric in step.metrics
    ]
    return sum(values) / len(values) if values else 0.0
