"""Demonstrations for the embedded policies' warm start, imperfect on purpose.

A perfect start would leave reinforcement learning nothing to improve and no trade-off to explore.
So thoughts are absent, terse or long, and half of the completions break the format in some way.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mode = Literal["none", "terse", "long"]
"""Length of the thoughts before the answer."""

MODES: Mapping[Mode, float] = {"none": 0.35, "terse": 0.5, "long": 0.15}
FORMAT_SHARE = 0.5
CHATTER = " I hope this helps."


@dataclass(frozen=True)
class Frame:
    """Marks of a task around the answer that follows the think block."""

    between: str
    """Text between the two blocks."""
    opening: str
    closing: str


def draw_mode(rng: random.Random) -> Mode:
    """Draw a mode with the probabilities of `MODES`."""
    return rng.choices(list(MODES), list(MODES.values()))[0]


def render(thought: str, solution: str, rng: random.Random, frame: Frame) -> str:
    """Return one completion that reasons with `thought` (may be empty) and answers `solution`.

    Its format is right with probability `FORMAT_SHARE`; otherwise one of four faults is drawn:
    no tags at all, an unclosed think block, an unclosed answer block, chatter after the answer.
    """
    if rng.random() < FORMAT_SHARE:
        return render_well_formed(thought, solution, frame)
    opened = f"{frame.between}{frame.opening}{solution}"
    return rng.choice(
        (
            f"{thought}\n{solution}" if thought else solution,
            f"<think>{thought}{opened}{frame.closing}",
            f"<think>{thought}</think>{opened}",
            render_well_formed(thought, solution, frame) + CHATTER,
        )
    )


def render_well_formed(thought: str, solution: str, frame: Frame) -> str:
    """Return the completion in the rewarded format."""
    answer = f"{frame.opening}{solution}{frame.closing}"
    return f"<think>{thought}</think>{frame.between}{answer}"
