"""The page beside an exported file: what it leaves to a person, and what will differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gdpo_tune.core.trials import Objective
from gdpo_tune.exporters.base import Exported
from gdpo_tune.exporters.recipe import Recipe, Reward

PAGE = "DIFFERENCES.md"


def page(recipe: Recipe, exported: Exported, objectives: Sequence[Objective]) -> str:
    """The page as Markdown."""
    goals = ", ".join(f"`{goal.name}` ({goal.direction})" for goal in objectives)
    lines = [
        f"# {recipe.name} in {exported.library}",
        "",
        f"`{exported.file}` repeats {recipe.note}. In {exported.place}, start it with",
        "",
        f"    {exported.command}",
        "",
        "## What you supply",
        "",
        *_table(("key", "what it needs"), ((f"`{k}`", v) for k, v in exported.yours.items())),
        "",
        "## Rewards",
        "",
        "Weights are scaled to a maximum of 1, as they were while it trained. The library applies "
        "no shape and no condition: the functions that you supply have to.",
        "",
        *_table(
            ("reward", "weight", "range", "in training"),
            ((f"`{r.name}`", f"{r.weight:.6g}", _range(r), _shaping(r)) for r in recipe.rewards),
        ),
        "",
        "## What differs",
        "",
        *_table(
            ("", "where it was measured", exported.library),
            ((d.what, d.here, d.there) for d in exported.differences),
        ),
        "",
        "Not exported: held-out evaluation. The values of this trial are unweighted metrics "
        f"({goals}) on test prompts; a reward that the library logs is weighted and is none of "
        "them.",
    ]
    return "\n".join(lines) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [row(heads), row(["---"] * len(heads)), *map(row, rows)]


def _range(reward: Reward) -> str:
    known = math.isfinite(reward.high - reward.low)
    return f"{reward.low:g} to {reward.high:g}" if known else "not stated"


def _shaping(reward: Reward) -> str:
    return "; ".join(reward.shaping) or "as the task gives it"
