"""The first section of an export's page: what carries over from the sweep, and what does not."""

from __future__ import annotations

from collections.abc import Iterator

from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.exporters.markdown import format_table
from gdpo_tune.exporters.recipe import Recipe, describe_length
from gdpo_tune.results.transfer import Transfer


def format_transfer(recipe: Recipe) -> str:
    """Return the section as Markdown; empty if policy, data and lengths are those of the sweep."""
    transfer = recipe.transfer
    if transfer is None:
        return ""
    carried = ", ".join(f"`{setting}`" for setting in transfer.carried)
    items = "".join(f"- {item}\n" for item in _list_items(recipe, transfer))
    rows = [(f"`{v.key}`", v.searched, v.wanted, v.source) for v in transfer.moved]
    return f"""
**This is not what the sweep searched: {transfer.title}.** The sweep measured on \
{transfer.conditions}.

- Carries over: {carried}. No training on the new ones has confirmed it.
- Does not carry over: the metrics of the candidate, and the settings in the table.
{items}
{format_table(("setting", "in the sweep", "here", "taken from"), rows)}
"""


def _list_items(recipe: Recipe, transfer: Transfer) -> Iterator[str]:
    """Yield what is not in the table."""
    if transfer.kept:
        kept = ", ".join(f"`{setting}`" for setting in transfer.kept)
        yield (
            f"Kept from the candidate, and perhaps wrong here: {kept}. Change them with "
            "`--set space.<name>=<value>`."
        )
    reward = load_task_info(transfer.searched.task, recipe.params).length_reward
    before, here = transfer.searched.training, recipe.training
    if reward not in {each.name for each in recipe.rewards}:
        return
    searched, wanted = (
        describe_length(recipe.params, each.length_limit, each.max_completion_length)
        for each in (before, here)
    )
    if searched == wanted:
        return
    shape = recipe.params.get("length_shape", "step")
    meaning = {
        "ramp": "The shape carries over; it falls from `training.length_limit` to the longest.",
        "overlong": "`length_cache` carries over as a share of the longest, not in tokens.",
    }.get(str(shape), "The shape carries over, not its tokens.")
    yield f"Reward `{reward}`: {searched}, in the sweep; {wanted}, here. {meaning}"
