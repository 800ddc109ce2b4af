"""Write an export: the file of the library, and a page of what to supply and what differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from gdpo_tune.core.errors import ExportError, SpecProblem, UsageError
from gdpo_tune.core.files import explain_write_errors, write_atomically
from gdpo_tune.core.registry import EXPORTERS, load
from gdpo_tune.core.trials import Objective
from gdpo_tune.exporters.base import Exported
from gdpo_tune.exporters.markdown import format_table
from gdpo_tune.exporters.recipe import ExportedReward, Recipe, build_recipe
from gdpo_tune.exporters.transfer_page import format_transfer
from gdpo_tune.results.parents import explain_merge
from gdpo_tune.results.retrain import TrainingRequest

PAGE = "DIFFERENCES.md"
MERGERS = ("mergekit",)
"""Libraries that merge policies; all others train one."""


def export_training(
    request: TrainingRequest, library: str, policy: str, directory: Path | None = None
) -> tuple[Exported, Path]:
    """Write a training for a library; return the export and the directory that holds it.

    `library` is a key of `registry.EXPORTERS`; `policy` is the argument of `from_pretrained` for
    the policy of the spec. Default of `directory`: `<storage>/<name>-<which>-<library>`.

    Raises:
        ExportError: the library would change or ignore a part of the training; or it trains, and
            this is a merge.
        UsageError: the directory cannot be written, or holds a file that was edited.
    """
    if request.parents and library not in MERGERS:
        command = f"python -m gdpo_tune.export {{}} --to {library}"
        reason, fix = explain_merge(request.name, request.parents, request.sweep, command)
        raise ExportError(library, (SpecProblem(request.sweep, "", "", reason, fix),))
    recipe = build_recipe(request, policy)
    exported: Exported = load(EXPORTERS[library])(recipe)
    directory = directory or request.spec.output_directory / f"{recipe.name}-{library}"
    page = format_page(recipe, exported, request.spec.list_objectives())
    texts = {exported.file: exported.text, PAGE: page}
    with explain_write_errors("the export"):
        for name, text in texts.items():
            file = directory / name
            if file.exists() and file.read_bytes() != text.encode():
                raise UsageError(
                    f"{file} exists with other content, which may be your work\n"
                    "    fix: choose another --out, or remove it"
                )
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(directory / name, text)
    return exported, directory


def format_page(recipe: Recipe, exported: Exported, objectives: Sequence[Objective]) -> str:
    """Return the page as Markdown."""
    goals = ", ".join(f"`{goal.name}` ({goal.direction})" for goal in objectives)
    supply = [(f"`{key}`", text) for key, text in exported.to_supply.items()]
    supplies = format_table(("key", "what it needs"), supply) if supply else "Nothing."
    differences = [(row.topic, row.ours, row.theirs) for row in exported.differences]
    return f"""# {recipe.name} in {exported.library}
{format_transfer(recipe)}
`{exported.file}` repeats {recipe.note}. In {exported.directory}, start it with

    {exported.command}

## What you supply

{supplies}
{_format_rewards(recipe.rewards)}
## What differs

{format_table(("", "where it was measured", exported.library), differences)}

Not exported: held-out evaluation. The values of this candidate are unweighted metrics ({goals}) \
on test prompts; a reward that the library logs is weighted, and is none of them.
"""


def _format_rewards(rewards: Sequence[ExportedReward]) -> str:
    """Return the section of the rewards; empty lines for a merge, which has none."""
    if not rewards:
        return ""
    return f"""
## Rewards

Weights are scaled to a maximum of 1, as in training. The library applies no shape and no \
condition: the functions that you supply have to.

{format_table(("reward", "weight", "range", "in training"), map(_format_reward, rewards))}
"""


def _format_reward(reward: ExportedReward) -> tuple[str, str, str, str]:
    is_bounded = math.isfinite(reward.high - reward.low)
    bounds = f"{reward.low:g} to {reward.high:g}" if is_bounded else "not stated"
    shaping = "; ".join(reward.shaping) or "as the task computes it"
    return f"`{reward.name}`", f"{reward.weight:.6g}", bounds, shaping
