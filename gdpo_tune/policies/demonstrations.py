"""Demonstrations for the embedded policy's warm start, imperfect on purpose.

A perfect start would leave reinforcement learning nothing to improve and no trade-off to explore:
so thoughts are absent, terse or long, and half of the completions break the format in some way.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal

Mode = Literal["none", "terse", "long"]
"""How much is thought before the answer."""

MODES: Mapping[Mode, float] = {"none": 0.35, "terse": 0.5, "long": 0.15}
FORMAT_SHARE = 0.5
CHATTER = " I hope this helps."


def draw_mode(rng: random.Random) -> Mode:
    """A mode with the probabilities of `MODES`."""
    return rng.choices(list(MODES), list(MODES.values()))[0]


def render(thought: str, solution: str, rng: random.Random) -> str:
    """One completion that reasons with `thought` (may be empty) and answers with `solution`.

    Its format is right with probability `FORMAT_SHARE`; otherwise one of four faults is drawn:
    no tags at all, an unclosed think block, an unclosed answer block, chatter after the answer.
    """
    if rng.random() < FORMAT_SHARE:
        return well_formed(thought, solution)
    return rng.choice(
        (
            f"{thought}\n{solution}" if thought else solution,
            f"<think>{thought}<answer>{solution}</answer>",
            f"<think>{thought}</think><answer>{solution}",
            well_formed(thought, solution) + CHATTER,
        )
    )


def well_formed(thought: str, solution: str) -> str:
    """The completion that the format asks for."""
    return f"<think>{thought}</think><answer>{solution}</answer>"
