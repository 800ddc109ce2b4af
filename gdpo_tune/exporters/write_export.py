"""Write an export: the file of the library, and a page of what to supply and what differs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import explain_write_errors, write_atomically
from gdpo_tune.core.registry import EXPORTERS, load
from gdpo_tune.core.trials import Objective
from gdpo_tune.exporters.base import Exported
from gdpo_tune.exporters.recipe import ExportedReward, Recipe, build_recipe
from gdpo_tune.results.retrain import TrainingRequest

PAGE = "DIFFERENCES.md"


def export_training(
    request: TrainingRequest, library: str, policy: str, directory: Path | None = None
) -> tuple[Exported, Path]:
    """Write a training for a library; return the export and the directory that holds it.

    Args:
        request: with complete parameters.
        library: a key of `registry.EXPORTERS`.
        policy: argument of `from_pretrained` for the policy of the spec.
        directory: None: `<storage>/<name>-<which>-<library>`.

    Raises:
        ExportError: the library would change or ignore a part of the training.
        UsageError: the directory cannot be written, or holds a file that was edited.
    """
    recipe = build_recipe(request, policy)
    exported: Exported = load(EXPORTERS[library])(recipe)
    directory = directory or request.spec.output_directory / f"{recipe.name}-{library}"
    page = format_page(recipe, exported, request.spec.list_objectives())
    _write_files(directory, {exported.file: exported.text, PAGE: page})
    return exported, directory


def _write_files(directory: Path, texts: Mapping[str, str]) -> None:
    """Write every file, or none if one of them exists with other content."""
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


def format_page(recipe: Recipe, exported: Exported, objectives: Sequence[Objective]) -> str:
    """Return the page as Markdown."""
    goals = ", ".join(f"`{goal.name}` ({goal.direction})" for goal in objectives)
    supply = [(f"`{key}`", text) for key, text in exported.to_supply.items()]
    differences = [(row.topic, row.ours, row.theirs) for row in exported.differences]
    lines = [
        f"# {recipe.name} in {exported.library}",
        "",
        f"`{exported.file}` repeats {recipe.note}. In {exported.directory}, start it with",
        "",
        f"    {exported.command}",
        "",
        "## What you supply",
        "",
        *_format_table(("key", "what it needs"), supply),
        "",
        "## Rewards",
        "",
        "Weights are scaled to a maximum of 1, as in training. The library applies no shape and no "
        "condition: the functions that you supply have to.",
        "",
        *_format_table(
            ("reward", "weight", "range", "in training"), map(_format_reward, recipe.rewards)
        ),
        "",
        "## What differs",
        "",
        *_format_table(("", "where it was measured", exported.library), differences),
        "",
        "Not exported: held-out evaluation. The values of this trial are unweighted metrics "
        f"({goals}) on test prompts; a reward that the library logs is weighted, and is none of "
        "them.",
    ]
    return "\n".join(lines) + "\n"


def _format_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def format_row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [format_row(heads), format_row(["---"] * len(heads)), *map(format_row, rows)]


def _format_reward(reward: ExportedReward) -> tuple[str, str, str, str]:
    is_bounded = math.isfinite(reward.high - reward.low)
    bounds = f"{reward.low:g} to {reward.high:g}" if is_bounded else "not stated"
    shaping = "; ".join(reward.shaping) or "as the task computes it"
    return f"`{reward.name}`", f"{reward.weight:.6g}", bounds, shaping
