"""Page of an export: what the user supplies, the rewards, and what differs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gdpo_tune.core.service_url import drop_credentials
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.core.trials import Objective
from gdpo_tune.exporters.base import REWARDS_FILE, START, Difference, Exported
from gdpo_tune.exporters.glue.programs import SERVICE
from gdpo_tune.exporters.markdown import format_table
from gdpo_tune.exporters.recipe import ExportedReward, Recipe
from gdpo_tune.exporters.reward_file import TASK_COPY
from gdpo_tune.exporters.transfer_page import format_transfer

PAGE = "DIFFERENCES.md"


def format_page(
    recipe: Recipe,
    exported: Exported,
    objectives: Sequence[Objective],
    differences: Sequence[Difference] = (),
) -> str:
    """Return the page as Markdown; `differences` are those beside the library's own."""
    goals = ", ".join(f"`{goal.name}` ({goal.direction})" for goal in objectives)
    supply = [(f"`{key}`", text) for key, text in _list_supplies(recipe, exported).items()]
    supplies = format_table(("key", "what it needs"), supply) if supply else "Nothing."
    rows = [(row.topic, row.ours, row.theirs) for row in (*exported.differences, *differences)]
    return f"""# {recipe.name} in {exported.library}
{format_transfer(recipe)}
`{exported.file}` repeats {recipe.note}. Start it in this directory:

    {exported.install}
    {START}

## What you supply

{supplies}
{_format_rewards(recipe.rewards)}
## What differs

{format_table(("", "where it was measured", exported.library), rows)}

Not exported: held-out evaluation. The values of this candidate are unweighted metrics ({goals}) \
on test prompts; a reward that the library logs is weighted, and is none of them.
"""


def _list_supplies(recipe: Recipe, exported: Exported) -> dict[str, str]:
    """Return key -> what the user has to put there."""
    supplies = dict(exported.to_supply)
    if recipe.sandbox.url != drop_credentials(recipe.sandbox.url):
        supplies[SERVICE] = "an environment variable: the address of the sandbox, with its password"
    if is_task_file(recipe.task) and exported.training is not None:
        supplies["gdpo-tune"] = (
            f"the package, which `{TASK_COPY}` imports: pip install --no-deps gdpo-tune. Files "
            "that the task reads are not here: copy them"
        )
    return supplies


def _format_rewards(rewards: Sequence[ExportedReward]) -> str:
    """Return the section of the rewards; empty lines for a merge, which has none."""
    if not rewards:
        return ""
    return f"""
## Rewards

Weights are scaled to a maximum of 1, as in training. `{REWARDS_FILE}` computes the rewards and \
shapes them; the library weighs them, or gets their weighted sum.

{format_table(("reward", "weight", "range", "in training"), map(_format_reward, rewards))}
"""


def _format_reward(reward: ExportedReward) -> tuple[str, str, str, str]:
    is_bounded = math.isfinite(reward.high - reward.low)
    bounds = f"{reward.low:g} to {reward.high:g}" if is_bounded else "not stated"
    shaping = "; ".join(reward.shaping) or "as the task computes it"
    return f"`{reward.name}`", f"{reward.weight:.6g}", bounds, shaping
