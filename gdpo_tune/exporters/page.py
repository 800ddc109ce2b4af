"""Page of an export: what carries over, what the user supplies, the rewards, what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from gdpo_tune.core.task_files import is_task_file, load_task_info
from gdpo_tune.core.text import render_table
from gdpo_tune.exporters.library import PROMPTS_FILE, REWARDS_FILE, Exported
from gdpo_tune.exporters.reward_files import TASK_COPY
from gdpo_tune.exporters.training_prompts import REFERENCE_FILE
from gdpo_tune.exporters.training_setup import ExportedReward, TrainingSetup, describe_length
from gdpo_tune.results.transfer import Transfer

PAGE = "DIFFERENCES.md"
SIZES = """
What is "measured" was computed by the code of both on one batch: see "Measured differences" in \
`docs/export.md` of gdpo_tune.
"""


def format_page(setup: TrainingSetup, exported: Exported, *, references_data: bool = False) -> str:
    """Return the page as Markdown."""
    verb = "repeats" if setup.request.transfer is None else "adapts"
    chosen = "".join(f"- {line}\n" for line in setup.request.trial_lines)
    supply = [(f"`{key}`", text) for key, text in _list_supplies(setup, exported).items()]
    supplies = render_table(("key", "what it needs"), supply) if supply else "Nothing."
    rows = [(row.topic, row.ours, row.theirs) for row in exported.differences]
    sizes = SIZES if any("measured" in theirs for _, _, theirs in rows) else ""
    objectives = setup.spec.objectives.items()
    goals = ", ".join(f"`{name}` ({goal.direction})" for name, goal in objectives)
    metrics = f"""
Not exported: held-out evaluation. A sweep compares unweighted metrics ({goals}) on test prompts. \
A reward that the library logs is none of them.
"""
    prompts = (
        f"`run.sh` first makes `{PROMPTS_FILE}` of {setup.spec.data.source}. Without a network, "
        f"make it of a copy: `python {REFERENCE_FILE} FILE`. "
    )
    conversion = (
        f"Then consolidate what it saved, where it is installed:\n\n    {exported.conversion}"
    )
    conversion = f"{conversion}\n\n" if exported.conversion else ""
    return f"""# {setup.name} in {exported.library}
{_format_transfer(setup)}
`{exported.file}` {verb} {setup.note}.
{_format_start(setup)}
{chosen}
Start it in this directory:

    {exported.install}
    {exported.start}

{prompts if references_data else ""}{conversion}Then the policy is in `{exported.result}`.

## What you supply

{supplies}
{_format_rewards(setup.rewards)}
## What differs

{render_table(("", "gdpo_tune", exported.library), rows)}
{sizes}{metrics if setup.rewards else ""}"""


def _format_start(setup: TrainingSetup) -> str:
    if setup.spec.start is None or setup.request.begins_merged:
        return ""
    return f"""
It begins at the policy after the supervised start of its sweep ({setup.spec.start.steps} steps on \
demonstrations), here `{setup.policy}`, and not at {setup.spec.policy}. That is the reference of \
the KL, too.
"""


def _format_transfer(setup: TrainingSetup) -> str:
    transfer = setup.request.transfer
    if transfer is None:
        return ""
    carried = ", ".join(f"`{setting}`" for setting in transfer.carried)
    items = "".join(f"- {item}\n" for item in _list_items(setup, transfer))
    rows = [(f"`{v.key}`", v.searched, v.wanted, v.source) for v in transfer.moved]
    return f"""
**This is not what the sweep searched: {transfer.title}.** The sweep measured on \
{transfer.conditions}.

- Carries over: {carried}. No training on the new ones has confirmed it.
- Does not carry over: the metrics of the candidate, and the settings in the table.
{items}
{render_table(("setting", "in the sweep", "here", "taken from"), rows)}
"""


def _list_items(setup: TrainingSetup, transfer: Transfer) -> Iterator[str]:
    if transfer.kept:
        kept = ", ".join(f"`{setting}`" for setting in transfer.kept)
        yield (
            f"Kept from the candidate, and perhaps wrong here: {kept}. Change them with "
            "`--set space.<name>=<value>`."
        )
    reward = load_task_info(transfer.searched.task, setup.params).length_reward
    before, here = transfer.searched.training, setup.spec.training
    if reward not in {each.name for each in setup.rewards}:
        return
    searched, wanted = (describe_length(setup.params, each) for each in (before, here))
    if searched == wanted:
        return
    shape = setup.params.get("length_shape", "step")
    meaning = {
        "ramp": "The shape carries over; it falls from `training.length_limit` to the longest.",
        "overlong": "`length_cache` carries over as a share of the longest, not in tokens.",
    }.get(str(shape), "The shape carries over, not its tokens.")
    yield f"Reward `{reward}`: {searched}, in the sweep; {wanted}, here. {meaning}"


def _list_supplies(setup: TrainingSetup, exported: Exported) -> dict[str, str]:
    supplies = dict(exported.required_inputs)
    if Path(setup.policy).is_absolute() and setup.policy in exported.text:
        supplies[exported.file] = (
            f"the directory {setup.policy}, which another machine lacks: copy it there, and name "
            "its place, or the same model on the Hub, with --base-model NAME_OR_PATH of the export"
        )
    if is_task_file(setup.spec.task) and exported.training is not None:
        supplies[TASK_COPY] = "files that your task reads, which are not here: copy them"
    return supplies


def _format_rewards(rewards: Sequence[ExportedReward]) -> str:
    if not rewards:
        return ""
    return f"""
## Rewards

Weights are scaled to a maximum of 1, as in training. `{REWARDS_FILE}` computes the rewards and \
shapes them; the library weighs them, or gets their weighted sum.

{render_table(("reward", "weight", "range", "in training"), map(_format_reward, rewards))}
"""


def _format_reward(reward: ExportedReward) -> tuple[str, str, str, str]:
    is_bounded = math.isfinite(reward.high - reward.low)
    bounds = f"{reward.low:g} to {reward.high:g}" if is_bounded else "not stated"
    shaping = "; ".join(reward.shaping) or "as the task computes it"
    return f"`{reward.name}`", f"{reward.weight:.6g}", bounds, shaping
